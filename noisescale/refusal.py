# SPDX-License-Identifier: Apache-2.0
"""The error of an argument, a file or a setting that cannot be used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

from noisescale.printable import printable


class Refusal(ValueError):
    """What was given cannot be used. The text of the error is made of its fields.

    Fields hold text from elsewhere, such as names in files, as it is. In the text of the error
    characters that do not print are escaped.

    Args:
        argument: The name of the argument, or of the file; or several names.
        requirement: What it must be or do. It follows the word "must".
        got: What was given.
        remedy: What to do. One or more sentences. Default: to leave the argument out.
        at: The file and the line in which it was found.
        word: The reason, short enough for a table, for example "unmeasured".

    Examples:
        >>> raise Refusal("price", "be positive", "-1", "Give a price in any currency.")
        Traceback (most recent call last):
        ...
        noisescale.refusal.Refusal: `price` must be positive, got -1. Give a price in any currency.
    """

    def __init__(
        self,
        argument: str | PathLike[str] | tuple[str, ...],
        requirement: str,
        got: object,
        remedy: str = "Leave it out.",
        *,
        at: tuple[str | PathLike[str], int] | None = None,
        word: str = "",
    ) -> None:
        self.arguments = argument if isinstance(argument, tuple) else (str(argument),)
        self.requirement, self.got, self.remedy, self.word = requirement, f"{got}", remedy, word
        self.at = None if at is None else (str(at[0]), at[1])
        *others, last = (f"`{name}`" for name in self.arguments)
        names = f"{', '.join(others)} and {last}" if others else last
        where = ""
        if self.at is not None:
            file, line = self.at
            where = f" in line {line}" + (f" of {file}" if file not in self.arguments else "")
        super().__init__(printable(f"{names} must {requirement}, got {got}{where}. {remedy}"))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make it again: workers send their errors to the process that waits."""
        return _again, (type(self), self._fields())

    def _fields(self) -> dict[str, Any]:
        names = ("requirement", "got", "remedy", "at", "word")
        return {"argument": self.arguments, **{name: getattr(self, name) for name in names}}

    def with_names(self, names: Mapping[str, str]) -> Refusal:
        """Return the same error for a reader who knows the arguments by other names.

        Names in backticks are replaced in all fields, "`name=value`" as a whole.

        Examples:
            >>> refused = Refusal("goal", "come with `second_run`", "one alone", "Give both.")
            >>> print(refused.with_names({"goal": "--goal", "second_run": "--second-run"}))
            `--goal` must come with `--second-run`, got one alone. Give both.
        """
        known = re.compile(rf"`({'|'.join(map(re.escape, names))})(=\w+)?`")

        def show(text: str) -> str:
            return known.sub(lambda found: f"`{names[found[1]]}`", text)

        return type(self)(
            tuple(show(f"`{name}`").strip("`") for name in self.arguments),
            *map(show, (self.requirement, self.got, self.remedy)),
            at=self.at,
            word=self.word,
        )


class TypeRefusal(Refusal, TypeError):
    """What was given has another type than is needed."""


class FileRefusal(Refusal, FileNotFoundError):
    """A file or folder does not exist."""


class FolderRefusal(Refusal, IsADirectoryError):
    """A folder is where a file is needed."""


def _again(kind: type[Refusal], fields: dict[str, Any]) -> Refusal:
    return kind(**fields)


UNUSABLE = "unusable"
"""The word for an error that has no word of its own."""


def word_for(error: BaseException) -> str:
    """Return the reason as a table says it.

    Examples:
        >>> word_for(Refusal("run", "have events", "none", "Name another.", word="empty"))
        'empty'
    """
    return (error.word if isinstance(error, Refusal) else "") or UNUSABLE


@contextmanager
def rename_arguments(names: Mapping[str, str]) -> Iterator[None]:
    """Have refusals of a block name the arguments as the reader knows them: flags, fields, columns.

    Args:
        names: From the argument to what the reader knows it by.
    """
    try:
        yield
    except Refusal as refused:
        raise refused.with_names(names) from refused
