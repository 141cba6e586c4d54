# SPDX-License-Identifier: Apache-2.0
"""The calibration that `predict` is asked for: a number, a sweep, or branches of the run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import numpy as np

from noisescale.bounded import Bounded
from noisescale.csv_lines import csv_lines
from noisescale.history.history import History
from noisescale.history.optimizers import has_decayed
from noisescale.history.run_law import RunLaw, critical_batch_size_over
from noisescale.history.segments import Segments, noise_scale_at
from noisescale.prediction.branches import BranchedRun
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.second_run import SecondRun
from noisescale.refusal import Refusal, rename_arguments
from noisescale.tradeoff.fit import TradeoffFit, fit_tradeoff
from noisescale.tradeoff.sweep_files import read_sweeps

if TYPE_CHECKING:
    from noisescale.tradeoff.fit_sweep import FittedSweep

T = TypeVar("T")


class HasBranches(Protocol):
    """What `branch` returns."""

    @property
    def branched(self) -> BranchedRun:
        """The run and its branches."""


Sweep: TypeAlias = "TradeoffFit | FittedSweep | str | PathLike[str]"
Branches = BranchedRun | HasBranches | str | PathLike[str]


def calibration_from(
    history: History,
    calibration: Calibration | float | None,
    sweep: Sweep | None,
    branches: Branches | None,
    *,
    branch_step: float | None = None,
    branch_examples: float | None = None,
    loss_scatter: float | None = None,
) -> Calibration | float | None:
    """Return the calibration that these arguments of `predict` give; None if they give none.

    Raises:
        ValueError: If arguments do not go together, or a file does not fit the run.
        OSError: If a file cannot be read.
    """
    of_losses = {
        "branch_step": branch_step,
        "branch_examples": branch_examples,
        "loss_scatter": loss_scatter,
    }
    if not (branches is None or isinstance(branches, (BranchedRun, str, PathLike))):
        branches = branches.branched
    is_csv = isinstance(branches, (str, PathLike)) and Path(branches).suffix != ".json"
    given = [name for name, value in of_losses.items() if value is not None]
    if given and not is_csv:
        raise Refusal(
            given[0],
            "be used with a CSV file of losses in `branches`",
            "no file" if branches is None else str(branches),
            f"Leave `{given[0]}` out.",
        )
    if sweep is not None:
        return _by_sweep(history, sweep)
    if branches is None:
        return calibration
    if isinstance(branches, BranchedRun):
        return Calibration.from_branched_run(history, branches)
    if not is_csv:
        return Calibration.from_branched_run(history, BranchedRun.from_file(branches))
    if branch_step is None:
        raise Refusal(
            "branches",
            "be used with `branch_step` if it is a CSV file",
            "no step",
            "Give the step of the run at which the branches started.",
        )
    return _by_losses(history, Path(branches), branch_step, branch_examples, loss_scatter)


def law_of(
    history: History,
    run: Segments,
    second: SecondRun | None,
    calibration: Calibration | float | None,
) -> tuple[RunLaw, Calibration]:
    """Return steps and examples at any batch size, and the calibration that they come from."""
    if second is not None:
        law = RunLaw.with_critical_batch_size(run, second.critical_batch_size)
        return law, Calibration.from_second_run(run, second)
    if calibration is None:
        calibration = _theory(history)
    elif not isinstance(calibration, Calibration):
        calibration = Calibration(Bounded(calibration, calibration, calibration), "given")
    if calibration.branched is None:
        return _checked_law(history, run, calibration), calibration
    start = calibration.branched.start
    before = _theory(history.until(start) if start else history)
    return calibration.branched.law(history, before.kappa), calibration


def _theory(history: History) -> Calibration:
    return Calibration.theory(history.optimizer, decayed=has_decayed(history))


def _checked_law(history: History, run: Segments, calibration: Calibration) -> RunLaw:
    """Return the law of a run, or say that nothing is known of it."""
    law = RunLaw.of(run, calibration.kappa)
    critical = law.critical_batch_size
    if critical.high == 0:
        raise Refusal(
            "history",
            "have a noise scale above 0",
            f"no noise beyond the measuring error in {run.steps.sum():,.0f} steps",
            "Train at a smaller batch size, where the noise is larger, or check that the"
            " batches differ.",
        )
    if history["measured_steps"][-1] == 0:
        raise Refusal(
            "history",
            "have a noise scale",
            f"none, as no step was measured in {run.steps.sum():,.0f}",
            "A warning of that training has the reason and what to change.",
        )
    if math.isnan(critical.value) and critical.low == 0 and math.isinf(critical.high):
        raise Refusal(
            "history",
            "have a noise scale, or a lower bound of it",
            f"neither in {run.steps.sum():,.0f} steps",
            "Train longer, or at a larger batch size, until the monitor has one.",
        )
    return law


def _by_sweep(history: History, sweep: Sweep) -> Calibration:
    if isinstance(sweep, TradeoffFit):
        fit = sweep
    elif not isinstance(sweep, str | PathLike):
        fit = _only_curve(sweep.curves)
    else:
        curve = _only_curve(read_sweeps(sweep))
        with warnings.catch_warnings(), rename_arguments({"batch_sizes": "batch_size"}):
            warnings.simplefilter("ignore")  # they are among those of the prediction
            fit = fit_tradeoff(*curve)
    with rename_arguments({"kappa": "sweep"}):
        return Calibration.from_sweep(history, fit)


def _only_curve(curves: Mapping[str, T]) -> T:
    if len(curves) != 1:
        raise Refusal("sweep", "have one curve", f"{len(curves)} curves", "Give one of them.")
    (curve,) = curves.values()
    return curve


def _by_losses(
    history: History,
    branches: Path,
    step: float,
    examples: float | None,
    scatter: float | None,
) -> Calibration:
    (_, columns), *_ = list(csv_lines(branches)) or [(0, [])]
    by = "order" if "order" in columns else None
    curves = read_sweeps(branches, measured="loss", by=by)
    sizes = [size for curve in curves.values() for size in curve.batch_sizes]
    losses = [loss for curve in curves.values() for loss in curve.measured]
    orders = [name for name, curve in curves.items() for _ in curve.measured]
    with rename_arguments({"step": "branch_step", "noise_scale": "branch_step"}):
        noise_scale = _noise_scale_over(history, step, examples)
    names = {"batch_sizes": "batch_size", "losses": "loss", "kappa": "branches"}
    with rename_arguments(names | {"scatter": "loss_scatter"}):
        return Calibration.from_branches(
            noise_scale, sizes, losses, scatter=scatter, orders=orders if by else None
        )


def _noise_scale_over(history: History, step: float, examples: float | None) -> Bounded:
    """Return B_crit by the noise scale over examples from a step on, or at the step alone."""
    at_step = noise_scale_at(history, step)
    if examples is None:
        return at_step
    seen = np.interp(step, history["step"], history["examples"])
    if seen + examples > 1.01 * history["examples"][-1]:
        raise Refusal(
            "branch_examples",
            "not go beyond the end of the run",
            f"{examples:,.0f}: branches start at example {seen:,.0f}, and the run has"
            f" {history['examples'][-1]:,.0f} examples",
            "Give a smaller number, or leave it out.",
        )
    end = np.interp(seen + examples, history["examples"], history["step"])
    return critical_batch_size_over(history, step, float(end))
