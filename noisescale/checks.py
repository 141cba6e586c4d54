# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: return the value, or raise an error that names the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from noisescale.refusal import FileRefusal, Refusal, TypeRefusal


def refuse(
    argument: str,
    requirement: str,
    got: object,
    remedy: str = "Leave it out.",
    *,
    error: type[Refusal] = Refusal,
) -> NoReturn:
    """Raise the error of an argument: the requirement, the value and the remedy."""
    raise error(argument, requirement, got, remedy)


def refuse_setting(
    use: str, setting: str, value: str, reason: str, remedy: str, error: type[Refusal]
) -> NoReturn:
    """Raise the error of a setting of the trainer; `use` names what does not work under it."""
    refuse(setting, f"be one that {use} under", f"{value}: {reason}", remedy, error=error)


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of Python's or numpy's."""
    return isinstance(value, (float, int, Real))  # Python's first, which is ten times as fast


def is_whole(value: object) -> bool:
    """Return whether a value is an integer of Python's or numpy's, not a bool."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def is_positive(value: object) -> TypeGuard[float]:
    """Return whether a value is a positive, finite number."""
    return is_real(value) and 0 < value < math.inf


def check_confidence(value: object) -> None:
    """Raise a ValueError unless the value can be the coverage of an interval."""
    if not (is_real(value) and 0 < value < 1):
        refuse("confidence", "lie between 0 and 1", repr(value), "Pass 0.95 for 95 %.")


def check_function(name: str, value: object, result: str) -> None:
    """Raise a TypeError unless the value is None or a function of a batch; `result` is what of."""
    if value is not None and not callable(value):
        remedy = f"Pass a function from a batch to {result}."
        refuse(name, "be callable", repr(value), remedy, error=TypeRefusal)


def require_bounds(
    min_batch_size: float | None, max_batch_size: float | None
) -> tuple[float | None, float | None]:
    """Return both bounds, or raise a ValueError or TypeError that names the wrong one."""
    for name, value in (("min_batch_size", min_batch_size), ("max_batch_size", max_batch_size)):
        if value is None:
            continue
        if not is_real(value):
            remedy = "Give the global batch size, over all devices."
            needed = "be a number of examples or None"
            refuse(name, needed, repr(value), remedy, error=TypeRefusal)
        require_positive(name, value, "Leave it at None for none.")
    if (min_batch_size or 0.0) > (max_batch_size or math.inf):
        both = f"{min_batch_size!r} > {max_batch_size!r}"
        refuse("min_batch_size", "not exceed `max_batch_size`", both, "Exchange them.")
    return min_batch_size, max_batch_size


def require_count(name: str, value: Any, remedy: str) -> int:
    """Return `value` if it is a positive whole number, else raise a ValueError."""
    if not is_whole(value) or value < 1:
        refuse(name, "be a positive whole number", repr(value), remedy)
    return int(value)


def require_positive(name: str, value: Any, remedy: str) -> float:
    """Return `value` if it is a positive, finite number, else raise a ValueError."""
    if not is_positive(value):
        refuse(name, "be positive and finite", repr(value), remedy)
    return float(value)


def require_choice(
    name: str, value: Any, choices: Iterable[str], remedy: str, *, or_else: str = ""
) -> Any:
    """Return `value` if it is one of the choices, else raise a ValueError that lists them."""
    names = list(choices)
    if value not in names:
        quoted = ", ".join(f'"{one}"' for one in names)
        raise Refusal(name, f"be one of {quoted}{or_else}", repr(value), remedy)
    return value


def require_state(of: str, state: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the state of `of` if it is complete, else raise a ValueError.

    The batch size is a part of training, so a missing value must not be guessed.
    """
    remedy = (
        f" Resume from a complete checkpoint of {of}, or remove its state from this one: the batch"
        " size then starts again from your loader's."
    )
    if not isinstance(state, dict):
        raise ValueError(
            f"The state of {of} must be a dictionary, got {type(state).__name__}.{remedy}"
        )
    if missing := [name for name in names if name not in state]:
        raise ValueError(
            f"The state of {of} must have {', '.join(f'`{name}`' for name in missing)}, got only"
            f" {', '.join(f'`{name}`' for name in state) or 'an empty one'}.{remedy}"
        )
    return state


def require_folder_of(name: str, path: Path) -> None:
    """Raise a FileNotFoundError if a file cannot be written as its folder does not exist."""
    if not path.parent.is_dir():
        raise FileRefusal(name, "be in a folder that exists", str(path), "Create the folder first.")
