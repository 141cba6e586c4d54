# SPDX-License-Identifier: Apache-2.0
"""What the monitor's metrics are called in logs."""

from __future__ import annotations

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
