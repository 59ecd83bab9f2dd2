"""The command line in a process of its own, which can be hit by a signal at a chosen moment."""

import importlib
import os
import signal
import sys
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# One server imports the heavy libraries; every child is a fork of it and starts at once.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trimtab.training.run", "transformers.models.llama.modeling_llama", "peft"])

PATIENCE = 120
"""Seconds after which a child that hangs fails its test."""


@dataclass(frozen=True)
class Hit:
    """A signal that a process sends itself right before a function's n-th call."""

    function: str
    """`module:name`, where the caller looks it up."""
    call: int = 1
    signal: int = signal.SIGKILL


@dataclass
class Child:
    """`trimtab ARGUMENTS`, running."""

    arguments: list[str]
    log: Path
    hit: Hit | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.process = _CONTEXT.Process(target=_run, args=(self.arguments, str(self.log), self.hit, self.environment))
        self.process.start()

    def wait(self) -> int:
        """The exit code; minus the signal's number when a signal ended it."""
        self.process.join(PATIENCE)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(self.said)
        return self.process.exitcode

    @property
    def said(self) -> str:
        """What it printed, on both streams."""
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""


def _run(arguments: list[str], log: str, hit: Hit | None, environment: dict[str, str]) -> None:
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", **environment})
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = ["trimtab", *arguments]
    import torch

    torch.set_num_threads(1)
    if hit is not None:
        _arrange(hit)
    from trimtab.cli import main

    main()


def _arrange(hit: Hit) -> None:
    module_name, _, name = hit.function.partition(":")
    module = importlib.import_module(module_name)
    original = getattr(module, name)
    calls = 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == hit.call:
            os.kill(os.getpid(), hit.signal)
        return original(*args, **kwargs)

    setattr(module, name, struck)
