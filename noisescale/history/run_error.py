# SPDX-License-Identifier: Apache-2.0
"""Why a run cannot be read, in a sentence and in a word."""

from __future__ import annotations

UNUSABLE = "unusable"
"""The word for what has none of its own."""


class RunError(ValueError):
    """A refusal of a run's files, with a word for it.

    Example:
        >>> RunError("empty", "`version_0` must hold events, got none.").word
        'empty'
    """

    def __init__(self, word: str, message: str) -> None:
        super().__init__(message)
        self.word = word
        """For a cell of a table: "unmeasured", "empty", "truncated" or "absent"."""


def word_for(error: BaseException) -> str:
    """Return the word of an error or of what caused it, `UNUSABLE` where neither has one."""
    known = (each for each in (error, error.__cause__) if isinstance(each, RunError))
    return next((each.word for each in known), UNUSABLE)
