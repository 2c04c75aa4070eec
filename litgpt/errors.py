# Licensed under the Apache License 2.0, see the LICENSE file.

"""Errors that a person can cause and mend: one line that says what is wrong and one that says what to do."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake or a circumstance outside the program; shown as `error:` and `hint:`, never as a traceback.

    Args:
        message: what is wrong, with the values that matter.
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that is not there; also the kind of error that Python has for it."""

    def __str__(self) -> str:
        return ValueError.__str__(self)


def first_line(error: Exception) -> str:
    """What an error of some library says, short enough to be part of a message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UsageError(UserError):
    """A command line that cannot be understood; the same in every way, but the exit code is 2."""
