# SPDX-License-Identifier: Apache-2.0
"""The results of a fit to a sweep, in a few lines and a table."""

from __future__ import annotations

import math

from noisescale.bounded import Bounded
from noisescale.printable import printable
from noisescale.report.numbers import bounds, count, number
from noisescale.report.tables import Cell, Line, Table
from noisescale.tradeoff.fit import TradeoffFit


def fit_headline(
    fit: TradeoffFit, unit: str, optimal_batch_size: float | None, confidence: float
) -> list[tuple[str, str]]:
    """Return the results of a sweep: B_crit, S_min, E_min, and how sharply the law bends."""
    found, unit = fit.regimes(confidence), printable(unit)
    interval = f"{100 * confidence:g} % interval"

    def banded(band: Bounded, unit: str = "") -> str:
        return f"{number(band.value)}{unit} ({interval} {bounds(band)})"

    lines = [
        ("Critical batch size", banded(found.critical_batch_size, f" {unit}")),
        ("Fewest steps", banded(found.min_steps, " steps")),
        (f"Fewest {unit}", banded(found.min_examples, f" {unit}")),
        ("Exponent of the law", f"{banded(found.sharpness)}; theory has 1"),
    ]
    if optimal_batch_size is not None:
        size = number(fit.overhead_batch_size(0.2, optimal_batch_size))
        over = f"relative to perfect scaling from {count(optimal_batch_size)}, Zhang et al. 2024"
        lines.append(("With 20 % overhead", f"{size} {unit} ({over})"))
    return lines


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
