# SPDX-License-Identifier: Apache-2.0
"""State: what is saved and continued by the names of its attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar


class State:
    """An object whose state is made of the attributes that are named in `_saved`.

    These are builtins, records (dataclasses and NamedTuples), other states, or dicts of them. What
    an attribute is now says what is made of its saved value.

    Examples:
        >>> class Counter(State):
        ...     _saved = ("_count",)
        ...     _count = 0
        >>> first, second = Counter(), Counter()
        >>> first._count = 3
        >>> second.load_state_dict(first.state_dict())
        >>> second.state_dict()
        {'count': 3}
    """

    _saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> Any:
        """Return what `load_state_dict` needs, in builtins."""
        return {name.lstrip("_"): to_builtins(getattr(self, name)) for name in self._saved}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict`. A value that is missing is a KeyError."""
        for name in self._saved:
            setattr(self, name, restore(getattr(self, name), state[name.lstrip("_")]))


def to_builtins(value: Any) -> Any:
    """Return a saved attribute, or a record, in builtins."""
    if isinstance(value, State):
        return value.state_dict()
    if names := _fields_of(value):
        return {name: to_builtins(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: to_builtins(each) for name, each in value.items()}
    return [*map(to_builtins, value)] if isinstance(value, tuple | list) else value


def restore(now: Any, saved: Any) -> Any:
    """Return a saved value as what is in its place now.

    In a dict of states, states that were not saved stay as they are.
    """
    if isinstance(now, State):
        now.load_state_dict(saved)
        return now
    if names := _fields_of(now):
        return type(now)(**{name: restore(getattr(now, name), saved[name]) for name in names})
    if isinstance(now, Mapping):
        return {key: restore(one, saved[key]) if key in saved else one for key, one in now.items()}
    if isinstance(now, tuple):
        return tuple(restore((), each) if isinstance(each, list) else each for each in saved)
    return saved


def _fields_of(value: Any) -> tuple[str, ...]:
    """Return the names of a record's fields."""
    if is_dataclass(value):
        return tuple(field.name for field in fields(value))
    return getattr(value, "_fields", ())
