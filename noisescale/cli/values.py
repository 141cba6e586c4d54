# SPDX-License-Identifier: Apache-2.0
"""Options with several values, and the names of options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from typer.models import ArgumentInfo

from noisescale.refusal import Refusal


def flags_of(command: Callable[..., Any]) -> dict[str, str]:
    """Return what each argument of a command is called where it is typed, by its name in Python.

    Examples:
        >>> from typing import Annotated
        >>> import typer
        >>> def command(
        ...     run: Annotated[str, typer.Argument(metavar="RUN")],
        ...     batch_sizes: Annotated[str, typer.Option()] = "",
        ...     as_json: Annotated[bool, typer.Option("--json")] = False,
        ... ): ...
        >>> flags_of(command)
        {'run': 'RUN', 'batch_sizes': '--batch-sizes', 'as_json': '--json'}
    """
    flags = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, ArgumentInfo):
                flags[name] = str(option.metavar)
            else:  # typer leaves the flag where an option has its default elsewhere
                flag = option.default if isinstance(option.default, str) else None
                flags[name] = flag or f"--{name.replace('_', '-')}"
    return flags


def numbers(option: str, text: str | None) -> list[float] | None:
    """Return the numbers in a text like "1,2,4". Whole numbers are integers; None stays None.

    Raises:
        ValueError: If a part of the text is not a number.

    Examples:
        >>> numbers("devices", "1,2,4")
        [1, 2, 4]
    """
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise Refusal(
            f"--{option}", "be numbers", repr(text), "Write, for example, 1,2,4."
        ) from None
    return [int(value) if value.is_integer() else value for value in values]
