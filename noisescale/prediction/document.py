# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, as a document: first sentences, next steps, doubts and assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from noisescale.prediction.costing import FAR
from noisescale.prediction.model_card import LABEL
from noisescale.prediction.run_hardware import devices_of
from noisescale.prediction.statements import statements_of
from noisescale.prediction.tables import summary_of, tables_of
from noisescale.report.document import Document, Figure, ToCopy
from noisescale.report.numbers import count, number

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

_HOW_TO_READ = (
    "Steps, hours and costs are those to reach the result of this run. The range under a value has"
    " two causes: the interval of the noise scale, and what is not known of the seconds a step"
    " takes. At the critical batch size the run takes twice its fewest steps and twice its fewest"
    " {unit}. Below the critical batch size more devices save time at almost no cost. Above it they"
    " save little. All of this holds for a well-tuned learning rate at each batch size. Check a"
    " large change by a short run."
)

MANY_UNRESOLVED = 0.1
"""Share of a run's steps without a resolved or measured noise scale that is worth a warning."""


def document_of(p: Prediction) -> Document:
    """Return what a prediction says: answers, figures, tables, what is doubtful and assumed."""

    def figures() -> Sequence[Figure]:
        from noisescale.prediction.figures import figures_of

        return figures_of(p)

    return Document(
        title=f"{p.decision.headline.rstrip('.')} - noisescale",
        headline=p.decision.headline,
        lead=p.decision.reason,
        summary=summary_of(p),
        answers=[*statements_of(p)],
        tables=tables_of(p),
        figures=figures,
        doubts=p.warnings,
        assumptions=p.assumptions,
        how_to_read=_HOW_TO_READ.format(unit=p.unit),
        status="under way" if p.under_way else "done",
        next=p.decision.next,
        to_copy=[
            *([] if p.ramp is None else [p.ramp.to_copy()]),
            ToCopy(LABEL, [p.model_card]),
        ],
    )


def warnings_about(p: Prediction) -> list[str]:
    """Return reasons not to trust a prediction, in whole sentences."""
    run = p.run
    found = list(p.calibration.doubts)
    if p.second_run is not None:
        found += p.second_run.doubts
    elif not p.resolved:
        found.append(_reason_without_value(p))
    else:
        unresolved = float(1 - (run.steps * run.resolved).sum() / run.steps.sum())
        if unresolved > MANY_UNRESOLVED:
            found.append(
                f"In {100 * unresolved:.0f} % of the steps there is only a lower bound of the"
                " noise scale: the prediction uses the measured values with their errors."
            )
    unmeasured = float(1 - (run.steps * run.measured).sum() / run.steps.sum())
    before = float(run.steps[: int(np.argmax(run.measured > 0))].sum())
    if before > MANY_UNRESOLVED * run.steps.sum():
        found.append(
            f"The log begins at step {before:,.0f}: the noise scale of the steps before is taken to"
            " be that of the first ones after it. If the run was resumed, predict from a checkpoint"
            " or a file that has its first steps."
        )
    elif unmeasured > MANY_UNRESOLVED:
        found.append(
            f"In {100 * unmeasured:.0f} % of the steps nothing was measured: the nearest measured"
            " steps are used instead."
        )
    if far := sorted({row.batch_size for row in p.rows if "batch size" in row.extrapolated}):
        sizes, are = ("Batch sizes of", "are") if len(far) > 1 else ("A batch size of", "is")
        found.append(
            f"{sizes} {_list_sizes(far)} {p.unit} {are} more than {FAR:g} times off the"
            " run's own: so far off, a learning rate at which the law holds may not exist."
            " Measure a run at a nearer batch size."
        )
    middle = p.critical_or_least
    least = 0.0 if not p.resolved else run.batch_size.min() / FAR  # a lower bound is no size
    near = least <= middle <= run.batch_size.max() * FAR
    if not (far or near) and middle > 0 and p.second_run is None:
        size = f"{'' if p.resolved else 'at least '}{number(middle)} {p.unit}"
        found.append(
            f"The critical batch size, {size}, is more than {FAR:g} times off the run's own:"
            " batch sizes around it are not shown. So far off, a learning rate at which"
            " the law holds may not exist. Measure a run at a nearer batch size."
        )
    if p.costs is not None and p.levels is None:
        found.append(
            "`cost_per_prompt` and `cost_per_generation` say nothing here, as the run measured no"
            " noise within groups of rows. Pass `group_fn` to its monitor."
        )
    best = p.recommended
    if best.cost.known and best.basis != "timed":
        devices = "one device" if best.devices == 1 else f"{best.devices:,} devices"
        found.append(
            f"The hours of the recommended batch size on {devices} are"
            " assumed: no such configuration was timed. Time it with `noisescale profile`."
        )
    return found


def assumptions_of(p: Prediction) -> list[str]:
    """Return what a prediction assumes, in whole sentences."""
    calibration, hardware = p.calibration, p.hardware
    kappa = calibration.kappa
    found = [
        "Every batch size is trained at its own best learning rate, to the result that this run"
        " reached, and no further."
    ]
    if calibration.is_theory or p.second_run is not None:
        found.append(calibration.source)
        if calibration.is_theory and p.history.optimizer is None:
            found.append(
                "The run's optimizer was not recorded: the bounds include the error of the"
                " measurement, but not the error of the theory."
            )
    elif calibration.branched is not None:
        found.append(f"B_crit comes from branches: {calibration.source}.")
    else:
        band = "" if kappa.low == kappa.high else f" ({kappa.low:.3g} to {kappa.high:.3g})"
        found.append(
            f"B_crit = kappa·B_simple, kappa = {kappa.value:.3g}{band}: {calibration.source}."
        )
    if why := p.budget.why_unknown:
        found.append(f"The best batch size for the {p.unit} of this run is not known: {why}.")
    if p.run.as_logged:
        found.append(
            "The noise scale is the one that was shown at each row, of the last measured steps."
            " While it rises, it may lag behind. The history does not hold what was measured"
            " between its rows."
        )
    if devices_of(p.history) is None:
        found.append("The run's number of devices was not recorded: one device is assumed.")
    if hardware.step_time is None:
        found.append("No seconds a step are known: hours and costs are left out.")
        return found
    found.append(
        f"A device takes at most {count(hardware.max_device_batch_size)} {p.unit} at once; larger"
        " batches are accumulated."
    )
    if math.isinf(hardware.devices_per_node):
        found.append("All devices are assumed to be in one node.")
    return [*found, *hardware.step_time.assumptions]


def _reason_without_value(p: Prediction) -> str:
    """Return why the critical batch size has a lower bound alone, and what helps."""
    least, batch = p.critical_batch_size.low, count(round(p.run.mean_batch_size))
    steps = float(p.history["measured_steps"][-1])
    measured = f"{steps:,.0f} measured steps" if math.isfinite(steps) else "the measured steps"
    return (
        f"Of the critical batch size of the whole run there is only a lower bound yet, {least:.3g}"
        f" {p.unit}. At batch size {batch}, {measured} do not tell the mean gradient from its"
        " noise. A longer run may not help: the mean gradient shrinks while a model trains. Measure"
        " more of the steps (`every_n_steps=1`), or train at a larger batch size."
    )


def _list_sizes(sizes: Sequence[float]) -> str:
    shown = [f"{size:,.0f}" for size in sizes]
    if len(shown) > 4:
        shown = [*shown[:2], "...", *shown[-2:]]
    return ", ".join(shown)
