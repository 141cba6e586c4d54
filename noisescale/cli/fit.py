# SPDX-License-Identifier: Apache-2.0
"""`noisescale fit SWEEP`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.values import flags_of
from noisescale.printable import printable_json
from noisescale.refusal import renamed

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
    from rich.console import Console

    from noisescale.report.records import fit_as_dict
    from noisescale.report.text import fit_report
    from noisescale.tradeoff.fit import fit_tradeoff
    from noisescale.tradeoff.sweep_files import read_sweeps

    flags = flags_of(fit_sweep)
    with renamed(flags):
        curves = read_sweeps(
            sweep, batch_size_column=batch_size_column, measured_column=steps_column, by=by
        )
    columns = {"batch_sizes": batch_size_column or "batch_size", "steps": steps_column or "steps"}
    with warnings.catch_warnings(), renamed(columns):
        warnings.simplefilter("ignore")  # the tables have them
        fits = {name: fit_tradeoff(*curve) for name, curve in curves.items()}
    with renamed(flags):
        if not as_json:
            for name, fit in fits.items():
                Console().print(fit_report(fit, name, unit, optimal_batch_size, confidence))
            return
        records = {
            name: fit_as_dict(
                fit, unit=unit, optimal_batch_size=optimal_batch_size, confidence=confidence
            )
            for name, fit in fits.items()
        }
    shown = records if by else records[""]
    print(printable_json(json.dumps(shown, indent=2, ensure_ascii=False)))
