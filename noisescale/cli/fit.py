# SPDX-License-Identifier: Apache-2.0
"""`noisescale fit SWEEP`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.showing import show
from noisescale.cli.values import flags_of
from noisescale.refusal import rename_arguments

EXAMPLE = "noisescale fit sweep.csv"


def fit_sweep(
    sweep: Annotated[
        Path,
        typer.Argument(
            metavar="SWEEP",
            help="CSV file with the columns batch_size and steps: the steps to the same result.",
        ),
    ],
    by: Annotated[
        str | None,
        typer.Option(help="Column that separates several curves, for example model."),
    ] = None,
    batch_size_column: Annotated[
        str | None,
        typer.Option(
            help="Column of batch sizes. Default: the one whose name begins with batch_size."
        ),
    ] = None,
    steps_column: Annotated[
        str | None,
        typer.Option(help="Column of steps. Default: the one whose name begins with steps."),
    ] = None,
    optimal_batch_size: Annotated[
        float | None,
        typer.Option(
            help="Batch size up to which scaling counts as perfect (B_opt of Zhang et al.)."
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
    unit: Annotated[
        str, typer.Option(help="Unit of batch sizes, for example sequences.")
    ] = "examples",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Fit the law of steps against batch size to a sweep, in log space."""
    from noisescale.tradeoff.fit_sweep import fit

    with rename_arguments(flags_of(fit_sweep)):
        found = fit(
            sweep,
            by=by,
            batch_size_column=batch_size_column,
            steps_column=steps_column,
            optimal_batch_size=optimal_batch_size,
            confidence=confidence,
            unit=unit,
        )
    show(found, as_json=as_json)
