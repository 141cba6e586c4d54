# SPDX-License-Identifier: Apache-2.0
"""What the monitor's metrics are called in logs."""

from __future__ import annotations

import re

ROOT = "noise_scale/"
"""What the names of all logged metrics begin with."""

HOSTS = ("", "train/")
"""What a logger may put before them: the Trainer of transformers has "train/" in TensorBoard."""


def prefix_of(optimizer: int) -> str:
    """Return what the metrics of an optimizer begin with; the first one's have no number.

    Example:
        >>> prefix_of(0), prefix_of(1)
        ('noise_scale/', 'noise_scale/optimizer_1/')
    """
    return f"{ROOT}optimizer_{optimizer}/" if optimizer else ROOT


def name_in(tag: str, prefix: str) -> str | None:
    """Return a tag without its prefix, whatever the host put before it; None of other tags.

    Example:
        >>> name_in("train/noise_scale/step", "noise_scale/"), name_in("loss", "noise_scale/")
        ('step', None)
    """
    for host in HOSTS:
        if tag.startswith(host + prefix):
            return tag[len(host + prefix) :]
    return None


def check_name(name: str, argument: str) -> None:
    """Raise a ValueError where a name cannot be part of a metric's in every logger.

    MLflow is the strictest: letters, digits, and a few other characters, as a path that is not
    made shorter by normalising it.

    Example:
        >>> check_name("blocks.0", "groups")
        >>> check_name("head (last)", "groups")
        Traceback (most recent call last):
        ...
        ValueError: `groups` must have names of letters, digits, spaces and `_-./` alone, which all
        loggers take, got 'head (last)'. Choose another name.
    """
    parts = name.split("/")
    if not re.fullmatch(r"[A-Za-z0-9_\-. /]+", name) or {"", ".", ".."} & {*parts}:
        raise ValueError(
            f"`{argument}` must have names of letters, digits, spaces and `_-./` alone, which all"
            f" loggers take, got {name!r}. Choose another name."
        )
