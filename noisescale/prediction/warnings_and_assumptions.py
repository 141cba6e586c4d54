# SPDX-License-Identifier: Apache-2.0
"""The warnings and the assumptions of a prediction, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Array, Segments
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.costing import FAR, Hardware, PredictedRow
from noisescale.prediction.run_hardware import devices_of
from noisescale.prediction.second_run import SecondRun

MANY_UNRESOLVED = 0.1
"""Share of a run's steps without a resolved or measured noise scale that is worth a warning."""


def warnings_about(
    history: Mapping[str, Array],
    run: Segments,
    law: RunLaw,
    rows: Sequence[PredictedRow],
    recommended: PredictedRow,
    calibration: Calibration,
    second: SecondRun | None,
    unit: str,
) -> tuple[str, ...]:
    """Return reasons not to trust a prediction, in whole sentences."""
    found = list(calibration.doubts)
    critical = law.critical_batch_size
    if second is not None:
        found += second.doubts
    elif not math.isfinite(critical.value):
        found.append(_reason_without_value(history, run, critical.low, unit))
    else:
        unresolved = float(1 - (run.steps * run.resolved).sum() / run.steps.sum())
        if unresolved > MANY_UNRESOLVED:
            found.append(
                f"In {100 * unresolved:.0f} % of the steps the noise scale is not resolved by"
                " itself: the prediction uses the measured values with their errors."
            )
    unmeasured = float(1 - (run.steps * run.measured).sum() / run.steps.sum())
    before = float(run.steps[: int(np.argmax(run.measured > 0))].sum())
    if before > MANY_UNRESOLVED * run.steps.sum():
        found.append(
            f"The log begins at step {before:,.0f}: the noise scale of the steps before is taken to"
            " be that of the first ones after it. If the run was resumed, put the event files of"
            " its parts into one folder, or predict from `monitor.history`."
        )
    elif unmeasured > MANY_UNRESOLVED:
        found.append(
            f"In {100 * unmeasured:.0f} % of the steps nothing was measured: the nearest measured"
            " steps are used instead."
        )
    if far := sorted({row.batch_size for row in rows if "batch size" in row.extrapolated}):
        sizes = "Batch sizes of" if len(far) > 1 else "A batch size of"
        found.append(
            f"{sizes} {_list_sizes(far)} {unit} {'are' if len(far) > 1 else 'is'} more than {FAR:g}"
            " times off the run's own: so far off, a learning rate at which the law holds may not"
            " exist. Measure a run at a nearer batch size."
        )
    critical = law.critical_batch_size
    middle = critical.value if math.isfinite(critical.value) else critical.low
    near = run.batch_size.min() / FAR <= middle <= run.batch_size.max() * FAR
    if not (far or near) and middle > 0 and second is None:
        found.append(
            f"The critical batch size, {middle:,.4g} {unit}, is more than {FAR:g} times off the"
            " run's own: batch sizes around it are not shown. So far off, a learning rate at which"
            " the law holds may not exist. Measure a run at a nearer batch size."
        )
    if recommended.cost.known and recommended.basis != "timed":
        found.append(
            f"The hours of the recommended batch size on {_devices(recommended.devices)} are"
            " assumed: no such configuration was timed. Time it with `noisescale profile`."
        )
    return tuple(found)


def assumptions_of(
    history: Mapping[str, Array],
    run: Segments,
    calibration: Calibration,
    hardware: Hardware,
    second: SecondRun | None,
    unit: str,
) -> tuple[str, ...]:
    """Return what a prediction assumes, in whole sentences."""
    kappa = calibration.kappa
    found = [
        "Every batch size is trained at its own best learning rate, to the result that this run"
        " reached, and no further."
    ]
    if calibration.is_theory or second is not None:
        found.append(calibration.source)
        if calibration.is_theory and getattr(history, "optimizer", None) is None:
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
    if run.as_logged:
        found.append(
            "The noise scale is the one that was shown at each row, of the last measured steps."
            " While it rises, it may lag behind. The history does not hold what was measured"
            " between its rows."
        )
    if devices_of(history) is None:
        found.append("The run's number of devices was not recorded: one device is assumed.")
    if hardware.step_time is None:
        found.append("No seconds a step are known: hours and costs are left out.")
        return tuple(found)
    found.append(
        f"A device takes at most {hardware.max_device_batch_size:,.4g} {unit} at once; larger"
        " batches are accumulated."
    )
    if math.isinf(hardware.devices_per_node):
        found.append("All devices are assumed to be in one node.")
    return (*found, *hardware.step_time.assumptions)


def _reason_without_value(
    history: Mapping[str, Array], run: Segments, least: float, unit: str
) -> str:
    """Return why the critical batch size has a lower bound alone, and what helps."""
    batch = float((run.steps * run.batch_size).sum() / run.steps.sum())
    steps = float(history["measured_steps"][-1]) if "measured_steps" in history else math.nan
    measured = f"{steps:,.0f} measured steps" if math.isfinite(steps) else "the measured steps"
    return (
        f"The critical batch size of the whole run is not resolved: it is at least {least:.3g}"
        f" {unit}. At batch size {batch:,.4g}, {measured} do not tell the mean gradient from its"
        " noise. A longer run may not help: the mean gradient shrinks while a model trains. Measure"
        " more of the steps (`every_n_steps=1`), or train at a larger batch size."
    )


def _list_sizes(sizes: Sequence[float]) -> str:
    shown = [f"{size:,.0f}" for size in sizes]
    if len(shown) > 4:
        shown = [*shown[:2], "...", *shown[-2:]]
    return ", ".join(shown)


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count:,} devices"
