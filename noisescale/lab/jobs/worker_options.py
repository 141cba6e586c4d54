# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that have trainings done by workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noisescale.cli.from_function import Given
from noisescale.refusal import Refusal

WORKERS = {
    "Workers and machines": "storage name workers launcher launcher_options lease cold per_device"
}


def launcher_options(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the options of a launcher from texts like "timeout_min=60".

    Raises:
        ValueError: If one is not written as name=value.

    Examples:
        >>> launcher_options(["timeout_min=60", "slurm_partition=gpu"])
        {'timeout_min': 60, 'slurm_partition': 'gpu'}
    """
    found: dict[str, Any] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise Refusal(
                "--launcher-option",
                "be written as name=value",
                repr(text),
                "Write, for example, slurm_partition=gpu.",
            )
        number = value.lstrip("-").isdigit()
        found[name] = int(value) if number else {"true": True, "false": False}.get(value, value)
    return found


BY_WORKERS: dict[str, Given | str] = {
    "storage": Given(metavar="PLACE"),
    "launcher_options": Given(
        list[str],
        "Option of the launcher, as name=value. For slurm a parameter of submitit's AutoExecutor,"
        " such as slurm_partition=gpu; for ray an argument of ray.init, such as address=auto. May"
        " be repeated.",
        flag="--launcher-option",
        metavar="OPTION",
        read=launcher_options,
    ),
}
"""Texts of options that differ from those of the functions."""
