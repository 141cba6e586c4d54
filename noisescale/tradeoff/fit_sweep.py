# SPDX-License-Identifier: Apache-2.0
"""`fit`: the critical batch size from a file with the steps of a sweep."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from noisescale._version import __version__
from noisescale.bounded import Bounded
from noisescale.refusal import rename_arguments
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import bounds, count, number, plural
from noisescale.report.records import fields_of, finite
from noisescale.tradeoff.fit import TradeoffFit, fit_tradeoff
from noisescale.tradeoff.regimes import OVERHEAD, Regimes
from noisescale.tradeoff.sweep_files import read_sweeps

SWEEP = ("batch_size", "measured_steps", "fitted_steps", "log_residual")
"""The keys of a run of a sweep."""

_HOW_TO_READ = (
    "The law is steps = S_min (1 + (B_crit/B)^α)^(1/α). At the critical batch size steps are about"
    " twice the fewest. It holds if the learning rate was tuned at each batch size."
)


@dataclass(frozen=True)
class FittedSweep(Answer):
    """The law of steps against batch size, fitted to each curve of a file."""

    curves: Mapping[str, TradeoffFit]
    """The fit of each curve, by its name. A file with one curve has it under the name ""."""
    regimes: Mapping[str, Regimes]
    """The law of each curve with its bounds, by the same names."""
    unit: str = "examples"
    optimal_batch_size: float | None = None
    """B_opt of Zhang et al. 2024: up to this batch size scaling counts as perfect."""
    confidence: float = 0.95
    source: Path | None = None
    """The file of the sweep."""

    def document(self) -> Document:
        """Return what the fits say: B_crit, S_min and E_min of each curve, and its residuals."""
        named = len(self.curves) > 1 or "" not in self.curves
        answers: list[Statement] = []
        for name in self.curves:
            critical, *others = _statements(self, name)
            answers += [Statement(name, critical.sentence, parts=others)] if named else others
        doubts = [
            f"{name}: {text}" if name else text
            for name, fit in self.curves.items()
            for text in fit.warnings
        ]
        lead, headline = "", f"Critical batch sizes of {plural(len(self.curves), 'curve')}"
        if len(self.curves) == 1:
            headline = f"Critical batch size: {_critical(self, *self.curves)}"
            lead = "Beyond it each doubling saves less than a quarter of the steps."
        return Document(
            title=f"Critical batch size of {plural(len(self.curves), 'sweep')}",
            headline=headline,
            lead=lead,
            answers=answers,
            tables=[_table(fit, name, self.unit) for name, fit in self.curves.items()],
            doubts=doubts,
            how_to_read=_HOW_TO_READ,
            next=_next(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fits in builtin types. Several are under the key `curves`, by their names.

        | key | meaning |
        |---|---|
        | `version`, `unit`, `confidence` | of noisescale; of batch sizes; coverage of the bounds |
        | `min_steps`, `min_examples`, `critical_batch_size` | S_min, E_min and their ratio |
        | `sharpness` | the exponent α of the law |
        | `overhead_batch_size` | the batch size with 20 % overhead; None if B_opt was not given |
        | `rms_log_residual` | root mean square of the residuals of log steps |
        | `sweep` | batch size, measured and fitted steps, log residual of each run |
        | `warnings` | whole sentences |

        A quantity with bounds is `{"value", "low", "high"}`. None is unknown or unbounded.
        """
        curves = {name: _curve(self, name) for name in self.curves}
        return curves[""] if [*curves] == [""] else {"curves": curves}


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


def _next(found: FittedSweep) -> list[str]:
    """Return the command that predicts from a run with the law of the sweep."""
    if found.source is None or len(found.curves) > 1:
        return []
    sweep = shlex.quote(str(found.source))
    return [f"Next: use it for a run of the same model\n  noisescale predict RUN --sweep {sweep}"]


def _critical(found: FittedSweep, name: str) -> str:
    band = found.regimes[name].critical_batch_size
    return f"{number(band.value)} {found.unit} ({_interval(found, band)})"


def _interval(found: FittedSweep, band: Bounded) -> str:
    return f"{100 * found.confidence:g} % interval {bounds(band)}"


def _statements(found: FittedSweep, name: str) -> Iterator[Statement]:
    """Yield the results of a curve: B_crit, S_min, E_min, and how sharply the law bends."""
    fit, regimes, unit = found.curves[name], found.regimes[name], found.unit

    def statement(label: str, band: Bounded, of: str = "", after: str = "") -> Statement:
        said = f"{number(band.value)}{of} ({_interval(found, band)}){after}"
        return Statement(label, said, band, basis="measured")

    yield statement("Critical batch size", regimes.critical_batch_size, f" {unit}")
    yield statement("Fewest steps", regimes.min_steps, " steps")
    yield statement(f"Fewest {unit}", regimes.min_examples, f" {unit}")
    yield statement("Exponent of the law", regimes.sharpness, after="; theory has 1")
    if (start := found.optimal_batch_size) is not None:
        size = number(fit.overhead_batch_size(OVERHEAD, start))
        over = f"relative to perfect scaling from {count(start)}, Zhang et al. 2024"
        yield Statement(f"With {100 * OVERHEAD:g} % overhead", f"{size} {unit} ({over})")


def _table(fit: TradeoffFit, name: str, unit: str) -> Table:
    """Return a table of the measured and the fitted steps of each run of a sweep."""
    sweep = sorted(zip(fit.batch_sizes, fit.measured_steps, fit.log_residuals, strict=True))
    lines = []
    for size, steps, residual in sweep:
        off = f"{100 * math.expm1(residual):+.1f} %"
        texts = (count(size), number(steps), number(fit.steps(size)), off)
        lines.append(Line([Cell(text) for text in texts]))
    return Table(
        title=f"Steps to the goal{f', {name}' if name else ''}",
        headings=["batch size", "measured", "fitted", "residual"],
        lines=lines,
        notes=[f"batch size: {unit} in each step, over all devices."],
    )


def _curve(found: FittedSweep, name: str) -> dict[str, Any]:
    fit, start = found.curves[name], found.optimal_batch_size
    fitted_steps = map(fit.steps, fit.batch_sizes)
    sweep = zip(fit.batch_sizes, fit.measured_steps, fitted_steps, fit.log_residuals, strict=True)
    names = "min_steps", "min_examples", "critical_batch_size", "sharpness"
    record: dict[str, Any] = finite(
        {
            "version": __version__,
            "unit": found.unit,
            "confidence": found.confidence,
            **fields_of(found.regimes[name], *names),
            "overhead_batch_size": None
            if start is None
            else fit.overhead_batch_size(OVERHEAD, start),
            "rms_log_residual": fit.rms_log_residual,
            "sweep": [dict(zip(SWEEP, run, strict=True)) for run in sweep],
            "warnings": fit.warnings,
        }
    )
    return record
