# SPDX-License-Identifier: Apache-2.0
"""The calibration of `noisescale predict`: a number, a sweep, or branches of the run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from noisescale.printable import printable
from noisescale.refusal import Refusal, rename_arguments

if TYPE_CHECKING:
    from noisescale.bounded import Bounded
    from noisescale.history.history import History
    from noisescale.prediction import Calibration


def calibration_of(
    history: History,
    kappa: float | None,
    sweep: Path | None,
    branches: Path | None,
    branch_step: int | None,
    *,
    branch_examples: float | None = None,
    loss_scatter: float | None = None,
) -> Calibration | float | None:
    """Return the calibration that the options of these names give; None if they give none.

    Raises:
        ValueError: If options do not go together, or a file does not fit the run.
        OSError: If a file cannot be read.
    """
    if sum(given is not None for given in (kappa, sweep, branches)) > 1:
        raise Refusal(
            ("--calibration", "--sweep", "--branches"),
            "not be combined",
            "several of them",
            "Give only the one that you trust most.",
        )
    if branch_step is not None and branches is None:
        raise Refusal(
            "--branch-step",
            "be used with `--branches`",
            f"only {branch_step}",
            "Also give the CSV file with the losses of the branches.",
        )
    of_losses = {
        "--branch-step": branch_step,
        "--branch-examples": branch_examples,
        "--loss-scatter": loss_scatter,
    }
    given = [name for name, value in of_losses.items() if value is not None]
    if given and (branches is None or branches.suffix == ".json"):
        raise Refusal(
            str(given[0]),
            "be used with a CSV file of losses in `--branches`",
            "no file" if branches is None else printable(branches),
            f"Leave `{given[0]}` out.",
        )
    if sweep is not None:
        return _by_sweep(history, sweep)
    if branches is None:
        return kappa
    if branches.suffix == ".json":
        return _by_branched_run(history, branches)
    if branch_step is None:
        raise Refusal(
            "--branches",
            "be used with `--branch-step` if it is a CSV file",
            "no step",
            "Give the step of the run at which the branches started.",
        )
    return _by_losses(history, branches, branch_step, branch_examples, loss_scatter)


def _by_sweep(history: History, sweep: Path) -> Calibration:
    from noisescale.prediction import Calibration
    from noisescale.tradeoff.fit import fit_tradeoff
    from noisescale.tradeoff.sweep_files import read_sweeps

    (curve,) = read_sweeps(sweep).values()
    names = {"batch_sizes": "batch_size", "history": "run", "kappa": "--sweep"}
    with warnings.catch_warnings(), rename_arguments(names):
        warnings.simplefilter("ignore")  # they are among those of the prediction
        return Calibration.from_sweep(history, fit_tradeoff(*curve))


def _by_branched_run(history: History, branches: Path) -> Calibration:
    from noisescale.prediction import Calibration
    from noisescale.prediction.branches import BranchedRun

    with rename_arguments({"history": "run"}):
        return Calibration.from_branched_run(history, BranchedRun.from_file(branches))


def _by_losses(
    history: History, branches: Path, step: int, examples: float | None, scatter: float | None
) -> Calibration:
    from noisescale.csv_lines import csv_lines
    from noisescale.prediction import Calibration
    from noisescale.tradeoff.sweep_files import read_sweeps

    (_, columns), *_ = list(csv_lines(branches)) or [(0, [])]
    by = "order" if "order" in columns else None
    curves = read_sweeps(branches, measured="loss", by=by)
    sizes = [size for curve in curves.values() for size in curve.batch_sizes]
    losses = [loss for curve in curves.values() for loss in curve.measured]
    orders = [name for name, curve in curves.items() for _ in curve.measured]
    with rename_arguments(
        {"step": "--branch-step", "history": "run", "noise_scale": "--branch-step"}
    ):
        noise_scale = _noise_scale_over(history, step, examples)
    names = {"batch_sizes": "batch_size", "losses": "loss", "kappa": "--branches"}
    with rename_arguments(names | {"scatter": "--loss-scatter"}):
        return Calibration.from_branches(
            noise_scale, sizes, losses, scatter=scatter, orders=orders if by else None
        )


def _noise_scale_over(history: History, step: int, examples: float | None) -> Bounded:
    """Return B_crit by the noise scale over examples from a step on, or at the step alone."""
    import numpy as np

    from noisescale.history.run_law import critical_batch_size_over
    from noisescale.history.segments import noise_scale_at

    at_step = noise_scale_at(history, step)
    if examples is None:
        return at_step
    seen = np.interp(step, history["step"], history["examples"])
    if seen + examples > 1.01 * history["examples"][-1]:
        raise Refusal(
            "--branch-examples",
            "not go beyond the end of the run",
            f"{examples:,.0f}: branches start at example {seen:,.0f}, and the run has"
            f" {history['examples'][-1]:,.0f} examples",
            "Give a smaller number, or leave it out.",
        )
    end = np.interp(seen + examples, history["examples"], history["step"])
    return critical_batch_size_over(history, step, float(end))
