# SPDX-License-Identifier: Apache-2.0
"""What the monitor's metrics are called in logs."""

from __future__ import annotations

import re

ROOT = "noise_scale/"
"""What the names of all logged metrics begin with."""

ABOUT_RUN = ("optimizer_kind", "parameters")
"""Metrics, without their prefix, that are the same at each step of a run."""

TRAINER_PREFIXES = ("", "train/")
"""What a trainer may put before them: that of transformers has "train/" in TensorBoard."""


def prefix_of(optimizer: int, monitor: str | None = None) -> str:
    """Return what the metrics of a monitor's optimizer begin with; the first one has no number.

    Example:
        >>> prefix_of(0), prefix_of(1), prefix_of(1, "wide")
        ('noise_scale/', 'noise_scale/optimizer_1/', 'noise_scale/wide/optimizer_1/')
    """
    named = f"{ROOT}{monitor}/" if monitor else ROOT
    return f"{named}optimizer_{optimizer}/" if optimizer else named


_STEP = re.compile(
    rf"(?:{'|'.join(map(re.escape, TRAINER_PREFIXES))}){ROOT}"
    r"(?!group/)(?:(?!optimizer_\d+/)([^/]+)/)?(?:optimizer_(\d{1,9})/)?step"
)


def measured_in(tag: str) -> tuple[str, int] | None:
    """Return whose a tag is that is in each row: the monitor ("": without a name), the optimizer.

    Example:
        >>> [measured_in(prefix_of(*who) + "step") for who in ((0,), (1,), (1, "wide"))]
        [('', 0), ('', 1), ('wide', 1)]
        >>> measured_in("noise_scale/group/step"), measured_in("noise_scale/simple")
        (None, None)
    """
    found = _STEP.fullmatch(tag)
    return (found[1] or "", int(found[2] or 0)) if found else None


def name_in(tag: str, prefix: str) -> str | None:
    """Return a tag without its prefix, whatever the trainer put before it; None of other tags.

    Example:
        >>> name_in("train/noise_scale/step", "noise_scale/"), name_in("loss", "noise_scale/")
        ('step', None)
    """
    for before in TRAINER_PREFIXES:
        if tag.startswith(before + prefix):
            return tag[len(before + prefix) :]
    return None


def check_name(name: str, what: str) -> None:
    """Raise a ValueError where a name cannot be part of a metric's in every logger.

    MLflow is the strictest: letters, digits, and a few other characters, as a path that is not
    made shorter by normalising it.

    Args:
        name: Part of a metric's name.
        what: How the error begins.

    Example:
        >>> check_name("blocks.0", "`groups` must have names")
        >>> check_name("head (last)", "`groups` must have names")
        Traceback (most recent call last):
        ...
        ValueError: `groups` must have names of letters, digits, spaces and `_-./` alone, which all
        loggers take, got 'head (last)'. Choose another.
    """
    if not re.fullmatch(r"[A-Za-z0-9_\-. /]+", name) or {"", ".", ".."} & {*name.split("/")}:
        raise ValueError(
            f"{what} of letters, digits, spaces and `_-./` alone, which all loggers take, got"
            f" {name!r}. Choose another."
        )


def check_monitor_name(name: object) -> None:
    """Raise unless metrics can be told apart by it: between `ROOT` and the rest of their names.

    Raises:
        ValueError: If it has characters that a logger refuses, or means something else there.
        TypeError: If it is no string.

    Example:
        >>> check_monitor_name("by micro-batch")
        >>> check_monitor_name("group")
        Traceback (most recent call last):
        ...
        ValueError: `name` must not be "group", "optimizer_<number>" or have a `/`, which stand in
        the names of metrics already, got 'group'. Choose another.
    """
    if not isinstance(name, str):
        raise TypeError(f"`name` must be a string, got {name!r}. Pass a word, or leave it out.")
    check_name(name, "`name` must be made")
    if "/" in name or name == "group" or re.fullmatch(r"optimizer_\d+", name):
        raise ValueError(
            '`name` must not be "group", "optimizer_<number>" or have a `/`, which stand in the'
            f" names of metrics already, got {name!r}. Choose another."
        )
