# SPDX-License-Identifier: Apache-2.0
"""When a measurement has enough batches, and what it says until then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from noisescale.bounded import Bounded
from noisescale.estimation.independent_batches import LEAST, IndependentBatches
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.frozen.comparison import Comparison, compare, verdict_on
from noisescale.frozen.frozen_fit import BatchStatistics
from noisescale.frozen.judged_monitor import JudgedMonitor
from noisescale.frozen.measurement import text_of_scale
from noisescale.report.numbers import number

_LOOKS = 1.5
"""Batches from one look at the interval to the next, as a factor.

The fewer looks, the less a narrow interval is one by chance."""

_LONGER = 4
"""How many times the batches it goes on for, while one batch makes the scatter."""

_MOST_FOR_WAYS = 60
"""Batches after which no more are taken for the sake of judging ways."""


class StoppingRule:
    """Says when there are enough batches, and how many more there may be.

    Args:
        batches: As for `measure`.
        width: As for `measure`.
        seconds: As for `measure`.
        confidence: As for `measure`.
        judged: Monitors whose judgement is waited for, within reason.
        progress: As for `measure`.
    """

    def __init__(
        self,
        batches: int | Literal["auto"],
        width: float,
        seconds: float,
        confidence: float,
        judged: Sequence[JudgedMonitor],
        progress: Callable[[str], None] | None,
    ) -> None:
        self._batches, self._width, self.seconds = batches, width, seconds
        self._confidence, self._judged, self.progress = confidence, judged, progress
        self._next_look = LEAST
        self._narrow_from = 0
        """The batches at which the interval was narrow for the first time."""
        self.began = time.monotonic()
        self.reason = "as many as were asked for"

    def enough(self, seen: BatchStatistics) -> bool:
        """Return whether to stop."""
        if self._batches != "auto":
            return seen.batches >= self._batches
        spent = time.monotonic() - self.began
        if spent >= self.seconds and (seen.batches >= LEAST or spent >= self.seconds + 60):
            self.reason = f"until the time was over ({self.seconds:g} seconds)"
            return True
        if seen.batches < self._next_look:
            return False
        self._next_look = math.ceil(_LOOKS * seen.batches)
        own = IndependentBatches(seen.whole)
        found = own.noise_scale(self._confidence)
        narrow = found.low > 0 and found.high <= self._width * found.low
        if narrow:
            self._narrow_from = self._narrow_from or seen.batches
        if narrow and (not own.hangs_on_one or seen.batches >= _LONGER * self._narrow_from):
            self.reason = "until the interval was narrow enough"
            undecided = [m for m in self._judged if not _is_decided(m, own, found, seen)]
            if not undecided or seen.batches >= _MOST_FOR_WAYS:
                return True
        say(self.progress, self._forecast(found, seen, spent))
        return False

    def _forecast(self, found: NoiseScale, seen: BatchStatistics, spent: float) -> str:
        each = spent / seen.batches
        line = f"{seen.batches} batches: {text_of_scale(found)}"
        if not found.resolved or found.low <= 0:
            return f"{line}. {number(each)} s a batch, {self.seconds - spent:.0f} s at most"
        wider = math.log(found.high / found.low) / math.log(self._width)
        needed = max(math.ceil(seen.batches * wider**2), self._next_look)
        left = min(each * (needed - seen.batches), self.seconds - spent)
        return f"{line}. About {needed:,} batches in all, {number(left)} s more"


def comparison_of(
    traces: dict[int, float], own: IndependentBatches, confidence: float = 0.95
) -> Comparison:
    """Compare a way with independent batches, where both have an answer."""
    known = dict(enumerate(own.noise_traces.tolist(), start=2))
    both = [k for k in traces if k in known]
    return compare([traces[k] for k in both], [known[k] for k in both], confidence)


def _is_decided(
    monitor: JudgedMonitor, own: IndependentBatches, found: NoiseScale, seen: BatchStatistics
) -> bool:
    if not monitor.noise_traces:
        return bool(monitor.said)
    scale = Bounded(found.value, found.low, found.high)
    shown = comparison_of(monitor.noise_traces, own).noise_scale_ratio(scale, seen.batch_size)
    return verdict_on(shown) != "not contradicted"


def say(progress: Callable[[str], None] | None, line: str) -> None:
    """Tell how far it is, if anyone listens."""
    if progress is not None:
        progress(line)
