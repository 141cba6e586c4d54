# SPDX-License-Identifier: Apache-2.0
"""Read the numbers in the form of the tab."""

from __future__ import annotations

import math
from collections.abc import Mapping

from noisescale.refusal import Refusal

_LONGEST = 9
"""The most digits of an index: no run has that many optimizers."""


def number(query: Mapping[str, str], name: str) -> float | None:
    """Return the number in a field of the form; None if the field is empty.

    Raises:
        ValueError: If the field has no finite number.

    Examples:
        >>> number({"price": " 2.5 ", "kappa": ""}, "price")
        2.5
    """
    text = query.get(name, "").strip()
    return _number(name, text, "be a number", "Write, for example, 2.5.") if text else None


def numbers(query: Mapping[str, str], name: str) -> list[float] | None:
    """Return the numbers in a field, with commas between them; None if the field is empty.

    A comma at the end is allowed: the user may be typing another number.

    Raises:
        ValueError: If a part is not a finite number.

    Examples:
        >>> numbers({"devices": "1, 2, 4,"}, "devices")
        [1.0, 2.0, 4.0]
    """
    parts = [part.strip() for part in query.get(name, "").split(",")]
    if not parts[-1]:
        parts.pop()
    needed, remedy = "be numbers with commas between them", "Write, for example, 1, 2, 4."
    return [_number(name, part, needed, remedy) for part in parts] or None


def index(query: Mapping[str, str], name: str) -> int:
    """Return the whole number in a field, 0 or more; 0 if the field is empty.

    Raises:
        ValueError: If the field has anything else.

    Examples:
        >>> index({"optimizer": "1"}, "optimizer")
        1
    """
    text = query.get(name, "").strip() or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST):
        raise Refusal(name, "be a whole number, 0 or more", short(text), "Write, for example, 1.")
    return int(text)


def _number(name: str, text: str, needed: str, remedy: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Refusal(name, needed, short(text), remedy)
    return value


def short(text: str) -> str:
    """Return a value in quotes, cut to fit into an error of one line."""
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
