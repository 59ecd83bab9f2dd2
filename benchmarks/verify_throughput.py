"""Verdicts a second a core: plain numbers with and without a worker process, answers of all kinds, whole batches.

How it is measured: every gold answer is judged against itself in a box and against the next row's answer, as `verify`
sees a right and a wrong completion. Each line starts with a fresh worker, so nothing has been parsed before; in
training, where a gold comes back with every completion, it is faster. The rows are made here, or read from JSON Lines
files with a column `answer`.

    numbers     plain numbers, compared in the calling process
    in_worker   the same pairs, sent to a worker
    expressions the other answers, in one worker
    batch       those again, by `verify_all` over the whole pool (a second of wall clock, whatever the cores)

The first three are for one second of CPU time, of this process and its workers together. Golds that are not True
against themselves are listed. The last line is `numbers=... in_worker=... expressions=... batch=...`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.tasks import _verify_process
from trimtab.tasks._answer_text import canonical_latex
from trimtab.tasks._plain_number import plain_number
from trimtab.tasks.verify import verify, verify_all

Pair = tuple[str, str]


def made_rows(rows: int) -> list[str]:
    """Answers of the kinds that data sets hold, a fifth of them plain numbers."""
    draw = random.Random(0)
    kinds: list[Callable[[int, int], str]] = [
        lambda a, b: str(a * b),
        lambda a, b: rf"\frac{{{a}}}{{{b}}}",
        lambda a, b: f"{a}.{b:02d}",
        lambda a, b: rf"{a}\sqrt{{{b}}}",
        lambda a, b: rf"\left({a}, \frac{{\pi}}{{{b}}}\right)",
        lambda a, b: f"{a}x^2 - {b}x + 1",
        lambda a, b: rf"({-a}, {b}) \cup [{b + 1}, \infty)",
        lambda a, b: rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
        lambda a, b: f"{a}, {-b}",
        lambda a, b: f"y = {a}x + {b}",
    ]
    return [draw.choice(kinds)(draw.randint(2, 99), draw.randint(2, 99)) for _ in range(rows)]


def read_rows(path: Path) -> list[str]:
    """The column `answer`; empty ones are left out."""
    answers = [str(json.loads(line)["answer"]) for line in path.read_text(encoding="utf-8").splitlines()]
    return [answer for answer in answers if answer]


def pairs_of(golds: Sequence[str]) -> list[Pair]:
    """Each gold with itself and with its neighbour."""
    following = [*golds[1:], *golds[:1]]
    return [pair for gold, other in zip(golds, following, strict=True) for pair in ((gold, gold), (gold, other))]


def worker_seconds() -> float:
    """CPU seconds of the workers that run (Linux; 0 elsewhere)."""
    total = 0.0
    for worker in _verify_process._running:
        try:
            fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def start_fresh() -> None:
    """Replace the workers by one that has parsed nothing but has its modules loaded."""
    _verify_process.shutdown()
    verify(gold="2x", prediction="x+x")


def rate(judge: Callable[[Pair], object], pairs: Sequence[Pair]) -> float:
    """Verdicts a CPU second."""
    start_fresh()
    start = time.process_time() + worker_seconds()
    for pair in pairs:
        judge(pair)
    return len(pairs) / max(time.process_time() + worker_seconds() - start, 1e-9)


def main() -> None:
    """Print the rates, and the golds that do not equal themselves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], metavar="FILE", help="JSON Lines, column `answer`")
    parser.add_argument("--rows", type=int, default=2000, help="rows to make when there is no file")
    options = parser.parse_args()
    golds: list[str] = []
    for path in options.data:
        rows = read_rows(path)
        verdicts = verify_all(golds=rows, predictions=[rf"\boxed{{{row}}}" for row in rows])
        print(f"{path.name}: {len(rows)} golds against themselves, {verdicts.count(True)} True")
        for row, verdict in zip(rows, verdicts, strict=True):
            if verdict is not True:
                print(f"  {verdict}: {row!r}")
        golds.extend(rows)
    golds = golds or made_rows(options.rows)
    random.Random(0).shuffle(golds)
    numeric = pairs_of([gold for gold in golds if plain_number(gold)][: options.rows])
    others = pairs_of([gold for gold in golds if not plain_number(gold)][: options.rows])

    def in_worker(pair: Pair) -> object:
        return _verify_process.judge(canonical_latex(pair[0]), canonical_latex(pair[1]), 5.0)

    def as_completion(pair: Pair) -> object:
        return verify(gold=pair[0], prediction=rf"so \boxed{{{pair[1]}}}")

    rates = {"numbers": rate(as_completion, numeric), "in_worker": rate(in_worker, numeric)}
    rates["expressions"] = rate(as_completion, others)
    start_fresh()
    start = time.perf_counter()
    verify_all(golds=[gold for gold, _ in others], predictions=[rf"\boxed{{{other}}}" for _, other in others])
    rates["batch"] = len(others) / (time.perf_counter() - start)
    print(f"{len(numeric)} pairs of plain numbers, {len(others)} others, {_verify_process.pool_size()} workers at most")
    print(" ".join(f"{name}={value:.0f}/s" for name, value in rates.items()))


if __name__ == "__main__":
    main()
