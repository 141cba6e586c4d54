# SPDX-License-Identifier: Apache-2.0
"""The parameters of a search, as they are written on a command line or in a TOML file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from noisescale.checks import is_real, is_whole, refuse
from noisescale.lab.sweep.space import LEARNING_RATE
from noisescale.lab.tune.parameters import CHOICE, Parameter, Value, made_parameter
from noisescale.printable import printable

_EXAMPLE = "Write, for example, learning_rate=0.001..1, dropout=0..0.5:linear or act=relu,tanh."

_FIELDS = ("low", "high", "kind", "choices", "center", "scale")


def read_parameters(texts: Iterable[str]) -> list[Parameter]:
    """Return the parameters in texts like "learning_rate=0.001..1" or "act=relu,tanh".

    Raises:
        ValueError: If a text has another form.

    Examples:
        >>> for each in read_parameters(["batch_size=16..1024", "dropout=0..0.5:linear"]):
        ...     print(each.name, each.kind, each.text())
        batch_size pow2 16 to 1024
        dropout linear 0 to 0.5
    """
    return [_read(text) for text in texts]


def _read(text: str) -> Parameter:
    name, sign, values = text.partition("=")
    name = {"lr": LEARNING_RATE}.get(name.strip(), name.strip())
    if not (sign and name.isidentifier()):
        refuse("search", "be written as name=values", repr(printable(text)), _EXAMPLE)
    low, dots, rest = values.partition("..")
    if not dots:
        choices = [_value(part.strip()) for part in values.split(",")]
        if "" in choices:
            refuse("search", "have values", repr(printable(text)), _EXAMPLE)
        return Parameter(name, CHOICE, choices=tuple(choices))
    high, _, kind = rest.partition(":")
    ends = _value(low.strip()), _value(high.strip())
    if not all(map(is_real, ends)) or any(isinstance(end, bool) for end in ends):
        refuse("search", "have numbers as ends", repr(printable(text)), _EXAMPLE)
    whole = all(map(is_whole, ends))
    return made_parameter(name, float(ends[0]), float(ends[1]), kind or None, whole=whole)


def _value(text: str) -> Value:
    """Return a whole number, a number, a truth value, or the text itself.

    Examples:
        >>> _value("16"), _value("1e-3"), _value("true"), _value("relu")
        (16, 0.001, True, 'relu')
    """
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def read_space(path: Path) -> list[Parameter]:
    """Return the parameters of a TOML file: a table for each, see docs/tuning.md.

    Raises:
        ValueError: If the file is none, or a table has another form.
    """
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        refuse("space", "be a file", f"{printable(path)}, which is none", "Check the path.")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        refuse("space", "be a TOML file", f"{printable(path)}: {printable(error)}", "Correct it.")
    return [_of_table(path, name, table) for name, table in tables.items()]


def _of_table(path: Path, name: str, table: Any) -> Parameter:
    name = {"lr": LEARNING_RATE}.get(name, name)
    where = f"{printable(path)}, [{printable(name)}]"
    if not isinstance(table, Mapping):
        refuse("space", "have a table for each parameter", where, _table_example(name))
    if unknown := [field for field in table if field not in _FIELDS]:
        shown = printable(", ".join(unknown))
        refuse("space", f"have only {', '.join(_FIELDS)}", f"{shown} in {where}", "Leave it out.")
    more = {"center": table.get("center"), "scale": table.get("scale", 1.0)}
    if "choices" in table:
        choices = table["choices"]
        if not isinstance(choices, list) or any(isinstance(c, (list, dict)) for c in choices):
            refuse("space", "have a list of choices", where, 'Write choices = ["relu", "tanh"].')
        return Parameter(name, CHOICE, choices=tuple(choices), **more)
    ends = [table.get("low"), table.get("high")]
    if not all(is_real(end) and not isinstance(end, bool) for end in ends):
        refuse("space", "have numbers low and high, or choices", where, _table_example(name))
    whole = all(map(is_whole, ends))
    low, high = float(table["low"]), float(table["high"])
    return made_parameter(name, low, high, table.get("kind"), whole=whole, **more)


def _table_example(name: str) -> str:
    return f"Write a table [{printable(name)}] with low = 0.001 and high = 1.0."


def all_parameters(searched: Sequence[str], space: Path | None) -> tuple[Parameter, ...]:
    """Return the parameters of a command line and of a file.

    Raises:
        ValueError: If there are none, or one is given twice.
    """
    found = [*(read_space(space) if space else ()), *read_parameters(searched)]
    names = [each.name for each in found]
    if not found:
        refuse("search", "name a parameter to search", "none", _EXAMPLE)
    if double := [name for name in names if names.count(name) > 1]:
        refuse("search", "name each parameter once", printable(double[0]), "Leave one out.")
    if {"epochs", "steps"} <= set(names):
        refuse("search", "name epochs or steps", "both", "Leave one out.")
    return tuple(found)


def read_budget(text: str) -> float:
    """Return device-hours from a text like "0.5h", "30m" or "90s".

    Raises:
        ValueError: If the text has another form, or is not positive.

    Examples:
        >>> read_budget("0.5h"), read_budget("30m")
        (0.5, 0.5)
    """
    hours = {"h": 1.0, "m": 1 / 60, "s": 1 / 3600}
    number, unit = text.strip()[:-1], text.strip()[-1:]
    try:
        found = float(number) * hours[unit]
    except (ValueError, KeyError):
        found = math.nan
    if not 0 < found < math.inf:
        refuse(
            "budget",
            "be positive device-hours with a unit",
            repr(printable(text)),
            "Write, for example, 0.5h or 30m.",
        )
    return found
