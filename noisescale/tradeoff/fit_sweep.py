# SPDX-License-Identifier: Apache-2.0
"""`fit`: the critical batch size from a file with the steps of a sweep."""

from __future__ import annotations

import warnings
from os import PathLike
from pathlib import Path

from noisescale.refusal import rename_arguments
from noisescale.report.answer import Answer
from noisescale.tradeoff.document import OVERHEAD, as_dict, document_of
from noisescale.tradeoff.fit import fit_tradeoff
from noisescale.tradeoff.sweep_files import read_sweeps
from noisescale.tradeoff.sweep_fits import SweepFits


class FittedSweep(SweepFits, Answer):
    """What `fit` found, and the ways to show it."""

    document = document_of
    to_dict = as_dict


def fit(
    sweep: str | PathLike[str],
    *,
    by: str | None = None,
    batch_size_column: str | None = None,
    steps_column: str | None = None,
    optimal_batch_size: float | None = None,
    confidence: float = 0.95,
    unit: str = "examples",
) -> FittedSweep:
    """Fit the law of steps against batch size to a sweep, see `fit_tradeoff`.

    Args:
        sweep: A CSV file with the columns batch_size and steps: the steps to the same result.
        by: The column that separates several curves, for example "model".
        batch_size_column: The column of batch sizes. Default: the one whose name begins with
            batch_size.
        steps_column: The column of steps. Default: the one whose name begins with steps.
        optimal_batch_size: B_opt of Zhang et al. 2024: up to this batch size scaling counts as
            perfect. With it, the answer has the batch size that costs 20 % more than perfect
            scaling.
        confidence: Coverage of the intervals.
        unit: The unit of batch sizes.

    Returns:
        S_min, E_min and the critical batch size of each curve, with intervals and residuals.

    Raises:
        ValueError: If the file has no such column, or a curve does not show both ends of the law.
        OSError: If the file cannot be read.
    """
    curves = read_sweeps(
        sweep, batch_size_column=batch_size_column, measured_column=steps_column, by=by
    )
    columns = {"batch_sizes": batch_size_column or "batch_size", "steps": steps_column or "steps"}
    with warnings.catch_warnings(), rename_arguments(columns):
        warnings.simplefilter("ignore")  # the document has them
        fits = {name: fit_tradeoff(*curve) for name, curve in curves.items()}
    for one in fits.values():
        if optimal_batch_size is not None:
            one.overhead_batch_size(OVERHEAD, optimal_batch_size)
    regimes = {name: one.regimes(confidence) for name, one in fits.items()}
    return FittedSweep(fits, regimes, unit, optimal_batch_size, confidence, Path(sweep))
