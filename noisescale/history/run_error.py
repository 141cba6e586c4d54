# SPDX-License-Identifier: Apache-2.0
"""The reason why a run cannot be read, as a sentence and as a word."""

from __future__ import annotations

UNUSABLE = "unusable"
"""The word for an error that has no word of its own."""


class RunError(ValueError):
    """The files of a run cannot be used. The error has a word for the reason.

    Examples:
        >>> RunError("empty", "`version_0` must contain events, got none.").word
        'empty'
    """

    def __init__(self, word: str, message: str) -> None:
        super().__init__(message)
        self.word = word
        """The reason, short enough for a table: "unmeasured", "empty", "truncated" or "absent"."""


def word_for(error: BaseException) -> str:
    """Return the word of an error or of its cause; `UNUSABLE` if neither has a word."""
    known = (each for each in (error, error.__cause__) if isinstance(each, RunError))
    return next((each.word for each in known), UNUSABLE)
