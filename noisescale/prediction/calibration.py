# SPDX-License-Identifier: Apache-2.0
"""B_crit = kappa·B_simple: the factor between theory and a model's own critical batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.history.history import as_history
from noisescale.history.optimizers import OptimizerMix
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Segments
from noisescale.prediction.branches import BranchedRun
from noisescale.prediction.second_run import SecondRun
from noisescale.prediction.theory import theory_band
from noisescale.refusal import Refusal
from noisescale.tradeoff.branch_losses import fit_branch_losses
from noisescale.tradeoff.fit import TradeoffFit
from noisescale.tradeoff.tradeoff import Floats

LEAST_KAPPA, MOST_KAPPA = 1e-6, 1e6
"""Far beyond the 1/8 to 20 that were found, and near enough for all sums to stay finite."""

_FARTHEST = 40.0
"""The logarithm of the largest factor that is tried: far beyond those that are allowed."""

_UNCALIBRATED = (
    "kappa = {:g}: not calibrated by this model. In the theory kappa is 1, B_crit = B_simple. The"
    " theory was derived for plain SGD with a well-tuned learning rate; other optimizers and a"
    " decaying learning rate change the factor (in McCandlish et al. 2018 the factor runs from 1/8"
    " to 20, for language models it can be larger)."
)


@dataclass(frozen=True)
class Calibration:
    """kappa = B_crit/B_simple, the factor that predictions put on the noise scale, and its source.

    The factor is `UNKNOWN` if B_crit was found without a noise scale.

    Examples:
        >>> Calibration(Bounded(2.5, 2.0, 3.1), "a sweep of the 85M model").kappa.value
        2.5

    Raises:
        ValueError: If the value is not from 1e-6 to 1e6, or not within its bounds.
    """

    kappa: Bounded
    source: str
    doubts: tuple[str, ...] = ()
    """Whole sentences, for the reader of a prediction."""
    is_theory: bool = False
    """Whether the value is that of other models because nothing better is known."""
    branched: BranchedRun | None = None
    """Branches, which have their own law over their own steps."""
    expected: str = ""
    """The factor of the theory, with the runs that its bounds come from, for a sentence."""

    def __post_init__(self) -> None:
        k = self.kappa
        if k is UNKNOWN:
            return  # B_crit is known, and the noise scale is not
        if not LEAST_KAPPA <= k.value <= MOST_KAPPA:
            raise Refusal(
                "kappa",
                f"be from {LEAST_KAPPA:g} to {MOST_KAPPA:g}",
                repr(k.value),
                "Pass 1 for the uncalibrated theory.",
            )
        if not 0 <= k.low <= k.value <= k.high:
            raise Refusal(
                "kappa",
                "be within its bounds",
                f"{k.value!r} in {k.low!r} to {k.high!r}",
                "Give the lower one first.",
            )

    @classmethod
    def theory(cls, optimizer: OptimizerMix | None = None, *, decayed: bool = False) -> Calibration:
        """Return the kappa to expect with this kind of optimizer, with its bounds.

        Without an optimizer the errors of the theory are not known: kappa and both bounds are 1.
        """
        if optimizer is None:
            return cls(Bounded(1.0, 1.0, 1.0), _UNCALIBRATED.format(1), is_theory=True)
        band = theory_band(optimizer, decayed=decayed)
        falling = " at a falling learning rate" if decayed else ""
        source = (
            f"{_UNCALIBRATED.format(band.factor.value)} With {optimizer.title}{falling} B_crit is"
            f" expected at {band.expectation}."
        )
        return cls(band.factor, source, is_theory=True, expected=band.expectation)

    @classmethod
    def from_sweep(
        cls, history: Mapping[str, NDArray[np.float64]], fit: TradeoffFit
    ) -> Calibration:
        """Find the factor with which a run has the critical batch size of a sweep.

        With noise scales kappa·b along the run, its B_crit = E_min/S_min rises with kappa. The
        answer is the kappa at which it equals the B_crit of the sweep. This need not be the plain
        ratio of both at kappa = 1: the larger kappa·b/B, the more the large noise scales count.

        Args:
            history: Of one run of the same model, to the sweep's goal.
            fit: The sweep, from `fit_tradeoff`. Its interval becomes the interval of kappa.

        Raises:
            ValueError: If the run has no resolved noise scale, or if its noise scale is 0 in so
                much of the run that no factor gives it the sweep's critical batch size.
        """
        run = Segments.of(history)
        law = RunLaw.of(run, Bounded(1.0, 1.0, 1.0))
        if math.isnan(law.middle.critical_batch_size):
            raise Refusal(
                "history",
                "have a resolved noise scale to be calibrated",
                "none",
                "Train longer, or at a larger batch size.",
            )
        swept = fit.critical_batch_size_band(0.95)
        if law.middle.critical_batch_size == 0:
            raise Refusal(
                "history",
                "have a noise scale above 0 to be calibrated",
                "0 in the whole run: no factor gives it a critical batch size",
                "Check that the batches of the run differ, or train longer.",
            )
        kappas = [_kappa(run, b) for b in (swept.value, swept.low, swept.high)]
        if math.isinf(kappas[0]):
            share = float(run.steps[run.noise_scale == 0].sum() / run.steps.sum())
            raise Refusal(
                "history",
                f"allow for the sweep's critical batch size, {swept.value:.3g}",
                f"a noise scale of 0 in {share:.0%} of its steps, which no factor makes up for",
                "Train longer, or calibrate with another run.",
            )
        return cls(
            Bounded(*kappas),
            f"fitted to a sweep of {len(set(fit.batch_sizes))} batch sizes with"
            f" B_crit = {swept.value:.3g}",
            tuple(f"About the sweep that kappa was fitted to: {doubt}" for doubt in fit.warnings),
        )

    @classmethod
    def from_second_run(cls, run: Segments, second: SecondRun) -> Calibration:
        """Return the factor that two runs to one result imply; `UNKNOWN` without a noise scale.

        The factor is reported, not used: two runs have a law of their own.
        """
        found = second.critical_batch_size
        simple = RunLaw.of(run, Bounded(1.0, 1.0, 1.0)).middle.critical_batch_size
        usual = 0 < found.value < math.inf and 0 < simple < math.inf
        kappa = found * (1 / simple) if usual else UNKNOWN
        return cls(kappa, second.source)

    @classmethod
    def from_branched_run(
        cls, history: Mapping[str, NDArray[np.float64]], branched: BranchedRun
    ) -> Calibration:
        """Compare the B_crit of branches with the noise scale of the run over the same steps.

        The factor is used only before the steps of the branches. Over their own steps the branches
        give B_crit directly, see `BranchedRun.law`.

        Args:
            history: The history of the run.
            branched: The run's branches.

        Raises:
            ValueError: If no branch reached the loss, the run has no such steps, or the branches
                are of another run.
        """
        _check_same_run(history, branched)
        found, simple = branched.critical_batch_size(), branched.by_noise_scale(history)
        sizes = sorted({branch.batch_size for branch in branched.branches})
        source = (
            f"branches at {', '.join(f'{size:,.4g}' for size in sizes)} give {found.value:,.3g}"
            f" ({found.low:,.3g} to {found.high:,.3g}) over their own steps {branched.start:,.0f}"
            f" to {branched.end:,.0f}; before these steps the noise scale gives B_crit"
        )
        both = all(0 < band.value < math.inf for band in (found, simple))
        kappa = found * (1 / simple.value) if both else UNKNOWN
        return cls(kappa, source, branched.doubts, branched=branched)

    @classmethod
    def from_branches(
        cls,
        noise_scale: Bounded,
        batch_sizes: Floats,
        losses: Floats,
        tolerance: float = 0.01,
        *,
        scatter: float | None = None,
        orders: Sequence[object] | None = None,
    ) -> Calibration:
        """Compare a noise scale with branches from a checkpoint, all over the same examples.

        The law L + D·B/(B + B_crit) is fitted to the losses, see `fit_branch_losses`.

        Args:
            noise_scale: B_simple over the branches' span with its interval, in examples.
            batch_sizes: Of the branches, in examples; repeated ones for several orders.
            losses: Smoothed losses at their ends.
            tolerance: How much higher the loss may be at Merrill's largest batch size that keeps
                up. This batch size is reported beside B_crit.
            scatter: Standard deviation of a loss, see `fit_branch_losses`.
            orders: Orders of the data, see `fit_branch_losses`.

        Raises:
            ValueError: If the noise scale is not resolved, there are fewer than three batch
                sizes, or their losses bound B_crit on neither side.

        References:
            Merrill et al. 2025, arXiv:2505.23971.
        """
        found = fit_branch_losses(batch_sizes, losses, scatter, orders=orders, tolerance=tolerance)
        critical = found.critical_batch_size
        if not (noise_scale.value > 0 and noise_scale.low > 0 and math.isfinite(noise_scale.high)):
            raise Refusal(
                "noise_scale", "be resolved", repr(noise_scale), "Branch later in the run."
            )
        open_ended = critical.low == 0 and math.isinf(critical.high)
        if open_ended or not 0 < critical.value < math.inf:
            raise Refusal(
                "losses",
                "show up to which batch size branches keep up and from which they fall behind",
                f"a critical batch size of {critical.low:.3g} to {critical.high:.3g}, within"
                f" their scatter of {found.scatter:.3g}",
                "Branch at smaller and at larger batch sizes, in several orders of the data.",
            )
        keeps = "even the second batch size falls behind"
        if found.keeping_up is not None:
            keeps = f"{found.keeping_up:,.4g} is the largest batch size that keeps up"
        return cls(
            Bounded(
                critical.value / noise_scale.value,
                critical.low / noise_scale.high,
                critical.high / noise_scale.low,
            ),
            f"fitted to the losses of branches, with B_crit = {critical.value:,.3g}"
            f" ({critical.low:,.3g} to {critical.high:,.3g}) at a scatter of {found.scatter:.2g};"
            f" by the rule of Merrill et al., with a tolerance of {tolerance:g}, {keeps}, which is"
            " not B_crit",
        )


def _kappa(run: Segments, critical_batch_size: float) -> float:
    """Return the factor that gives the run this critical batch size; infinite if none does."""
    if critical_batch_size in (0.0, math.inf):
        return critical_batch_size

    def excess(log_kappa: float) -> float:
        kappa = math.exp(log_kappa)
        critical = RunLaw.of(run, Bounded(kappa, kappa, kappa)).middle.critical_batch_size
        if not 0 < critical < math.inf:
            raise Refusal(
                "history",
                f"also be resolved at kappa = {kappa:.3g} to be calibrated with a critical"
                f" batch size of {critical_batch_size:.3g}",
                "a run that is too noisy",
                "Train longer, or calibrate with a run at a larger batch size.",
            )
        return math.log(critical / critical_batch_size)

    # B_crit rises with kappa, to a limit where some segments have the noise scale 0: they need
    # steps at any kappa.
    at, off = 0.0, excess(0.0)
    step = -math.copysign(1.0, off)
    while abs(at) < _FARTHEST:
        end = min(max(at + step, -_FARTHEST), _FARTHEST)
        if excess(end) * off <= 0:
            return math.exp(brentq(excess, *sorted((at, end)), xtol=1e-12))
        at, step = end, 2 * step
    return math.inf if at > 0 and (run.noise_scale == 0).any() else math.exp(at)


def _check_same_run(history: Mapping[str, NDArray[np.float64]], branched: BranchedRun) -> None:
    """Raise a ValueError where batch size or parameters say that branches are of another run."""
    run = Segments.of(as_history(history).between(branched.start, branched.end))
    own = float(getattr(history, "parameters", math.nan))
    theirs = math.nan if branched.parameters is None else branched.parameters
    for what, one, other in (
        ("batch size", branched.batch_size, run.mean_batch_size),
        ("number of trained parameters", theirs, own),
    ):
        if abs(one - other) > 0.01 * other:
            raise Refusal(
                "branches",
                "be of this run",
                f"branches with a {what} of {one:,.6g}, while the run has {other:,.6g}",
                "Name the run that they were branched from.",
            )
