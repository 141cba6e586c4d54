# SPDX-License-Identifier: Apache-2.0
"""`noisescale horizon`."""

from __future__ import annotations

import re
from functools import partial

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Details, Json, show
from noisescale.refusal import Refusal

EXAMPLE = "noisescale horizon --tokens 10B --parameters 300M"

_AMOUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _amount(name: str, text: str) -> float:
    """Return a number that may end in k, M, B or T.

    Examples:
        >>> _amount("tokens", "10B"), _amount("tokens", "2.5e9")
        (10000000000.0, 2500000000.0)
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", text.strip().lower())
    try:
        return float(found[1]) * _AMOUNTS[found[2]]  # type: ignore[index]  # see below
    except (TypeError, ValueError):
        raise Refusal(
            name,
            "be a positive number, with k, M, B or T or without",
            repr(text),
            f"Write {'300M or 3e8' if name == 'parameters' else '10B or 1e10'}.",
        ) from None


@command_from(
    "horizon",
    {
        "tokens": Given(
            str, "Tokens of the training, for example 10B.", read=partial(_amount, "tokens")
        ),
        "parameters": Given(
            str,
            "Parameters without embeddings, for example 300M.",
            read=partial(_amount, "parameters"),
        ),
    },
)
def show_horizon(values: Values, details: Details = False, as_json: Json = False) -> None:
    """Say which batch size to take for a pretraining, before there is a run."""
    from noisescale.rules.horizon import horizon

    show(horizon(**values), details=details, as_json=as_json)
