"""The command line. Nothing heavy is imported before a command runs, so that `trimtab --help` answers at once."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab import __version__
from trimtab.errors import InputError, Interrupted, RunError

app = typer.Typer(
    name="trimtab",
    help="Stable post-training of language models: GTPO next to GRPO and its relatives, GVPO, distillation and SFT.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FAILED, INTERRUPTED = 1, 130


class KeysCommand(typer.core.TyperCommand):
    """A command whose help ends with every key of its configuration."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The usual help, then the keys."""
        from rich.console import Console
        from rich.table import Table

        from trimtab.config_file import describe_keys, describe_methods

        super().format_help(ctx, formatter)
        console = Console()
        keys = Table("key", "default", "meaning", title="Keys of the configuration", title_justify="left")
        for key, default, meaning in describe_keys(self._section()):
            keys.add_row(key, default, meaning)
        console.print(keys)
        if self.name != "train":
            return
        methods = Table("method", "arXiv", "settings and defaults", title="Methods", title_justify="left")
        for row in describe_methods():
            methods.add_row(*row)
        console.print(methods)

    def _section(self) -> Any:
        if self.name == "evaluate":
            from trimtab.evaluation.config import EvaluateConfig

            return EvaluateConfig
        from trimtab.config import RunConfig

        return RunConfig


def _version(value: bool) -> None:
    if value:
        print(f"trimtab {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command(cls=KeysCommand)
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Keys to set, e.g. optimizer.learning_rate=1e-6."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the configuration and leave; no model loads.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Train, or continue a run that was stopped: the same command again."""
    from trimtab.config_file import load_config

    run_config = load_config(config, overrides)
    if check:
        from trimtab.training.combinations import check_combinations

        check_combinations(run_config)
        print(f"{config}: a valid configuration for {run_config.method['name']}")
        return
    from trimtab.training.run import run_training

    run_training(run_config, quiet=quiet)
    print(f"done: {run_config.output}")


@app.command(cls=KeysCommand)
def evaluate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="What is evaluated, on what.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Keys to set, e.g. samples=64 or 'models=[{run: runs/gtpo}]'."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration, its runs and its data and leave.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Sample from models, runs and endpoints and count: pass@k, maj@k, intervals. The same command continues."""
    from trimtab.config_file import load_config_as
    from trimtab.evaluation.config import EvaluateConfig

    evaluate_config = load_config_as(EvaluateConfig, config, overrides)
    from trimtab.evaluation.run import check_evaluation, run_evaluation
    from trimtab.evaluation.show import print_results

    if check:
        print(f"{config}: {check_evaluation(evaluate_config)}")
        return
    print_results(run_evaluation(evaluate_config, quiet=quiet))
    print(f"done: {evaluate_config.output}")


@app.command()
def table(
    evaluations: Annotated[
        list[Path],
        typer.Argument(metavar="EVALUATION ...", help="Folders of evaluations, or CSV files of scores."),
    ],
    paper: Annotated[bool, typer.Option("--paper", help="Rows of the GTPO paper's Table 1 beside yours.")] = False,
    metric: Annotated[
        str, typer.Option(help="Of pass, first, maj, maj_first, mean, format, truncated, entropy, tokens.")
    ] = "pass,maj",
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="markdown, csv, csv-wide, latex or html; default: by the file's ending, else markdown."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; default: the terminal.")] = None,
) -> None:
    """Lay evaluations out as the paper's Table 1: model x training set x method, data set x metric@k."""
    from trimtab.evaluation.scores import collect_scores
    from trimtab.evaluation.table_formats import write_table

    metrics = [name.strip() for name in metric.split(",") if name.strip()]
    write_table(collect_scores(evaluations, paper=paper), metrics, form, output)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the runs and the page.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds a setting.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps a run.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
) -> None:
    """Train GRPO and GTPO side by side on the built-in task and show what came out, in under five minutes."""
    from trimtab.demo import run_demo

    run_demo(output, seeds=seeds, steps=steps, workers=workers)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs and of evaluations.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Show runs and evaluations side by side on one HTML page that opens from disk."""
    from trimtab.report.build import write_report

    write_report(runs, output)
    print(f"written: {output}")


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a JSONL file of rollouts.")],
    step: Annotated[int | None, typer.Option(help="Step to show first; default: the newest logged one.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; default: inspector.html in the run's folder.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method whose weights are computed; default: the run's own, else gtpo.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Name or folder of a tokenizer, for rollouts without token ids.")
    ] = None,
) -> None:
    """Show sampled groups side by side, every token coloured by the weight that the method gives it."""
    from trimtab.report.inspector import inspect_rollouts

    page = inspect_rollouts(run, output=output, step=step, method=method, tokenizer=tokenizer)
    print(f"written: {page}")


@app.command()
def merge(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="The merge file.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the merged model.")] = Path("merged"),
    recipe: Annotated[str | None, typer.Option(help="Instead of CONFIG: rombodawg or average.")] = None,
    base: Annotated[str | None, typer.Option(help="Of a recipe: the model that training began at.")] = None,
    instruct: Annotated[str | None, typer.Option(help="Of rombodawg: the instruct model.")] = None,
    lora: Annotated[str | None, typer.Option(help="Of rombodawg: the adapter.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Of average: a model or run, once for each.")] = None,
    density: Annotated[float, typer.Option(min=0, max=1, help="Of a recipe: share of each change kept.")] = 1.0,
    evaluate: Annotated[
        Path | None,
        typer.Option(help="Then evaluate inputs and output, as this evaluation says; its models are replaced."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print plan, memory and time, and leave.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Tensors at a time; default: the cores.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of random masks (dare, della).")] = 0,
    shard_size: Annotated[str, typer.Option(help="The most that a file of weights holds.")] = "5GB",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Merge models as a merge file in mergekit's form, or a recipe, says."""
    from trimtab.merging.command import run_merge

    options = {"base": base, "instruct": instruct, "lora": lora, "models": model or [], "density": density}
    run_merge(
        config,
        output,
        recipe=recipe,
        recipe_options=options,
        evaluation=evaluate,
        dry_run=dry_run,
        workers=workers,
        seed=seed,
        shard_size=shard_size,
        quiet=quiet,
    )


def main() -> None:
    """Entry point: turns errors into one sentence and an exit code (0 done, 1 failed, 2 bad usage, 130 interrupted)."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))
    # An installed command does not look into the folder it is started from, where people keep their methods and
    # rewards.
    sys.path.append(os.getcwd())
    try:
        app()
    except (InputError, RunError, Interrupted) as error:
        print(f"trimtab: {error}", file=sys.stderr)
        sys.exit(error.code)
    except Exception:
        # Only what nobody foresaw shows a traceback.
        logging.getLogger("trimtab").exception("this should not happen")
        sys.exit(FAILED)
