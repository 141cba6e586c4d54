# SPDX-License-Identifier: Apache-2.0
"""The noise scale along a run, at its checkpoints, for a run without a monitor."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from noisescale.estimation.noise_scale import NoiseScale
from noisescale.extras import is_installed
from noisescale.frozen.measure import measure
from noisescale.frozen.measurement import Measurement, text_of_scale
from noisescale.frozen.stopping_rule import say
from noisescale.guard import Guard
from noisescale.history.document import round_row
from noisescale.history.history import History
from noisescale.history.increments import INCREMENTS, LOSS, MEASURED
from noisescale.history.metric_names import ROOT
from noisescale.history.record import Recorder
from noisescale.lightning.checkpoints import Checkpoint, steps_in
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Figure, Line, Table
from noisescale.report.numbers import count, number, plural
from noisescale.user_code.targets import is_first

_HOW_TO_READ = (
    "Each value is measured at the weights of a checkpoint that no step changed, from independent"
    " batches."
)


@dataclass(frozen=True)
class MeasuredRun(Answer):
    """The noise scale at each checkpoint of a run."""

    measurements: tuple[Measurement, ...]
    """A measurement for each checkpoint, in the order of the steps."""
    history: History
    """A row for each, as the record has them. It is taken that the run trained at the batch size
    that was measured."""
    record: str
    """The folder of the record, which `predict` reads."""

    def document(self) -> Document:
        """Return what the measurements say: the last one, and the noise scale along the run."""
        last = self.measurements[-1].document()
        steps = count(self.measurements[-1].step or 0)
        return Document(
            title="Noise scale along a run - noisescale",
            headline=_course(self),
            lead=last.headline.replace("these weights", f"step {steps}"),
            answers=last.answers,
            tables=[_table(self)],
            figures=lambda: _figures(self),
            doubts=last.doubts,
            assumptions=[
                *last.assumptions,
                "The run is taken to have trained at the batch size that was measured, with one"
                " device and no accumulation.",
            ],
            how_to_read=_HOW_TO_READ,
            written=[f"Record: {self.record}"],
            next=[f"Predict this run: {shlex.join(['noisescale', 'predict', self.record])}"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements in builtin types: see `Measurement.to_dict`, for each."""
        return {
            "measurements": [one.to_dict() for one in self.measurements],
            "record": self.record,
        }


def measure_checkpoints(
    target: Any,
    data: Any = None,
    checkpoints: str | PathLike[str] = "checkpoints",
    *,
    output: str | PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> MeasuredRun:
    """Measure the noise scale at each checkpoint of a run, and record it as a monitor does.

    Args:
        target: See `measure`.
        data: See `measure`.
        checkpoints: A folder with files of ModelCheckpoint, or with those of transformers' Trainer.
        output: The folder of the record. Default: `noise_scale` beside the folder of files, or
            beside the Trainer's checkpoints.
        progress: See `measure`.
        options: Further arguments of `measure`.

    Returns:
        The measurements, and the history of the run. `predict` reads the record.

    Raises:
        ValueError: If there are no checkpoints after the first step, or as with `measure`.
        OSError: If a file cannot be read, or the record not written.
    """
    folder = Path(checkpoints)
    steps: dict[int, Path] = {}
    for path, step in steps_in(folder).items():
        if step > 0:
            steps.setdefault(step, path)  # "last.ckpt" may be one of the others again
    if not steps:
        raise Refusal(
            "checkpoints",
            "be a folder with checkpoints after the first step",
            f"{folder} without any",
            "Name the folder that ModelCheckpoint wrote to, or the Trainer's `output_dir`.",
        )
    of_trainer = any(map(Path.is_dir, steps.values()))
    record = Path(output or (folder if of_trainer else folder.parent) / "noise_scale")
    history: History | None = None
    found: list[Measurement] = []
    for place, (step, path) in enumerate(sorted(steps.items()), start=1):
        where = f"Step {step:,} ({place} of {len(steps)})"
        say(progress, f"{where}: taking the first batches")

        def tell(line: str, where: str = where) -> None:
            say(progress, f"{where}: {line}")

        one = measure(target, data, checkpoint=path, progress=tell, **options)
        if history is None:
            unit, confidence = one.noise_scale.unit, one.noise_scale.confidence
            columns = [f"group/{name}" for name in one.groups]
            history = History(
                extra_columns=columns, unit=unit, confidence=confidence, optimizer=one.optimizer
            )
            history.loop = "transformers" if of_trainer else "lightning"
            recorder = Recorder(record)
        row = round_row(_row(one, history, Checkpoint.read(path).learning_rate))
        if is_first():
            recorder.add(history, row)
            with Guard()("TensorBoard does not show the noise scale along the run"):
                _draw(one, record)
        history.append(**row)
        found.append(one)
    assert history is not None
    if is_first():
        recorder.end(history)
    history.source = record
    return MeasuredRun(tuple(found), history, str(record))


def _draw(one: Measurement, folder: Path) -> None:
    """Write for TensorBoard, if that is installed, what loggers get of a monitor."""
    if not is_installed("tensorboard"):
        return
    from torch.utils.tensorboard import SummaryWriter

    scale, size = one.noise_scale, one.batch_size
    metrics = {
        "batch_size": size,
        "lower_bound": scale.low,
        "grad_sq_norm": scale.grad_sq_norm,
        "noise_trace": scale.noise_trace,
    }
    if scale.resolved:
        ends = {"simple": scale.value, "simple_low": scale.low, "simple_high": scale.high}
        metrics |= {**ends, "efficiency": scale.efficiency(size)}
    with SummaryWriter(str(folder)) as writer:
        for name, value in metrics.items():
            if math.isfinite(value):
                writer.add_scalar(ROOT + name, value, one.step)


def _row(one: Measurement, history: History, learning_rate: float) -> dict[str, float]:
    """Return the row of a history that says what was found at a checkpoint."""
    scale, size = one.noise_scale, one.batch_size
    step = float(one.step or 0)
    before, measured = (
        (history["step"][-1], history["measured_steps"][-1]) if len(history) else (0.0, 0.0)
    )
    increments = _increments(one, step - before)
    return {
        "step": step,
        "examples": size * step,
        "batch_size": size,
        "noise_scale": scale.value,
        "low": scale.low,
        "high": scale.high,
        **increments,
        "measured_steps": measured + increments[MEASURED],
        "devices": 1.0,
        "accumulation": 1.0,
        "skipped_steps": 0.0,
        "measuring_cost": 0.0,
        "behind": 0.0,
        "learning_rate": learning_rate,
        **{f"group/{name}": _value_or_nan(group) for name, group in one.groups.items()},
    }


def _increments(one: Measurement, steps: float) -> dict[str, float]:
    """Return what the batches say of the steps since the checkpoint before.

    Each stands for its share of these steps. What is not known leaves a gap.
    """
    scale, size = one.noise_scale, one.batch_size
    if not math.isfinite(scale.noise_trace):
        return dict.fromkeys(INCREMENTS, 0.0) | {LOSS: math.nan}
    n = max(min(one.products.batches, int(steps)), 2)
    total, weight = size * steps, size * steps / n
    level = scale.grad_sq_norm + scale.noise_trace / size
    scatter = weight * weight * n * (n - 1) / (level * level)
    sums = n, total, weight * weight * n, total * scale.noise_trace / level
    values = (*sums, total * scale.grad_sq_norm / level)
    squares = [scatter * entry for entry in one.products.covariance]
    return dict(zip(INCREMENTS, map(float, (*values, *squares, math.nan)), strict=True))


def _value_or_nan(scale: NoiseScale) -> float:
    return scale.value if scale.resolved else math.nan


def _course(found: MeasuredRun) -> str:
    known = [one for one in found.measurements if one.noise_scale.resolved]
    if len(known) < 2:
        return f"The noise scale was measured at {plural(len(found.measurements), 'checkpoint')}"
    first, last = known[0], known[-1]
    a, b = first.noise_scale, last.noise_scale
    between = f"from step {count(first.step or 0)} to step {count(last.step or 0)}"
    if b.low > a.high:
        return f"The noise scale rose {number(b.value / a.value)} x {between}"
    if b.high < a.low:
        return f"The noise scale fell to {number(b.value / a.value)} x {between}"
    return f"The noise scale did not clearly change {between}"


def _table(found: MeasuredRun) -> Table:
    lines = [
        Line(
            [
                Cell(count(one.step or 0)),
                Cell(text_of_scale(one.noise_scale)),
                Cell(number(one.noise_scale.grad_sq_norm)),
                Cell(number(one.noise_scale.noise_trace)),
                Cell(f"{one.noise_scale.steps:g}"),
            ]
        )
        for one in found.measurements
    ]
    return Table(
        "Noise scale along the run", ("step", "noise scale", "|G|²", "tr(Σ)", "batches"), lines
    )


def _figures(found: MeasuredRun) -> Sequence[Figure]:
    from noisescale.report.colours import BLACK
    from noisescale.report.drawing import figure, log_axis, place_figure, spread, with_legend

    known = [one for one in found.measurements if one.noise_scale.resolved]
    if not known:
        return ()
    scales = [one.noise_scale for one in known]
    low, high = spread([x for scale in scales for x in (scale.low, scale.high)])
    drawn = figure(
        _course(found),
        "Each point is a checkpoint, with its 95 % interval.".replace(
            "95", f"{100 * scales[0].confidence:g}"
        ),
        {"title": {"text": "step"}, "rangemode": "tozero"},
        log_axis(f"noise scale, {scales[0].unit}", low, high),
    )
    drawn.add_scatter(
        x=[one.step for one in known],
        y=[scale.value for scale in scales],
        name="noise scale",
        mode="lines+markers",
        line={"color": BLACK, "width": 1},
        error_y={
            "type": "data",
            "array": [scale.high - scale.value for scale in scales],
            "arrayminus": [scale.value - scale.low for scale in scales],
        },
    )
    return [place_figure("noise-scale", "Noise scale along the run", with_legend(drawn))]
