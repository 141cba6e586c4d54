# SPDX-License-Identifier: Apache-2.0
"""Options with several values, and the names of options."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from noisescale.refusal import Refusal


def flags_of(command: Callable[..., Any]) -> dict[str, str]:
    """Return the flag of each option of a command, by the name of its argument in Python.

    Examples:
        >>> def command(run, batch_sizes=None, *, needed): ...
        >>> flags_of(command)
        {'batch_sizes': '--batch-sizes', 'needed': '--needed'}
    """
    return {
        name: f"--{name.replace('_', '-')}"
        for name, parameter in signature(command).parameters.items()
        if parameter.default is not Parameter.empty or parameter.kind is Parameter.KEYWORD_ONLY
    }


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
