# SPDX-License-Identifier: Apache-2.0
"""What the page's form holds, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

_LONGEST = 9
"""Digits of an index: more are no number of an optimizer."""


def number(query: Mapping[str, str], name: str) -> float | None:
    """Return a number of the form; None where its field is empty.

    Raises:
        ValueError: If it is anything else.

    Example:
        >>> number({"price": " 2.5 ", "worth": ""}, "price")
        2.5
    """
    text = query.get(name, "").strip()
    return _number(text, f"`{name}` must be a number", "Write it as 2.5.") if text else None


def numbers(query: Mapping[str, str], name: str) -> list[float] | None:
    """Return numbers with commas between them; None where their field is empty.

    A comma at the end is fine: another number is being typed.

    Raises:
        ValueError: If one of them is not a number.

    Example:
        >>> numbers({"devices": "1, 2, 4,"}, "devices")
        [1.0, 2.0, 4.0]
    """
    parts = [part.strip() for part in query.get(name, "").split(",")]
    if not parts[-1]:
        parts.pop()
    rule = f"`{name}` must be numbers with commas between them"
    return [_number(part, rule, "Write them as 1, 2, 4.") for part in parts] or None


def index(query: Mapping[str, str], name: str) -> int:
    """Return a whole number from 0 on; 0 where its field is empty.

    Raises:
        ValueError: If it is anything else.

    Example:
        >>> index({"optimizer": "1"}, "optimizer")
        1
    """
    text = query.get(name, "").strip() or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST):
        raise ValueError(
            f"`{name}` must be a whole number, 0 or more, got {_short(text)}. Write it as 1."
        )
    return int(text)


def _number(text: str, rule: str, remedy: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{rule}, got {_short(text)}. {remedy}")
    return value


def _short(text: str) -> str:
    """What was got, for an error of one line."""
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
