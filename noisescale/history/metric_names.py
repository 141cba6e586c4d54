# SPDX-License-Identifier: Apache-2.0
"""The names of the monitor's metrics in logs."""

from __future__ import annotations

import re

from noisescale.refusal import Refusal, TypeRefusal

ROOT = "noise_scale/"
"""The beginning of the names of all logged metrics."""

TRAINER_PREFIXES = ("", "train/")
"""Prefixes that trainers add. The Trainer of transformers adds "train/" in TensorBoard."""


def prefix_of(optimizer: int, monitor: str | None = None) -> str:
    """Return the prefix of the metrics of a monitor's optimizer. The first has no number.

    Examples:
        >>> prefix_of(0), prefix_of(1), prefix_of(1, "wide")
        ('noise_scale/', 'noise_scale/optimizer_1/', 'noise_scale/wide/optimizer_1/')
    """
    named = f"{ROOT}{monitor}/" if monitor else ROOT
    return f"{named}optimizer_{optimizer}/" if optimizer else named


_BATCH_SIZE = re.compile(
    rf"(?:{'|'.join(map(re.escape, TRAINER_PREFIXES))}){ROOT}"
    r"(?!group/)(?:(?!optimizer_\d+/)([^/]+)/)?(?:optimizer_(\d{1,9})/)?batch_size"
)


def monitor_of(tag: str) -> tuple[str, int] | None:
    """Return the monitor's name and the optimizer's number, if a tag is a monitor's batch size.

    A monitor without a name has the name "".

    Examples:
        >>> [monitor_of(prefix_of(*who) + "batch_size") for who in ((0,), (1,), (1, "wide"))]
        [('', 0), ('', 1), ('wide', 1)]
        >>> monitor_of("noise_scale/group/batch_size"), monitor_of("noise_scale/simple")
        (None, None)
    """
    found = _BATCH_SIZE.fullmatch(tag)
    return (found[1] or "", int(found[2] or 0)) if found else None


def name_in(tag: str, prefix: str) -> str | None:
    """Return a tag without its prefix and the trainer's prefix; None if the prefix is another.

    Examples:
        >>> name_in("train/noise_scale/step", "noise_scale/"), name_in("loss", "noise_scale/")
        ('step', None)
    """
    for before in TRAINER_PREFIXES:
        if tag.startswith(before + prefix):
            return tag[len(before + prefix) :]
    return None


def check_name(name: str, argument: str, what: str) -> None:
    """Raise a ValueError if a logger would refuse a name as part of a metric's name.

    MLflow is the strictest logger. It allows letters, digits and a few other characters, and the
    name must be a path that normalising does not shorten.

    Args:
        name: Part of a metric's name.
        argument: The name of the argument that it comes from.
        what: What the argument must have, for the error.

    Examples:
        >>> check_name("blocks.0", "groups", "have names")
        >>> check_name("head (last)", "groups", "have names")
        Traceback (most recent call last):
        ...
        noisescale.refusal.Refusal: `groups` must have names of letters, digits, spaces and `_-./`
        only, got 'head (last)'. Loggers refuse other characters: choose another name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_\-. /]+", name) or {"", ".", ".."} & {*name.split("/")}:
        raise Refusal(
            argument,
            f"{what} of letters, digits, spaces and `_-./` only",
            repr(name),
            "Loggers refuse other characters: choose another name.",
        )


def check_monitor_name(name: object) -> None:
    """Raise unless `name` can stand in the names of metrics, after `ROOT`, to identify a monitor.

    Raises:
        ValueError: If `name` has characters that a logger refuses, or another meaning there.
        TypeError: If `name` is not a string.

    Examples:
        >>> check_monitor_name("by micro-batch")
        >>> check_monitor_name("group")
        Traceback (most recent call last):
        ...
        noisescale.refusal.Refusal: `name` must not be "group" or "optimizer_<number>" and must not
        contain `/`, got 'group'. These have another meaning in names of metrics: choose another
        name.
    """
    if not isinstance(name, str):
        raise TypeRefusal("name", "be a string", repr(name), "Pass a word, or leave it out.")
    check_name(name, "name", "be made")
    if "/" in name or name == "group" or re.fullmatch(r"optimizer_\d+", name):
        raise Refusal(
            "name",
            'not be "group" or "optimizer_<number>" and must not contain `/`',
            repr(name),
            "These have another meaning in names of metrics: choose another name.",
        )
