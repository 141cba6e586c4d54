# SPDX-License-Identifier: Apache-2.0
"""Text from elsewhere, such as names in files, as a terminal can safely show it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any


def printable(text: object) -> str:
    r"""Return `str(text)` with every character that does not print escaped, as `repr` does.

    A name in a file may hold anything: escape sequences that a terminal obeys, line ends, marks
    that reverse the direction of what follows. Backslashes are left alone, so that paths stay as
    they are.

    Example:
        >>> print(printable("loss\x1b[31m\r\u202e, größer"))
        loss\x1b[31m\r\u202e, größer
    """
    return _replaced(str(text), lambda c: c.encode("unicode_escape").decode("ascii"))


def printable_json(text: str) -> str:
    r"""Return JSON that says the same without characters that do not print; line ends stay.

    Example:
        >>> print(printable_json(json.dumps({"größer\x9b": 1}, ensure_ascii=False)))
        {"größer\u009b": 1}
    """
    return _replaced(text, lambda c: c if c == "\n" else json.dumps(c)[1:-1])


def arguments(options: Any) -> str:
    """Return the fields of a dataclass that are not the defaults, as a call writes them.

    Example:
        >>> from noisescale.plan import Plan
        >>> arguments(Plan(32, 1, 2, 1))
        'device_batch_size=32, accumulation=1, devices=2'
    """
    given = ((field, getattr(options, field.name)) for field in fields(options))
    return ", ".join(f"{f.name}={value!r}" for f, value in given if value != f.default)


def _replaced(text: str, escape: Callable[[str], str]) -> str:
    return "".join(c if c.isprintable() else escape(c) for c in text)
