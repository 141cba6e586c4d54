# SPDX-License-Identifier: Apache-2.0
"""`noisescale horizon`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.showing import check_html, show
from noisescale.cli.values import flags_of
from noisescale.refusal import Refusal, rename_arguments

EXAMPLE = "noisescale horizon --tokens 10B --parameters 300M"

_AMOUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def show_horizon(
    *,
    tokens: Annotated[str, typer.Option(help="Tokens of the training, for example 10B.")],
    parameters: Annotated[
        str, typer.Option(help="Parameters without embeddings, for example 300M.")
    ],
    loss: Annotated[
        float | None,
        typer.Option(help="Training loss in nats for a token, for the rules that go by it."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Run with a monitor, whose critical batch size is put beside the rules."),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens in a sequence, to say batch sizes in sequences.")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Also print the sources.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the same as a page with a figure to this file.")
    ] = None,
) -> None:
    """Show what published rules say of the batch size of a pretraining, side by side."""
    from noisescale.rules.horizon import horizon

    check_html(html)
    with rename_arguments(flags_of(show_horizon)):
        found = horizon(
            _amount("tokens", tokens),
            _amount("parameters", parameters),
            loss=loss,
            run=run,
            sequence_length=sequence_length,
        )
    show(found, details=details, as_json=as_json, html=html)


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
            name, "be a number, with k, M, B or T or without", repr(text), "Write 10B or 1e10."
        ) from None
