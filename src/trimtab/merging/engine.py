"""`trimtab merge`: tensor by tensor from the models' files to the output's, in as many threads as there are cores.

    merge("merge.yaml", "merged")

Each tensor is merged for itself, so the result depends neither on the number of threads nor on their order. The output
appears whole under its name or not at all: it is written into a hidden folder beside it that is renamed at the end.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.files import held_alone, sync
from trimtab.merging._output import find_chat_template, write_small_files
from trimtab.merging._streams import all_finite
from trimtab.merging._tensor_plan import TensorPlan
from trimtab.merging.config import MergeConfig, load_merge_config, parse_merge_config
from trimtab.merging.methods import merge_tensors
from trimtab.merging.models import fetch
from trimtab.merging.plan import MergePlan, plan_merge
from trimtab.merging.shards import ShardWriter
from trimtab.merging.tokenizers import select_rows
from trimtab.progress import Progress

logger = logging.getLogger("trimtab")

SHARD_SIZE = "5GB"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def merge(
    config: str | Path | Mapping[str, Any] | MergeConfig,
    output: str | Path,
    *,
    workers: int | None = None,
    seed: int = 0,
    shard_size: str | int = SHARD_SIZE,
    quiet: bool = True,
) -> Path:
    """Merge models into a new folder that transformers loads.

    Args:
        config: a merge file, or what it would hold.
        output: the folder; it must not exist, or be empty.
        workers: tensors at a time; default: the processor's cores.
        seed: of random masks (dare, della).
        shard_size: the most that a file of weights holds, such as `5GB` or a number of bytes.
        quiet: no progress.

    Returns:
        The folder.

    Raises:
        InputError: nothing was written: a file that cannot be read, models that do not fit, no space, an output that is
            there already; or while merging: NaN, overflow, no space left. What was written is removed.
    """
    checked = as_config(config)
    folder = Path(output)
    limit = parse_size(shard_size)
    _check_output(checked, folder)
    plan = plan_merge(checked)
    for complaint in checked.ignored:
        logger.warning("%s", complaint)
    chat_template = find_chat_template(plan)
    threads = worker_count(plan, workers)
    with _appearing_at_the_end(folder) as partial:
        _check_space(plan, partial)
        try:
            writer = ShardWriter(partial, [(one.name, one.shape, one.dtype) for one in plan.tensors], limit)
            try:
                _merge_all(plan, writer, threads, seed, Progress(title="merge", unit="tensor", quiet=quiet))
                writer.finish()
            finally:
                writer.close()
            write_small_files(plan, partial, chat_template)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InputError(f"{folder}: no space is left on the disk; nothing is kept of the merge.") from error
            raise InputError(
                f"{folder}: cannot be written ({error.strerror}); nothing is kept of the merge."
            ) from error
    return folder


def as_config(config: str | Path | Mapping[str, Any] | MergeConfig) -> MergeConfig:
    """A merge file read, or what it would hold checked."""
    if isinstance(config, MergeConfig):
        return config
    return parse_merge_config(config) if isinstance(config, Mapping) else load_merge_config(config)


def merge_one(plan: MergePlan, one: TensorPlan, seed: int = 0) -> Tensor:
    """Read, merge and cast one tensor.

    Args:
        plan: the merge.
        one: of its tensors.
        seed: of random masks.

    Raises:
        InputError: NaN, infinity or overflow, with the model and the tensor.
    """
    tensors = [given.model.read(given.tensor) for given in one.all_inputs]
    if one.in_vocabulary and plan.vocabulary is not None and plan.vocabulary.rows is not None:
        rows = [plan.vocabulary.rows[given.model.name] for given in one.all_inputs]
        tensors = select_rows(tensors, rows, _base_place(plan, one), plan.vocabulary.real)
    # The result has the dtype of the first tensor; a second rounding is avoided by going through float32.
    if tensors[0].is_floating_point() and tensors[0].dtype != one.dtype:
        tensors[0] = tensors[0].float()
    base = tensors.pop() if one.base else None
    names = [str(given.model.name) for given in one.inputs]
    merged = merge_tensors(plan.config.method, tensors, base=base, seed=seed, key=one.name, names=names, **one.settings)
    result = merged.to(one.dtype)
    if result is not merged and result.is_floating_point() and not all_finite(result.view(-1)):
        raise InputError(f"The merge of {one.name!r} overflows {_plain(one.dtype)}; set a wider dtype.")
    return result


def describe(plan: MergePlan, *, workers: int | None = None, shard_size: str | int = SHARD_SIZE) -> str:
    """What a merge would do, and what it would take: for people, several lines. Measures the method for a moment."""
    threads = worker_count(plan, workers)
    limit = parse_size(shard_size)
    total = sum(one.bytes for one in plan.tensors)
    held = sum(sorted((one.memory for one in plan.tensors), reverse=True)[:threads])
    dtypes = ", ".join(sorted({_plain(one.dtype) for one in plan.tensors}))
    settings = {
        key: list(dict.fromkeys(str(_shortened(one.settings[key])) for one in plan.tensors))
        for key in plan.tensors[0].settings
    }
    vocabulary = next((str(one.shape[0]) for one in plan.tensors if one.in_vocabulary), "as in the models")
    lines = [
        f"method     {plan.config.method}",
        *(f"model      {name}" + ("  (base)" if name == plan.config.base else "") for name in plan.models),
        *(f"{key:<10} {', '.join(values[:4])}{', ...' * (len(values) > 4)}" for key, values in settings.items()),
        f"output     {len(plan.tensors)} tensors, {sum(one.elements for one in plan.tensors):,} elements, {dtypes}, "
        f"{_size(total)}, shards of at most {_size(limit)}",
        f"vocabulary {vocabulary}",
        f"memory     about {_size(held)} beside the libraries, {threads} tensors at a time",
        f"time       about {_expected_seconds(plan, threads):.0f} s of calculation, and what the disk takes",
    ]
    return "\n".join(lines)


def worker_count(plan: MergePlan, workers: int | None) -> int:
    """Tensors that are merged at a time.

    Raises:
        InputError: fewer than one.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers is {workers}; it must be at least 1.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(workers or cores, len(plan.tensors))


def parse_size(size: str | int) -> int:
    """Bytes of `5GB`, `500 MB`, `1000000`.

    Raises:
        InputError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", str(size), re.IGNORECASE)
    number = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if number < 1:
        raise InputError(f"shard_size is {size!r}; write it like 5GB.")
    return number


def _merge_all(plan: MergePlan, writer: ShardWriter, threads: int, seed: int, progress: Progress) -> None:
    """Merge and write every tensor. The first error stops what has not begun."""
    before = torch.get_num_threads()

    def work(one: TensorPlan) -> None:
        writer.write(one.name, merge_one(plan, one, seed))

    # A tensor is merged in small pieces, for which torch's own threads cost more than they bring.
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        # Large ones first, so that no thread is left alone with one at the end.
        tasks = [pool.submit(work, one) for one in sorted(plan.tensors, key=lambda one: -one.elements)]
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            progress.count(done, len(tasks))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
        progress.close()


def _base_place(plan: MergePlan, one: TensorPlan) -> int | None:
    """Where the base model is among the inputs: a token that a model lacks gets the base's row."""
    if one.base:
        return len(one.inputs)
    places = (place for place, given in enumerate(one.inputs) if given.model.name == plan.config.base)
    return next(places, None)


def _expected_seconds(plan: MergePlan, threads: int) -> float:
    """From the speed of the method on a few numbers, in one thread."""
    sample = max(plan.tensors, key=lambda one: one.elements)
    count = 1 << 19
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(count, generator=generator).to(given.model.stored(given.tensor).dtype)
        for given in sample.all_inputs
    ]
    base = tensors.pop() if sample.base else None
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.perf_counter()
        merge_tensors(plan.config.method, tensors, base=base, **sample.settings)
        each = (time.perf_counter() - started) / count
    finally:
        torch.set_num_threads(before)
    return each * sum(one.elements for one in plan.tensors) / threads


def _check_output(config: MergeConfig, folder: Path) -> None:
    """Refuse an output that would overwrite something.

    Raises:
        InputError: it is one of the models, or there is something already.
    """
    target = folder.resolve()
    for name in config.models():
        for path in (name.path, name.adapter):
            if path and Path(path).expanduser().is_dir() and fetch(path).resolve() in (target, *target.parents):
                raise InputError(f"{folder} is or lies in the model {path}, which is merged; name another output.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already; name another output, or remove it.")


def _check_space(plan: MergePlan, folder: Path) -> None:
    needed = sum(one.bytes for one in plan.tensors)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(f"The merged model takes {_size(needed)}, but {folder.parent} has {_size(free)} left.")


@contextmanager
def _appearing_at_the_end(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` that becomes it when all went well, and goes when not.

    What a killed merge left there is removed by the next one.
    """
    partial = folder.resolve().parent / f".{folder.resolve().name}.partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}); name another output.") from error
    with held_alone(partial):
        for old in partial.iterdir():
            if old.name != ".lock":
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        try:
            yield partial
            for path in partial.iterdir():
                if path.is_file():
                    sync(path)
            (partial / ".lock").unlink(missing_ok=True)
            sync(partial)
            partial.rename(folder)
            sync(folder.resolve().parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [_shortened(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
