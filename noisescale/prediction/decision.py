# SPDX-License-Identifier: Apache-2.0
"""The decision that a prediction ends in: a verdict, a batch size, a reason and the next step."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from noisescale.bounded import Bounded
from noisescale.history.checkpoints import weights_in
from noisescale.history.optimizers import has_decayed
from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.learning_rate import learning_rate_at
from noisescale.prediction.position import Verdict
from noisescale.prediction.run_hardware import usual_batch_sizes
from noisescale.prediction.second_run import informative_batch_size
from noisescale.report.numbers import count, plural, two_digits

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

TARGET = "train.py:make"
"""Stands for a user's own script and function."""

MEASURED_BATCHES = 100.0
"""Batches, for each noise scale in a batch, after which `measure` knows it within 2.25 x."""

LEAST_MEASURED, MOST_SECONDS = 30, 600.0
"""The fewest batches that `measure` takes, and the most seconds."""


@dataclass(frozen=True)
class Decision:
    """What to do with the batch size.

    Examples:
        >>> from noisescale import History, predict
        >>> run = History()
        >>> for k in range(1, 11):
        ...     run.append(step=50 * k, examples=3200 * k, batch_size=64, noise_scale=400 + k,
        ...                low=350 + k, high=460 + k)
        >>> found = predict(run).decision
        >>> found.verdict, found.batch_size
        ('larger', 128)
    """

    verdict: Verdict
    """`larger`, `keep` or `smaller`; `keep_or_larger` is not too large, and growing may help;
    `keep_or_smaller` is not too small; or `unknown`."""
    batch_size: int | None
    """The batch size to train with; None if the verdict is `unknown`."""
    likely: Bounded
    """The likely range of the critical batch size: it held in four of five runs."""
    headline: str
    """The verdict in a sentence."""
    reason: str
    """What other batch sizes would do, and what was not measured."""
    next: Sequence[str] = ()
    """What to do next, the most useful first: sentences with a command."""


def decision_of(p: Prediction) -> Decision:
    """Return what to do with the batch size of a run."""
    position = p.position
    verdict, size = position.verdict, _suggest_size(p)
    if verdict in ("larger", "smaller") and size == round(position.batch_size):
        verdict = "keep"
    headline, reason = _headline_and_reason(p, verdict, size)
    if p.by_optimizer:
        headline = f"Optimizer {p.number} allows least. {headline}"
    if p.under_way or position.young:
        young = "" if p.why_young in ("", "few") else f" ({p.why_young})"
        headline = (
            f"So far, after {count(round(p.run.steps.sum()))} steps{young}: {_lower(headline)}"
        )
    if not position.at_end and has_decayed(p.history) and verdict != "unknown":
        over = _steps_in_words(p)
        reason += f" The noise scale was measured over {over}, while the learning rate fell."
    return Decision(
        verdict,
        None if verdict == "unknown" else size,
        position.likely,
        headline,
        f"{_first_sentence(p)} {reason}",
        tuple(_next_steps(p, verdict, size)),
    )


def _suggest_size(p: Prediction) -> int:
    """Return the batch size to train with, of whole examples for each device.

    Of several batch sizes that were timed up to the suggested one, it is the fastest.
    """
    own, size = p.position.batch_size, p.position.suggested_size
    if others := _other_timed_rows(p):
        fastest = min(others, key=lambda row: p.hours_ratio(row).value)
        size = fastest.batch_size if p.hours_ratio(fastest).value < 1 else own
    each = p.own_devices
    return max(each, each * round(size / each)) if size != own else round(own)


def _other_timed_rows(p: Prediction) -> list[PredictedRow]:
    """Return what was timed from the run's own batch size, left out, to the suggested one."""
    own, size = p.position.batch_size, p.position.suggested_size
    if p.fastest_timed is None:
        return []
    least, most = sorted((own, size))
    here = [row for row in p.timed_rows if least <= row.batch_size <= most]
    return [row for row in here if row.batch_size != round(own)]


def _headline_and_reason(p: Prediction, verdict: Verdict, size: int) -> tuple[str, str]:
    """Return the verdict in a sentence, and the reason."""
    position = p.position
    own, critical = count(round(position.batch_size)), position.critical
    which = "Time" if p.fastest_timed is None else "Its time"
    untimed = "" if _other_timed_rows(p) else f" {which} was not measured."
    if verdict == "larger":
        return _larger(p, size), f"{_takes(p, size)}{untimed}"
    if verdict == "smaller":
        return f"Smaller is cheaper: {count(size)} instead of {own}.", _takes(p, size)
    halved = f"halving it likely saves {_savings(p, 'examples', 0.5)} of the {p.unit}"
    saved = f"likely saves {_savings(p, 'steps', 2.0)} of the steps"
    doubled = f"doubling it {saved}"
    if verdict == "keep":
        if position.verdict != "keep" and (others := _other_timed_rows(p)):
            none = "no" if min(p.hours_ratio(row).low for row in others) >= 1 else "probably no"
            saves = "larger batch saves steps"
            if position.verdict == "smaller":
                saves = f"smaller batch saves {p.unit}"
            what = f"Keep {own}: a {saves}, but {none} time on {p.these_devices}, as timed."
            return what, f"{_upper(halved)}, {doubled}."
        if position.batch_size < 2 * p.own_devices:
            return f"Keep {own}: each device has one example.", f"{_upper(doubled)}."
        return f"Keep {own}.", f"{_upper(halved)}, {doubled}."
    if verdict == "keep_or_larger":
        takes = _takes(p, 2 * round(position.batch_size)).rstrip(".")
        return f"Not too large: {own} is no waste.", f"{takes}: this run cannot say if that pays."
    if verdict == "keep_or_smaller":
        said = f"Not too small: doubling {own} {saved}."
        half = count(round(position.batch_size / 2))
        return said, f"Whether {half} is cheaper, this run cannot say."
    cannot = f"Whether another batch size than {own} is better, this run cannot say."
    if math.isinf(critical.high):
        least = f"is at least {two_digits(critical.low)}" if critical.low else "has no bound"
        return f"Not known yet: the critical batch size {least} (you train at {own}).", cannot
    between = f"{two_digits(critical.low)} and {two_digits(critical.high)}"
    return f"Not known yet: the critical batch size lies between {between}.", cannot


def _larger(p: Prediction, size: int) -> str:
    """Return the first sentence where a larger batch saves steps, and time if that was timed."""
    row = p.row_at(size, p.own_devices)
    if row.basis != "timed" or p.fastest_timed is None:
        return f"Larger saves steps: up to {count(size)} at little cost."
    time, cost = p.hours_ratio(row), p.position.examples(size, p.position.likely)
    how = "pays" if time.high < 1 else "probably pays"
    likely = p.hours_ratio(row, p.position.likely)
    return (
        f"Larger {how}: {count(size)} likely takes {ratio_text(likely)} x the time (timed),"
        f" {ratio_text(cost)} x the {p.unit}."
    )


def _takes(p: Prediction, size: int) -> str:
    """Return what the result takes at the suggested batch size: first what that size saves."""
    position = p.position
    steps, examples = (of(size, position.likely) for of in (position.steps, position.examples))
    if size < position.batch_size:
        return (
            f"This result then likely takes {ratio_text(examples)} x the {p.unit}, in"
            f" {ratio_text(steps)} x the steps."
        )
    return (
        f"At {count(size)} this result likely takes {ratio_text(steps)} of the steps, for"
        f" {ratio_text(examples)} x the {p.unit}."
    )


def _savings(p: Prediction, what: str, factor: float) -> str:
    """Return the share that is likely saved: '15 to 30 %'."""
    size = factor * p.position.batch_size
    # relative to a run at this batch size alone
    here = replace(p.position, course=())
    ratio = (here.steps if what == "steps" else here.examples)(size, here.likely)
    low, high = (f"{100 * max(1 - end, 0.0):.0f}" for end in (ratio.high, ratio.low))
    return f"{low} %" if low == high else f"{low} to {high} %"


def ratio_text(band: Bounded) -> str:
    """Write the range of a ratio: '0.28 to 0.35'."""
    if not math.isfinite(band.high):
        return f"at least {two_digits(band.low)}"
    low, high = two_digits(band.low), two_digits(band.high)
    return low if low == high else f"{low} to {high}"


def _first_sentence(p: Prediction) -> str:
    on = "" if p.own_devices == 1 else f" on {plural(p.own_devices, 'device')}"
    last = count(round(p.position.batch_size))
    if p.own_batch_size is None:
        sizes = usual_batch_sizes(p.history)
        least, most = (count(float(end(sizes))) for end in (np.nanmin, np.nanmax))
        return f"You trained at batch sizes from {least} to {most}, last at {last}{on}."
    return f"You train at batch size {last}{on}."


def short_verdict(decision: Decision) -> str:
    """Return the verdict for a cell of a table: 'larger: 128'."""
    if decision.verdict in ("larger", "smaller"):
        return f"{decision.verdict}: {count(decision.batch_size or 0)}"
    return decision.verdict.replace("_", " ")


def _steps_in_words(p: Prediction) -> str:
    steps = p.history["step"]
    known = np.flatnonzero(np.isfinite(p.history["low"]))
    first = float(steps[known[0]]) if len(known) else 0.0
    return f"steps {count(first)} to {count(float(steps[-1]))}"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _next_steps(p: Prediction, verdict: Verdict, size: int) -> Sequence[str]:
    """Return the next steps: what is most uncertain first."""
    run = "RUN" if p.history.source is None else shlex.quote(str(p.history.source))
    found = []
    if verdict in ("unknown", "keep_or_larger", "keep_or_smaller") and p.second_run is None:
        found.append(_how_to_resolve(p, run))
    rate = learning_rate_at(p, verdict, size)
    if rate is not None and verdict != "keep_or_larger":
        found.append(f"the learning rate at {count(rate.batch_size)}:\n  {rate.command}")
    if p.fastest_timed is None and verdict not in ("smaller", "unknown"):
        found.append(_how_to_time(p, run))
    return [f"{'And' if k else 'Next'}: {what}" for k, what in enumerate(found)]


def _how_to_resolve(p: Prediction, run: str) -> str:
    """Return how the noise scale gets known: at frozen weights if these decide, or by two runs."""
    source = p.history.source if p.end_may_decide and p.look is None else None
    if source is not None and (checkpoint := _last_checkpoint(source)) is not None:
        took = _seconds_to_measure(p)
        about = "" if took is None else f" (about {took})"
        into = f" --run {run}" if source.parent == checkpoint.parent / "runs" else ""
        return (
            f"measure it at the weights of the last checkpoint{about}. {TARGET} stands for your"
            " script and function:\n"
            f"  noisescale measure {TARGET} --checkpoint {shlex.quote(str(checkpoint))}{into}"
        )
    own, middle = p.position.batch_size, p.position.critical.value
    other = informative_batch_size(own, middle) if 0 < middle < math.inf else 16 * own
    return (
        f"train at batch size {count(other)} to the same result, and then run\n"
        f"  noisescale predict {run} --second-run RUN2"
    )


def _last_checkpoint(source: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder, or the one that was read."""
    if source.suffix == ".ckpt":
        return source
    output = source.parents[1] if source.parent.name == "runs" else source  # with TensorBoard
    of_trainer = filter(weights_in, output.glob("checkpoint-*"))
    found = [*source.glob("checkpoints/*.ckpt"), *of_trainer]
    itself = source if weights_in(source) else None
    return max(found, key=lambda path: path.stat().st_mtime, default=itself)


def _seconds_to_measure(p: Prediction) -> str | None:
    """Return how long `measure` likely takes, in words; None if no step was timed."""
    seconds = p.own_row.seconds_per_step.value
    if not math.isfinite(seconds):
        return None
    scale = p.noise_scale_now
    b = scale.value if math.isfinite(scale.value) else scale.low
    noise = b / p.position.batch_size if math.isfinite(b) else 1.0
    took = seconds * max(LEAST_MEASURED, MEASURED_BATCHES * noise)
    return f"{count(max(float(f'{min(took, MOST_SECONDS):.1g}'), 1.0))} s"


def _how_to_time(p: Prediction, run: str) -> str:
    """Return how other batch sizes are timed: `profile` times no loop of one's own."""
    if p.history.loop in ("", "lightning", "transformers"):
        return (
            f"time other batch sizes. {TARGET} stands for your script and function:\n"
            f"  noisescale profile {TARGET} --run {run}"
        )
    return (
        f"time another batch size: train 100 steps at {count(2 * p.run_batch_size)} on"
        f" {p.these_devices}, and then run\n  noisescale predict {run} --step-times RUN2"
    )
