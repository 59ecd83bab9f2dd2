"""What `trimtab merge` does beside merging: recipes become a merge file, and a plan can be read first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trimtab.errors import InputError
from trimtab.files import replace_file
from trimtab.merging.config import MergeConfig, load_merge_config, parse_merge_config
from trimtab.merging.engine import describe, merge
from trimtab.merging.models import fetch
from trimtab.merging.plan import plan_merge
from trimtab.merging.recipes import recipe_config

if TYPE_CHECKING:
    from trimtab.evaluation.config import EvaluateConfig


def run_merge(
    config: Path | None,
    output: Path,
    *,
    recipe: str | None,
    recipe_options: Mapping[str, Any],
    evaluation: Path | None = None,
    dry_run: bool,
    workers: int | None,
    seed: int,
    shard_size: str,
    quiet: bool,
) -> None:
    """Merge, or say what a merge would do.

    Args:
        config: the merge file, or None for a recipe.
        output: folder of the merged model; a recipe's merge file is written beside it, as OUTPUT.yaml.
        recipe: name of the recipe, or None.
        recipe_options: keywords of `recipe_config`.
        evaluation: configuration of an evaluation of what was merged and what came out, its models replaced by these;
            None: no evaluation. Its output is OUTPUT-evaluation unless it names another.
        dry_run: only say.
        workers: tensors at a time; None: the cores.
        seed: of random masks.
        shard_size: the most that a file of weights holds.
        quiet: no progress.

    Raises:
        InputError: see `merge`; or neither or both of a merge file and a recipe.
    """
    if (config is None) == (recipe is None):
        raise InputError("Give either a merge file or --recipe; trimtab merge --help lists both.")
    if config is not None:
        given = {key: value for key, value in recipe_options.items() if value and key != "density"}
        if given:
            raise InputError(f"--{next(iter(given)).removesuffix('s')} is of --recipe, and there is a merge file.")
        checked = load_merge_config(config)
    else:
        assert recipe is not None
        text = yaml.safe_dump(recipe_config(recipe, **recipe_options), sort_keys=False, allow_unicode=True)
        checked = parse_merge_config(yaml.safe_load(text), where=f"recipe {recipe}", text=text)
    evaluate_config = None if evaluation is None else _evaluation(evaluation, checked, output)
    if dry_run:
        if recipe is not None:
            print(checked.text)
        print(describe(plan_merge(checked), workers=workers, shard_size=shard_size))
        return
    merge(checked, output, workers=workers, seed=seed, shard_size=shard_size, quiet=quiet)
    if recipe is not None:
        written = output.with_name(f"{output.name}.yaml")
        replace_file(written, checked.text.encode())
        print(f"written: {written}")
    print(f"done: {output}")
    if evaluate_config is not None:
        from trimtab.evaluation.run import run_evaluation
        from trimtab.evaluation.show import print_results

        print_results(run_evaluation(evaluate_config, quiet=quiet))
        print(f"done: {evaluate_config.output}")


def _evaluation(path: Path, config: MergeConfig, output: Path) -> EvaluateConfig:
    """What to evaluate, checked before the merge. A model with an adapter on it is no folder, and left out.

    Raises:
        InputError: the configuration cannot be read or used.
    """
    from trimtab.config_file import parse_config_as, read_yaml
    from trimtab.evaluation.config import EvaluateConfig

    try:
        values = read_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the configuration cannot be read ({error}).") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: a configuration is a mapping of keys to values.")
    merged = [name for name in config.models() if name.adapter is None]
    models = [
        {"model": str(fetch(name.path)) if Path(name.path).is_dir() else name.path, "label": str(name)}
        for name in merged
    ]
    values["models"] = [*models, {"model": str(output), "label": "merged"}]
    values.setdefault("output", f"{output}-evaluation")
    return parse_config_as(EvaluateConfig, values, where=str(path))
