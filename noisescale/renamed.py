# SPDX-License-Identifier: Apache-2.0
"""Arguments in errors, called as the reader called them: by flags, fields of a form, columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the names of arguments that stand in backticks in errors of the block.

    Errors name an argument as Python has it. A command line, a form or a file has other names
    for the same: only who called knows them.

    Args:
        names: From the argument to what the reader knows it by. "`name=value`" is replaced whole.

    Raises:
        ValueError: In place of a ValueError or OSError that names one of them.

    Examples:
        >>> with renamed({"hour_worth": "--hour-worth"}):
        ...     raise ValueError("`hour_worth` must be positive, got -1.")
        Traceback (most recent call last):
        ...
        ValueError: `--hour-worth` must be positive, got -1.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        known = "|".join(map(re.escape, names))
        text = re.sub(rf"`({known})(=\w+)?`", lambda found: f"`{names[found[1]]}`", str(error))
        if text == str(error):
            raise
        raise ValueError(text) from error
