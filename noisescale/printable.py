# SPDX-License-Identifier: Apache-2.0
"""Text from elsewhere, such as names in files, as a terminal can safely show it."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from typing import Any


def printable(text: object) -> str:
    r"""Return `str(text)` with every character that does not print escaped, as `repr` does.

    A name in a file may hold anything: escape sequences that a terminal obeys, line ends, marks
    that reverse the direction of what follows. Backslashes are left alone, so that paths stay as
    they are.

    Examples:
        >>> print(printable("loss\x1b[31m\r\u202e, größer"))
        loss\x1b[31m\r\u202e, größer
    """
    return _escape(str(text), lambda c: c.encode("unicode_escape").decode("ascii"))


def printable_json(text: str) -> str:
    r"""Return JSON that says the same without characters that do not print; line ends stay.

    Examples:
        >>> print(printable_json(json.dumps({"größer\x9b": 1}, ensure_ascii=False)))
        {"größer\u009b": 1}
    """
    return _escape(text, lambda c: c if c == "\n" else json.dumps(c)[1:-1])


def arguments(call: Callable[..., Any], **given: Any) -> str:
    """Return the given arguments that are not the defaults, as in a call.

    Examples:
        >>> from noisescale.plan import Plan
        >>> arguments(Plan, device_batch_size=32, accumulation=1, devices=2, nodes=1)
        'device_batch_size=32, accumulation=1, devices=2'
    """
    shown = (p for p in signature(call).parameters.values() if p.name in given)
    return ", ".join(f"{p.name}={given[p.name]!r}" for p in shown if given[p.name] != p.default)


def _escape(text: str, escape: Callable[[str], str]) -> str:
    return "".join(c if c.isprintable() else escape(c) for c in text)
