"""The one error a user can cause: what is wrong, where, and how to mend it, in one sentence."""


class InputError(ValueError):
    """Bad input. The message is one sentence for a person; the command line prints it and exits with 2."""
