# SPDX-License-Identifier: Apache-2.0
"""Rules for the batch size: from what is known of the run to the global batch that is wanted.

A rule says which batch size goes with a noise scale. It is a policy behind a `Gate`, which asks it
at both ends of the interval. Schedules are policies by themselves.
"""

from __future__ import annotations

import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from noisescale.checks import is_real, require_positive
from noisescale.estimation.noise_scale import NoiseScale, three_digits
from noisescale.plan import Plan
from noisescale.refusal import Refusal
from noisescale.scheduling.policy import Policy as Policy
from noisescale.scheduling.policy import Progress as Progress
from noisescale.scheduling.policy import Wanted as Wanted


class Rule(Protocol):
    """Return the batch size for a noise scale. It must rise with the noise scale."""

    def __call__(self, noise_scale: float, plan: Plan, progress: Progress) -> float:
        """Return a number of examples; 0 or infinity is allowed if the noise scale is."""
        ...


class TradeoffRule:
    """√(r·B_simple): the batch size at which one step saved always costs r examples.

    A run is on the Pareto front of steps against examples if the exchange rate r = B²/B_simple is
    the same along the whole run. The default r is the critical batch size of the run so far,
    E_min/S_min, at which the run takes twice the fewest steps and twice the fewest examples. Before
    that is known, r is B_simple.

    Args:
        exchange_rate: r, the examples that one step saved may cost.
        share: c, for c·√(r·B_simple): a step saved may cost c²·r examples.

    Examples:
        >>> TradeoffRule(exchange_rate=100)(25.0, Plan(8, 1), Progress(50, 400))
        50.0
        >>> TradeoffRule(exchange_rate=100, share=0.5)(25.0, Plan(8, 1), Progress(50, 400))
        25.0

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix D.
    """

    def __init__(self, exchange_rate: float | None = None, *, share: float = 1.0) -> None:
        self._exchange_rate = exchange_rate
        self._share = require_positive("share", share, "Leave it at 1.")
        if exchange_rate is not None:
            require_positive("exchange_rate", exchange_rate, "Give the examples a step is worth.")

    def __call__(self, noise_scale: float, plan: Plan, progress: Progress) -> float:
        """Return c·√(r·noise_scale)."""
        rate = self._exchange_rate or progress.critical_batch_size or noise_scale
        return self._share * math.sqrt(rate * noise_scale) if noise_scale else 0.0


class RatioRule:
    """c·B_simple: at c = 1 a step makes half the progress of a noise-free one.

    Examples:
        >>> RatioRule(0.5)(50.0, Plan(8, 1), Progress(50, 400))
        25.0
    """

    def __init__(self, ratio: float = 1.0) -> None:
        self._ratio = require_positive("ratio", ratio, "Leave it at 1 for B_simple itself.")

    def __call__(self, noise_scale: float, plan: Plan, progress: Progress) -> float:
        """Return c·noise_scale."""
        return self._ratio * noise_scale


class NormTestRule:
    """B_simple/θ²: the error of the gradient is at most θ times the gradient, in mean square.

    The norm test grows a batch until tr(Σ)/B <= θ²·|G|². Its usual form uses the step's own |g|²
    for |G|². As |g|² is at least tr(Σ)/B, that form never asks for more than B/θ², and never for
    less than B. This rule uses averages without that bias, so it asks for the right batch size in
    both directions.

    Args:
        theta: θ, the error allowed, relative to the gradient.

    Examples:
        >>> NormTestRule(theta=0.5)(25.0, Plan(8, 1), Progress(50, 400))
        100.0

    References:
        Byrd et al. 2012, "Sample size selection in optimization methods for machine learning".
        Lau et al. 2024, arXiv:2402.11215, for data-parallel training.
    """

    def __init__(self, theta: float = 0.5) -> None:
        self._theta = require_positive("theta", theta, "Leave it at 0.5.")

    def __call__(self, noise_scale: float, plan: Plan, progress: Progress) -> float:
        """Return noise_scale/θ²."""
        return noise_scale / self._theta**2


class DoublingRule:
    """Double the batch once the critical batch size exceeds twice the batch; never shrink it.

    B_simple is used as the critical batch size. Merrill et al. measure the critical batch size by
    branching the run, and find B_simple far below it: see `Calibration`.

    Examples:
        >>> rule = DoublingRule()
        >>> [rule(b, Plan(32, 1), Progress(50, 1600)) for b in (60.0, 70.0)]
        [32.0, 64.0]

    References:
        Merrill et al. 2025, arXiv:2505.23971, section 4.
    """

    def __call__(self, noise_scale: float, plan: Plan, progress: Progress) -> float:
        """Return the plan's batch size, or twice that."""
        doubled = 2.0 * plan.batch_size
        return doubled if noise_scale >= doubled else float(plan.batch_size)


class Given(Policy):
    """A schedule of batch sizes by steps or by examples.

    Args:
        batch_sizes: A mapping from the steps (or examples) done to the global batch size from there
            on.
        by: What the keys count.

    Examples:
        >>> ramp_up = Given({0: 64, 1000: 128})
        >>> [float(ramp_up(None, Plan(64, 1), Progress(n, 64.0 * n))) for n in (0, 999, 1000)]
        [64.0, 64.0, 128.0]
    """

    needs_a_cap = False

    def __init__(
        self, batch_sizes: Mapping[int, float], by: Literal["steps", "examples"] = "steps"
    ) -> None:
        if by not in ("steps", "examples"):
            raise Refusal("by", 'be "steps" or "examples"', repr(by), "Choose one.")
        if not batch_sizes:
            raise Refusal("batch_sizes", "have an entry", "none", "Give {0: 64}, say.")
        for since, size in batch_sizes.items():
            if not (is_real(since) and since >= 0):
                raise Refusal(
                    "batch_sizes",
                    f"have numbers of {by} as keys",
                    repr(since),
                    f"Give the {by} after which a batch size begins.",
                )
            require_positive(f"batch_sizes[{since!r}]", size, "Give a number of examples.")
        self._by = by
        self.at_every_step = self.by_reduced_values = by == "examples"
        entries = sorted((float(since), float(size)) for since, size in batch_sizes.items())
        self._begins = [since for since, _ in entries]
        self._sizes = [size for _, size in entries]
        self.checksum = zlib.crc32(repr(entries).encode()) if by == "steps" else None
        """A checksum that ranks compare once; None if the schedule counts examples."""

    def __call__(self, noise_scale: object, plan: Plan, progress: Progress) -> Wanted:
        """Return the batch size of the last entry that has begun."""
        done = progress.steps if self._by == "steps" else progress.examples
        last = bisect_right(self._begins, done) - 1
        if last < 0:
            return Wanted(plan.batch_size, "before the schedule begins")
        return Wanted(self._sizes[last], f"scheduled from {self._begins[last]:g} {self._by} on")


class GivenByShare(Policy):
    """A ramp: shares of the run's batch size, each from a share of the run on.

    Args:
        shares: A mapping from the share of the run that is over to the share of the batch size that
            the learning rate was chosen for.

    Examples:
        >>> ramp = GivenByShare({0.0: 1 / 4, 0.03: 1 / 2, 0.1: 1.0})
        >>> of = Progress(0, 0.0, base_batch_size=1024)
        >>> [float(ramp(None, Plan(1024, 1), of._replace(share=x))) for x in (0, 0.03, 0.5)]
        [256.0, 512.0, 1024.0]

    References:
        `"nanochat"`: karpathy/nanochat, pull request 851.
    """

    needs_a_cap = False
    at_every_step = by_reduced_values = True

    def __init__(self, shares: Mapping[float, float]) -> None:
        self._begins, self._shares = zip(*sorted(shares.items()), strict=True)

    def note(self, plan: Plan, progress: Progress) -> str | None:
        """Say where there is no share of the run to go by."""
        size = three_digits(plan.batch_size)
        unknown = f"the batch size stays {size}, as the end of the run is not known"
        return unknown if progress.share is None else None

    def __call__(self, noise_scale: object, plan: Plan, progress: Progress) -> Wanted:
        """Return the share of the batch size that has begun last."""
        if progress.share is None:
            return Wanted(plan.batch_size, "the end of the run is not known")
        last = bisect_right(self._begins, progress.share) - 1
        size = self._shares[last] * progress.base_batch_size
        return Wanted(size, f"from {100 * self._begins[last]:g} % of the run on")


NANOCHAT = {0.0: 1 / 4, 0.03: 1 / 2, 0.1: 1.0}
"""A quarter of the batch in the first 3 % of the tokens, half of it in the next 7 %."""


class InsteadOfDecay(Policy):
    """Grow the batch when the run's own schedule lowers the learning rate.

    The batch is B0·lr_peak/lr, where lr is what the schedule gives. The optimizer uses lr times the
    factor of `lr_scaling`. This gives two published rules:

    | `lr_scaling` | lr used | rule |
    |---|---|---|
    | `"linear"` | stays at lr_peak, decays from `max_batch_size` on | Smith et al. |
    | `"sqrt"` | √(lr·lr_peak): where lr is divided by a, lr/√a and a·B | Seesaw |

    Let the schedule count examples, or else it decays later in the data. `BatchSizeScheduler` does
    this by default in a fit that epochs end; in your own loop use `BatchSizeController.clock`.

    Args:
        batch_size: B0, the global batch at the peak of the learning rate. Default: the batch
            size that the run starts with.

    Examples:
        >>> half = Progress(1000, 64_000.0, learning_rate=0.05, peak_learning_rate=0.1)
        >>> float(InsteadOfDecay(64)(None, Plan(64, 1), half))
        128.0

    References:
        Smith et al. 2018, arXiv:1711.00489. Meterez et al. 2025, "Seesaw".
    """

    follows_schedule = True

    def __init__(self, batch_size: float | None = None) -> None:
        if batch_size is not None:
            require_positive(
                "batch_size", batch_size, "Give the global batch at the peak of the learning rate."
            )
        self._batch_size = batch_size

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        """Return B0 times lr_peak/lr."""
        at_peak = self.at_peak(plan, progress)
        rate, peak = progress.learning_rate, progress.peak_learning_rate
        if rate <= 0 or peak <= 0:
            return Wanted(plan.batch_size, "the schedule's learning rate is zero")
        decay = peak / rate
        return Wanted(at_peak * decay, f"the schedule's lr is 1/{decay:.3g} of its peak")

    def at_peak(self, plan: Plan, progress: Progress) -> float:
        """Return B0, in examples."""
        return self._batch_size or progress.first_batch_size or plan.batch_size


_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kKmMbBtT]?)")


def count_of(text: str) -> int | None:
    """Return a number that may have the suffix k, M, B or T; None if the text is none.

    Examples:
        >>> count_of("1.5M"), count_of("200"), count_of("many")
        (1500000, 200, None)
    """
    found = _COUNT.fullmatch(text.strip())
    return None if found is None else round(float(found[1]) * _SUFFIXES[found[2].lower()])


def given_by_examples(batch_sizes: Mapping[str, float]) -> Given:
    """Return a schedule by the examples that were seen, from numbers with a suffix k, M, B or T.

    Raises:
        ValueError: If a key is no such number, or a batch size is not positive.

    Examples:
        >>> plan = given_by_examples({"0": 64, "1.5M": 128})
        >>> [float(plan(None, Plan(64, 1), Progress(1, n))) for n in (1.4e6, 1.5e6)]
        [64.0, 128.0]
    """
    parsed = {}
    for text, size in batch_sizes.items():
        if (since := count_of(text)) is None:
            raise Refusal(
                "policy",
                "have numbers of examples as keys that are texts",
                repr(text),
                'Write, for example, {"0": 64, "500k": 128, "2M": 256}.',
            )
        parsed[since] = size
    return Given(parsed, by="examples")


def given_in_words(schedule: str) -> Given:
    """Return a schedule by examples from the words of Megatron's `--step-batch-size-schedule`.

    Batch sizes and thresholds are in one unit, that of the run's batch sizes: examples, or tokens.

    Raises:
        ValueError: If it is none, or does not begin at 0.

    Examples:
        >>> ramp = given_in_words("0:768 250B:1536")
        >>> [float(ramp(None, Plan(64, 1), Progress(1, n))) for n in (0, 250e9)]
        [768.0, 1536.0]
    """
    batch_sizes: dict[str, float] = {}
    for entry in schedule.split():
        since, _, size = entry.partition(":")
        if count_of(since) is None or not count_of(size):
            raise Refusal("policy", _ENTRIES, repr(entry), _WRITE_WORDS)
        batch_sizes[since] = float(count_of(size) or 0)
    if not any(count_of(since) == 0 for since in batch_sizes):
        raise Refusal("policy", "begin at 0 examples", repr(schedule), _WRITE_WORDS)
    return given_by_examples(batch_sizes)


_ENTRIES = "have entries of examples and a batch size, as 250k:128"
_WRITE_WORDS = 'Write, for example, "0:64 500k:128 2M:256".'

PolicyLike = (
    Literal[
        "auto",
        "tradeoff",
        "ratio",
        "norm_test",
        "doubling",
        "seesaw",
        "find",
        "nanochat",
        "smith",
    ]
    | Mapping[str, float]  # first, or a command line's parser makes numbers of its keys
    | Mapping[int, float]
    | Callable[[NoiseScale, Plan, Progress], float]
    | str  # "0:64 500k:128"; last, or a command line's parser takes all of the above for it
)
"""What users can give as a policy."""
