# SPDX-License-Identifier: Apache-2.0
"""The results of a fit to a sweep, in a few lines and a table."""

from __future__ import annotations

import math

from noisescale.bounded import Bounded
from noisescale.printable import printable
from noisescale.report.numbers import bounds, count, number
from noisescale.report.tables import Cell, Line, Table
from noisescale.tradeoff.fit import DOUBTFUL, TradeoffFit
from noisescale.tradeoff.profile import STEPS_SCATTER


def fit_headline(
    fit: TradeoffFit, unit: str, optimal_batch_size: float | None, confidence: float
) -> list[tuple[str, str]]:
    """Return the results of a sweep: B_crit, S_min, E_min, and a test of the law."""
    bands, errors, unit = fit.bands(confidence), fit.relative_errors, printable(unit)
    found = [
        (
            "Critical batch size",
            _fitted(bands["critical_batch_size"], errors[2], unit, confidence, fit.few),
        ),
        ("Fewest steps", _fitted(bands["min_steps"], errors[0], "steps", confidence, fit.few)),
        (f"Fewest {unit}", _fitted(bands["min_examples"], errors[1], unit, confidence, fit.few)),
    ]
    if optimal_batch_size is not None:
        size = number(fit.overhead_batch_size(0.2, optimal_batch_size))
        over = f"relative to perfect scaling from {count(optimal_batch_size)}, Zhang et al. 2024"
        found.append(("With 20 % overhead", f"{size} {unit} ({over})"))
    tested = "not tested: the test needs four batch sizes or more, with some scatter"
    if math.isfinite(fit.p_value):
        holds = "the law is doubtful" if fit.p_value < DOUBTFUL else "no evidence against the law"
        tested = f"{number(fit.p_value)}: {holds}"
    return [*found, ("p-value of the law", tested)]


def fit_table(fit: TradeoffFit, name: str, unit: str) -> Table:
    """Return a table of the measured and the fitted steps of each run of a sweep."""
    sweep = sorted(zip(fit.batch_sizes, fit.measured_steps, fit.log_residuals, strict=True))
    lines = []
    for size, steps, residual in sweep:
        off = f"{100 * math.expm1(residual):+.1f} %"
        texts = (count(size), number(steps), number(fit.steps(size)), off)
        lines.append(Line([Cell(text) for text in texts], []))
    return Table(
        title=f"Steps to the goal{f', {printable(name)}' if name else ''}",
        headings=["batch size", "measured", "fitted", "residual"],
        lines=lines,
        notes=[f"batch size: {printable(unit)} in each step, over all devices."],
    )


def _fitted(band: Bounded, error: float, unit: str, confidence: float, few: bool) -> str:
    if few:
        around = f"at least {number(band.low)}"
        if math.isfinite(band.high):
            around = bounds(band)
        scatter = f"at least {STEPS_SCATTER:.0%}".replace("%", " %")
        return (
            f"{number(band.value)} {unit} ({100 * confidence:g} % interval {around}, from"
            f" {scatter} assumed scatter: three batch sizes or fewer do not show their own)"
        )
    return (
        f"{number(band.value)} ± {number(band.value * error)} {unit}"
        f" ({100 * confidence:g} % interval {bounds(band)})"
    )
