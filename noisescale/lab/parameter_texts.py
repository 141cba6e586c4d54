# SPDX-License-Identifier: Apache-2.0
"""Searched parameters, as they are written on a command line or in a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noisescale.checks import is_real, is_whole, refuse
from noisescale.lab.parameters import (
    LEARNING_RATE,
    SWEPT,
    Parameter,
    Value,
    choice_parameter,
    range_parameter,
)
from noisescale.printable import printable

_EXAMPLE = "Write, for example, learning_rate=0.001..1, dropout=0..0.5:linear or act=relu,tanh."

_FIELDS = ("low", "high", "kind", "choices", "center", "scale")


Searched = Mapping[str, Any] | Iterable[str]
"""Parameters to search: texts like "momentum=0.5..0.99", or from each name to its values.

A pair of numbers is a range, with a kind as a third part if it is not the usual one. A list has
choices. A text is what stands after the "=" of a text on the command line.
"""


def sweep_parameters(searched: Searched) -> tuple[Parameter, ...]:
    """Return the parameters of a sweep.

    Raises:
        ValueError: If a text has another form, a name is unknown, or one is given twice.

    Examples:
        >>> [each.text() for each in sweep_parameters({"momentum": (0.5, 0.99)})]
        ['0.5 to 0.99']
    """
    found = _refuse_repeats([_read(text, SWEPT) for text in _texts(searched)])
    for each in found:
        if SWEPT.get(each.name) != each.kind:
            refuse(
                "search",
                f"name {', '.join(SWEPT)}, without a kind",
                f"{each.name}, {each.kind}",
                "Write, for example, momentum=0.5..0.99. `noisescale tune` takes others.",
            )
    return tuple(found)


def search_parameters(
    searched: Searched, space: str | PathLike[str] | None = None
) -> tuple[Parameter, ...]:
    """Return the parameters of a search, which are given and in a file.

    Raises:
        ValueError: If there are none, one is given twice, or one has another form.

    Examples:
        >>> for each in search_parameters(["batch_size=16..1024", "dropout=0..0.5:linear"]):
        ...     print(each.name, each.kind, each.text())
        batch_size pow2 16 to 1024
        dropout linear 0 to 0.5
    """
    found = _refuse_repeats(
        [*(_read_space(Path(space)) if space else ()), *map(_read, _texts(searched))]
    )
    if not found:
        refuse("search", "name a parameter to search", "none", _EXAMPLE)
    if {"epochs", "steps"} <= {each.name for each in found}:
        refuse("search", "name epochs or steps", "both", "Leave one out.")
    return tuple(found)


def _texts(searched: Searched) -> list[str]:
    """Return parameters as texts.

    Examples:
        >>> _texts({"width": (16, 512), "dropout": (0, 0.5, "linear"), "act": ["relu", "tanh"]})
        ['width=16..512', 'dropout=0..0.5:linear', 'act=relu,tanh']
    """
    if not isinstance(searched, Mapping):
        return list(searched)
    return [f"{name}={_values_text(values)}" for name, values in searched.items()]


def _values_text(values: Any) -> str:
    if isinstance(values, tuple) and len(values) in (2, 3):
        low, high, *kind = values
        return ":".join([f"{low}..{high}", *map(str, kind)])
    if isinstance(values, list | tuple):
        return ",".join(map(str, values))
    return str(values)


def _refuse_repeats(found: Sequence[Parameter]) -> Sequence[Parameter]:
    names = [each.name for each in found]
    if double := [name for name in names if names.count(name) > 1]:
        refuse("search", "name each parameter once", double[0], "Leave one out.")
    return found


def _read(text: str, kinds: Mapping[str, str] = MappingProxyType({})) -> Parameter:
    """Return a parameter. A name in `kinds` has this kind, unless the text has another kind."""
    name, sign, values = text.partition("=")
    name = {"lr": LEARNING_RATE}.get(name.strip(), name.strip())
    if not (sign and name.isidentifier()):
        refuse("search", "be written as name=values", repr(text), _EXAMPLE)
    low, dots, rest = values.partition("..")
    if not dots:
        choices = [_value(part.strip()) for part in values.split(",")]
        if "" in choices:
            refuse("search", "have values", repr(text), _EXAMPLE)
        return choice_parameter(name, choices)
    high, _, kind = rest.partition(":")
    ends = _value(low.strip()), _value(high.strip())
    if not all(map(is_real, ends)) or any(isinstance(end, bool) for end in ends):
        refuse("search", "have numbers as ends", repr(text), _EXAMPLE)
    whole = all(map(is_whole, ends))
    return range_parameter(
        name, float(ends[0]), float(ends[1]), kind or kinds.get(name), whole=whole
    )


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


def _read_space(path: Path) -> list[Parameter]:
    """Return the parameters of a TOML file: a table for each, see docs/tuning.md."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        refuse("space", "be a file", f"{path}, which is none", "Check the path.")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        refuse("space", "be a TOML file", f"{path}: {error}", "Correct it.")
    return [_of_table(path, name, table) for name, table in tables.items()]


def _of_table(path: Path, name: str, table: Any) -> Parameter:
    name = {"lr": LEARNING_RATE}.get(name, name)
    where = f"{printable(path)}, [{printable(name)}]"
    example = f"Write a table [{printable(name)}] with low = 0.001 and high = 1.0."
    if not isinstance(table, Mapping):
        refuse("space", "have a table for each parameter", where, example)
    if unknown := [field for field in table if field not in _FIELDS]:
        shown = printable(", ".join(unknown))
        refuse("space", f"have only {', '.join(_FIELDS)}", f"{shown} in {where}")
    more = {"center": table.get("center"), "scale": table.get("scale", 1.0)}
    if "choices" in table:
        choices = table["choices"]
        if not isinstance(choices, list) or any(isinstance(c, (list, dict)) for c in choices):
            refuse("space", "have a list of choices", where, 'Write choices = ["relu", "tanh"].')
        return choice_parameter(name, choices, **more)
    ends = [table.get("low"), table.get("high")]
    if not all(is_real(end) and not isinstance(end, bool) for end in ends):
        refuse("space", "have numbers low and high, or choices", where, example)
    whole = all(map(is_whole, ends))
    low, high = float(table["low"]), float(table["high"])
    return range_parameter(name, low, high, table.get("kind"), whole=whole, **more)
