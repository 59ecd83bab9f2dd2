"""What a person is told in one sentence, without a traceback, and the exit code that goes with it."""


class InputError(ValueError):
    """Bad input: what is wrong, where, and how to mend it."""

    code = 2


class RunError(RuntimeError):
    """A run that cannot go on, and why."""

    code = 1


class Interrupted(Exception):
    """A signal asked the run to stop; its checkpoint is written."""

    def __init__(self, code: int) -> None:
        super().__init__(f"stopped by a signal ({code - 128}); the same command continues the run")
        self.code = code
