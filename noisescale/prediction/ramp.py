# SPDX-License-Identifier: Apache-2.0
"""The ramp of a batch size that grows along the run, by the noise scale of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.optimize import brentq

from noisescale.checks import require_choice, require_count
from noisescale.history.segments import Array, Segments
from noisescale.prediction.launchers import LAUNCHERS, Stage, lines_for
from noisescale.prediction.learning_rate import command_at
from noisescale.prediction.position import MOST_DOUBLINGS
from noisescale.refusal import Refusal
from noisescale.report.document import ToCopy
from noisescale.report.numbers import count, two_digits

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

EDGES = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""The shares of the run at which the batch size may change."""

SURE = 2.0
"""Standard errors by which the progress of a part has to differ from none."""


class Part(NamedTuple):
    """A part of the run, and the critical batch size there."""

    start: float
    """The share of the run at which it begins."""
    critical: float


@dataclass(frozen=True)
class Ramp:
    """Batch sizes that grow along the run, and the words in which a launcher reads them.

    At critical batch size c a batch B makes progress 1/(B + c) with an example. The batch sizes

        B_i = √(r·c_i)        Σ e_i/(B_i + c_i) = Σ e_i/(B + c_i)

    make the progress of one batch size B with as many examples, e_i in each part of the run. They
    have the exchange rate of `policy="tradeoff"`: at every time of the run one step saved costs r
    examples. Each is rounded to B times a power of two.

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix D.
    """

    launcher: str
    stages: Sequence[Stage]
    examples: float
    """The examples of the whole run."""
    batch_size: int
    """B: the one batch size that the ramp is compared with."""
    steps_ratio: float
    """Steps of the ramp to the result of B, over the steps of B; a value without bounds."""
    examples_ratio: float
    """The same of the examples."""
    measured_share: float
    """The share of the run in which the noise scale was measured."""
    unit: str
    sequence_length: int | None
    learning_rate: str
    """The command for the learning rate of a batch size that is not the run's."""

    def to_copy(self) -> ToCopy:
        """Return what the launcher reads, what of the ramp it cannot express, and the gain."""
        lines, notes = lines_for(
            self.launcher, self.stages, self.examples, self.unit, self.sequence_length
        )
        return ToCopy(f"Ramp for {LAUNCHERS[self.launcher]}", lines, (*self._gain(), *notes))

    def _gain(self) -> Sequence[str]:
        if len(self.stages) == 1:
            return (
                "The noise scale of this run does not rise enough for a ramp: one batch size is"
                " kept.",
            )
        said = [
            f"By the values alone, this ramp takes {two_digits(self.steps_ratio)} of the steps of"
            f" batch size {count(self.batch_size)} from start to end, and"
            f" {two_digits(self.examples_ratio)} x its {self.unit}, to the same result. No run has"
            " confirmed it."
        ]
        if two_digits(self.examples_ratio) != "1.0":
            said.append(
                f"The lines end after the {count(round(self.examples))} {self.unit} of that batch"
                f" size. The same result takes"
                f" {count(round(self.examples * self.examples_ratio))}."
            )
        if self.measured_share < 1:
            said.append(
                f"The noise scale is known up to {100 * self.measured_share:.0f} % of the run:"
                " after that the last batch size is kept."
            )
        return [
            *said,
            f"Each batch size has a learning rate of its own. {self.learning_rate}",
        ]


def ramp_of(p: Prediction, launcher: str, sequence_length: int | None) -> Ramp:
    """Return the ramp of a run for a launcher.

    Args:
        p: What was predicted from the run.
        launcher: One of `LAUNCHERS`.
        sequence_length: Tokens of a sequence, where the launcher counts other than the run.

    Raises:
        ValueError: If the end of the run or its noise scale is not known, or the unit of the
            launcher cannot be had from that of the run.
    """
    require_choice("ramp", launcher, tuple(LAUNCHERS), "Choose the program that will train.")
    if sequence_length is not None:
        require_count("sequence_length", sequence_length, "Give the tokens of a sequence.")
    examples = _examples_of(p)
    parts = parts_of(p.run, p.critical_batch_size.value, examples)
    if not parts:
        raise Refusal(
            "ramp",
            "come with a run whose noise scale is resolved over the whole run",
            "one that is not",
            "Measure more of the steps (`every_n_steps=1`), or train at a larger batch size.",
        )
    batch_size = p.recommended_batch_size
    of_tokens = sequence_length if p.unit == "tokens" else None
    multiple = p.own_devices * (of_tokens or 1)
    stages = _stages(parts, batch_size, examples, multiple)
    steps, more = _gain_of(stages, parts, batch_size, examples)
    if steps >= 1:  # rounding took what the ramp would save
        stages, steps, more = [Stage(0.0, _whole(batch_size, multiple))], 1.0, 1.0
    ramp = Ramp(
        launcher,
        stages,
        examples,
        batch_size,
        steps,
        more,
        float(p.history["examples"][-1]) / examples,
        p.unit,
        sequence_length,
        _learning_rate(p, stages),
    )
    ramp.to_copy()  # refuses a unit
    return ramp


def _learning_rate(p: Prediction, stages: Sequence[Stage]) -> str:
    first, last = stages[0].batch_size, stages[-1].batch_size
    if first != p.position.batch_size:
        return f"For the first one: {command_at(p, first)}"
    return f"That of the first one is yours. For the last one: {command_at(p, last)}"


def _examples_of(p: Prediction) -> float:
    """Return the examples of the whole run, or refuse a run without a known end."""
    planned, last = p.history.planned_steps, float(p.history["step"][-1])
    if math.isfinite(p.budget.examples) and not (p.under_way and math.isnan(planned)):
        return float(p.budget.examples)
    raise Refusal(
        "ramp",
        "come with a run whose end is known",
        f"one that is under way at step {last:,.0f}",
        "Ask again once the run is over. Or train with `max_epochs` or `max_steps`; in a loop of"
        " your own set `meter.last_step`.",
    )


def parts_of(run: Segments, critical: float, examples: float) -> list[Part]:
    """Return the critical batch size along a run; empty if it is not resolved.

    The noise scale of each part is measured by sums over its steps. It is scaled so that the whole
    run has the critical batch size that was predicted. A part whose sums could be chance goes to
    the next one. Neighbours of which the second would be smaller are one part: a ramp grows.

    Args:
        run: The run in segments.
        critical: The critical batch size of the whole run.
        examples: Of the whole run, also of the part that is still to come.
    """
    if not (0 < critical < math.inf and np.isfinite(run.progress).all()):
        return []
    seen = np.cumsum(run.steps * run.batch_size)
    middle = (seen - run.steps * run.batch_size / 2) / examples
    which = np.searchsorted(EDGES, middle, side="right") - 1
    found: list[tuple[float, Array]] = []
    left = np.zeros(3)
    start = 0.0
    for k in range(len(EDGES)):
        left = left + _sums(run, which == k)
        if left[0] > SURE * math.sqrt(left[2]) and left[1] > 0:
            found.append((start, left))
            left, start = np.zeros(3), EDGES[min(k + 1, len(EDGES) - 1)]
    if not found:
        return []
    found[-1] = (found[-1][0], found[-1][1] + left)
    total = np.sum([sums for _, sums in found], axis=0)
    factor = critical * total[0] / total[1]
    rising: list[tuple[float, Array]] = []
    for begin, sums in found:
        rising.append((begin, sums))
        while len(rising) > 1 and _ratio(rising[-2][1]) >= _ratio(rising[-1][1]):
            (first, one), (_, other) = rising[-2:]
            rising[-2:] = [(first, one + other)]
    return [Part(begin, factor * _ratio(sums)) for begin, sums in rising]


def _sums(run: Segments, here: Array) -> Array:
    """Return what a part adds to S_min, to E_min and to the variance of S_min."""
    steps = run.counted_steps * here
    errors = np.bincount(run.block, weights=steps * run.progress_error)
    min_steps = steps * run.progress
    min_examples = steps * run.batch_size * (1 - run.progress)
    return np.array([min_steps.sum(), min_examples.sum(), (errors**2).sum()])


def _ratio(sums: Array) -> float:
    return float(sums[1] / sums[0])


def _shares(starts: Sequence[float]) -> Array:
    return np.diff([*starts, 1.0])


def _stages(parts: Sequence[Part], batch_size: int, examples: float, multiple: int) -> list[Stage]:
    """Return the batch sizes of a ramp: multiples of the devices, or of their tokens."""
    shares = _shares([part.start for part in parts])
    critical = np.array([part.critical for part in parts])
    roots = np.sqrt(critical)

    def excess(log_scale: float) -> float:
        sizes = math.exp(log_scale) * roots
        made, wanted = shares / (sizes + critical), shares / (batch_size + critical)
        return float((made - wanted).sum())

    ends = [math.log(batch_size / root) for root in (roots.max(), roots.min())]
    scale = math.exp(brentq(excess, *ends)) if ends[0] < ends[1] else batch_size / roots[0]
    stages: list[Stage] = []
    for part, size in zip(parts, scale * roots, strict=True):
        power = round(math.log2(size / batch_size))
        near = batch_size * 2.0 ** min(max(power, -MOST_DOUBLINGS), MOST_DOUBLINGS)
        whole = _whole(near, multiple)
        if not stages or whole != stages[-1].batch_size:
            stages.append(Stage(part.start * examples, whole))
    return stages


def _whole(batch_size: float, multiple: int) -> int:
    return multiple * max(1, round(batch_size / multiple))


def _gain_of(
    stages: Sequence[Stage], parts: Sequence[Part], batch_size: int, examples: float
) -> tuple[float, float]:
    """Return steps and examples to the result of one batch size, over those of that batch size."""
    shares = _shares([part.start for part in parts])
    critical = np.array([part.critical for part in parts])
    begins = [stage.start / examples for stage in stages]
    last = np.searchsorted(begins, [part.start for part in parts], side="right") - 1
    sizes = np.array([stages[k].batch_size for k in last], dtype=np.float64)
    made, wanted = (float((shares / (x + critical)).sum()) for x in (sizes, batch_size))
    more = wanted / made
    return more * float((shares / sizes).sum()) * batch_size, more
