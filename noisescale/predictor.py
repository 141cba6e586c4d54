# SPDX-License-Identifier: Apache-2.0
"""One run's history -> steps, examples, hours and cost at every other batch size."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noisescale.history.segments import Array
from noisescale.prediction import arguments
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.costing import FAR, Hardware, devices_of, recommended_row, timings_of
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.warnings_and_assumptions import assumptions_of, warnings_about
from noisescale.printable import printable
from noisescale.step_time import StepTimeModel, StepTiming, fit_step_time

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class Prediction(PredictionRecord):
    """What `predict` found, and the ways to show it.

    What draws is imported when it is first used.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the history, in builtins; None is unknown or unbounded."""
        from noisescale.report.records import as_dict

        return as_dict(self)

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        from noisescale.report.records import as_json

        return as_json(self)

    def to_text(self, width: int = 100) -> str:
        """Return the tables as a terminal of `width` characters shows them, without colours."""
        from noisescale.report.text import as_text

        return as_text(self, width)

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write a self-contained page with figures and tables, and return its path."""
        from noisescale.report.html import write_html

        return write_html(self, Path(path))

    def figure(self) -> Figure:
        """Return the front of time against compute, a plotly figure."""
        from noisescale.report.figures import front_figure

        return front_figure(self)


def predict(
    history_or_run_folder: Mapping[str, Array] | str | PathLike[str],
    batch_sizes: Iterable[float] | None = None,
    devices: Iterable[float] | None = None,
    price_per_device_hour: float | None = None,
    *,
    hour_worth: float | None = None,
    calibration: Calibration | float | None = None,
    step_time: StepTimeModel | None = None,
    max_device_batch_size: float | None = None,
    devices_per_node: int | None = None,
    unit: str | None = None,
) -> Prediction:
    """Predict what the result of one run costs at other batch sizes, on other devices.

    At noise scale b a step of batch size B makes 1/(1 + b/B) of the progress of a noise-free
    one. Summed along the run, with its own changes of the batch size,

        S(B') = Σ steps·(1 + b/B')/(1 + b/B)

    are the steps to the same result at batch size B'. Both ends of the interval of b are carried
    through; segments of the run where it is not resolved are told by their bounds. Hours come
    from seconds a step, measured or assumed.

    Args:
        history_or_run_folder: `monitor.history`, or a folder with TensorBoard's or a CSVLogger's
            files of a run with `NoiseScaleMonitor`.
        batch_sizes: Global, in `unit`, at most 256 of them. Default: powers of two around the
            run's own and the critical one.
        devices: Numbers of devices, whole, at most 64 of them. Default: the run's, and 2, 4 and 8
            times as many.
        price_per_device_hour: In any currency.
        hour_worth: What it costs you to wait for an hour, in the same currency. With it, the
            batch size and the number of devices that cost least in all are recommended; without,
            the one nearest to the critical batch size, where steps and examples are both twice
            their least, on as many of the devices as it fills.
        calibration: kappa of B_crit = kappa·B_simple, from 1e-6 to 1e6, or a `Calibration`.
            Default: 1, the uncalibrated theory, which is derived for SGD.
        step_time: From `fit_step_time`, see `noisescale profile`. Default: from the run's own
            seconds a step, with wide bands where other plans have to be assumed.
        max_device_batch_size: The most examples a device takes at once; larger batches are
            accumulated. Default: the most that was timed.
        devices_per_node: Default: all devices are in one node.
        unit: What a batch size counts. Default: that of the history, or "examples".

    Returns:
        Rows of batch size, devices, steps, examples, hours, device-hours and cost, each with its
        bounds, and the recommended one. For the result that the run reached, no more.

    Raises:
        ValueError: If the run has no measured rows, or an argument is out of its range.
        OSError: If the folder cannot be read.

    Example:
        >>> from noisescale import History
        >>> history = History()
        >>> for k in range(1, 11):
        ...     history.append(step=50 * k, examples=3200 * k, batch_size=64, noise_scale=20 + k,
        ...                    low=15 + k, high=30 + k, seconds_per_step=0.1)
        >>> prediction = predict(history, batch_sizes=[32, 64, 128])
        >>> [f"{row.steps.value:.0f}" for row in prediction.rows_for(1)]
        ['642', '500', '429']
        >>> prediction.recommended_batch_size
        32.0

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix D.
    """
    history = history_or_run_folder
    if isinstance(history, (str, PathLike)):
        from noisescale.history.reading import read_run

        history = read_run(history)
    unit = printable(unit or getattr(history, "unit", "examples"))
    run = arguments.checked_run(history)
    own_devices = devices_of(history) or 1
    if calibration is None:
        calibration = Calibration.theory()
    elif not isinstance(calibration, Calibration):
        calibration = Calibration.given(calibration)
    law = arguments.checked_law(run, calibration)
    per_node = arguments.devices_per_node_from(devices_per_node)
    timings = timings_of(history, per_node)
    if step_time is None and timings:
        step_time = _step_time_of(tuple(timings))
    arguments.check_money(price_per_device_hour, hour_worth, timed=step_time is not None)
    own = arguments.own_batch_size(history, run)
    sizes = arguments.batch_sizes_from(batch_sizes, run, law, own)
    counts = arguments.devices_from(devices, own_devices)
    most = step_time.max_device_batch_size if step_time else float(run.batch_size.max())
    hardware = Hardware(
        step_time=step_time,
        max_device_batch_size=arguments.positive_or(
            "max_device_batch_size", max_device_batch_size, most
        ),
        devices_per_node=per_node,
        price_per_device_hour=price_per_device_hour,
        hour_worth=hour_worth,
    )
    far = run.batch_size.min() / FAR, run.batch_size.max() * FAR
    rows = tuple(
        hardware.row(law, size, count, far=not far[0] <= size <= far[1])
        for count in counts
        for size in sizes
        if size >= count
    )
    if not rows:
        raise ValueError(
            f"`batch_sizes` must reach the number of devices, got at most {max(sizes):g} for"
            f" {min(counts)} devices. Each device needs an example."
        )
    recommended = recommended_row(rows, law, hardware.max_device_batch_size)
    return Prediction(
        rows=rows,
        recommended=recommended,
        own_batch_size=own if own in sizes else None,
        own_devices=own_devices,
        law=law,
        calibration=calibration,
        run=run,
        history=history,
        hardware=hardware,
        unit=unit,
        confidence=getattr(history, "confidence", 0.95),
        warnings=warnings_about(history, run, law, rows, recommended, calibration, unit),
        assumptions=assumptions_of(history, run, calibration, hardware, unit),
    )


@functools.lru_cache(maxsize=64)
def _step_time_of(timings: tuple[StepTiming, ...]) -> StepTimeModel:
    """Fitted once: pages and reports ask for the same run again and again."""
    return fit_step_time(timings)
