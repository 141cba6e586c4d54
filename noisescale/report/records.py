# SPDX-License-Identifier: Apache-2.0
"""A prediction, and a fit of a sweep, as builtins and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np

from noisescale import __version__
from noisescale.bounded import Bounded
from noisescale.prediction.prediction import PredictionRecord
from noisescale.report.answers import doubled, measuring, timed
from noisescale.report.numbers import settled
from noisescale.tradeoff.fit import TradeoffFit

ROW = (
    *("batch_size", "devices", "device_batch_size", "accumulation", "steps", "examples", "hours"),
    *("device_hours", "cost", "cost_with_waiting", "extrapolated"),
)
HARDWARE = ("max_device_batch_size", "devices_per_node", "price_per_device_hour", "hour_worth")
SECOND_RUN = ("batch_sizes", "steps", "result", "scatter")
SWEEP = ("batch_size", "measured_steps", "fitted_steps", "log_residual")
"""What is told of a row, of the devices, of a run of a sweep."""


def as_dict(p: PredictionRecord) -> dict[str, Any]:
    """Return everything but the history, in builtins.

    | key | meaning |
    |---|---|
    | `version`, `unit`, `confidence` | of noisescale; what is counted; coverage of the bounds |
    | `resolved` | whether the critical batch size is a value, not a lower bound alone |
    | `critical_batch_size` | B_crit = E_min/S_min, with the bounds of theory and measurement |
    | `critical_batch_size_by_noise_scale` | as measured, with the bounds of that alone |
    | `recommended` | one of `rows`: on the run's devices, or what costs least |
    | `on_more_devices` | one of `rows`: up to where more devices pay; None where they do not |
    | `twice_the_devices` | batch size, devices; time and compute as ratios to the run's own |
    | `rows` | batch size, devices, device batch, accumulation; steps, examples, hours ... |
    | `tradeoff` | S_min, E_min, gamma |
    | `calibration` | kappa of B_crit = kappa·B_simple, its source, and whether it is theory |
    | `second_run` | batch sizes and steps of both runs, their result and scatter; None without |
    | `run` | what was measured: steps, examples, batch size, devices, hours; how many steps, \
      and which share of the time measuring took |
    | `step_time` | whether hours are known; most examples a device takes; devices a node |
    | `warnings`, `assumptions` | whole sentences |

    What has bounds is `{"value", "low", "high"}`. None is what is unknown (the value where only
    bounds are known) or unbounded (the upper bound where there is none); a batch size that
    changed along the run is None, too.
    """
    twice = doubled(p)
    record: dict[str, Any] = finite(
        {
            "version": __version__,
            **_told(p, "unit", "confidence", "resolved", "critical_batch_size"),
            **_told(p, "critical_batch_size_by_noise_scale"),
            "recommended": _told(p.recommended, *ROW),
            "on_more_devices": _told(p.on_more_devices, *ROW) if p.on_more_devices else None,
            "twice_the_devices": {
                "batch_size": twice.row.batch_size,
                "devices": twice.row.devices,
                "time": twice.time,
                "compute": twice.compute,
            },
            "rows": [_told(row, *ROW) for row in p.rows],
            "tradeoff": _told(p.law.middle, "min_steps", "min_examples") | _told(p.law, "gamma"),
            "calibration": _told(p.calibration, "kappa", "source")
            | {"theory": p.calibration.is_theory},
            "second_run": _told(p.second_run, *SECOND_RUN) if p.second_run else None,
            "run": _run(p),
            "step_time": {"known": timed(p)} | _told(p.hardware, *HARDWARE),
            **_told(p, "warnings", "assumptions"),
        }
    )
    return record


def as_json(p: PredictionRecord) -> str:
    """Return `as_dict` as JSON of RFC 8259, which has neither NaN nor infinity."""
    return json.dumps(as_dict(p), indent=2, allow_nan=False, ensure_ascii=False)


def fit_as_dict(
    fit: TradeoffFit,
    *,
    unit: str = "examples",
    optimal_batch_size: float | None = None,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Return a fit of a sweep in builtins, bounds and None as in `as_dict`.

    | key | meaning |
    |---|---|
    | `version`, `unit`, `confidence` | of noisescale; what is counted; coverage of the bounds |
    | `min_steps`, `min_examples`, `critical_batch_size` | S_min, E_min and their ratio |
    | `overhead_batch_size` | with 20 % overhead from B_opt; None where that is not given |
    | `relative_errors` | standard errors of their logarithms |
    | `sharpness`, `p_value` | of the bend that fits best, and of the law against it |
    | `rms_log_residual` | of the logarithms of the steps |
    | `sweep` | batch size, steps measured and fitted, log residual of each run |
    | `warnings` | whole sentences |
    """
    fitted_steps = map(fit.steps, fit.batch_sizes)
    sweep = zip(fit.batch_sizes, fit.measured_steps, fitted_steps, fit.log_residuals, strict=True)
    record: dict[str, Any] = finite(
        {
            "version": __version__,
            "unit": unit,
            "confidence": confidence,
            **fit.bands(confidence),
            "overhead_batch_size": None
            if optimal_batch_size is None
            else fit.overhead_batch_size(0.2, optimal_batch_size),
            "relative_errors": fit.relative_errors._asdict(),
            **_told(fit, "sharpness", "p_value", "rms_log_residual"),
            "sweep": [dict(zip(SWEEP, run, strict=True)) for run in sweep],
            "warnings": fit.warnings,
        }
    )
    return record


def _run(p: PredictionRecord) -> dict[str, Any]:
    seconds = p.history.get("seconds_per_step", np.full_like(p.run.steps, math.nan))
    timed_steps = np.isfinite(seconds)
    hours = math.nan
    if timed_steps.any():  # Segments that were not timed take as long as the others.
        mean = (p.run.steps * seconds)[timed_steps].sum() / p.run.steps[timed_steps].sum()
        hours = mean * p.run.steps.sum() / 3600
    measured_steps, share = measuring(p) or (math.nan, math.nan)
    optimizer = getattr(p.history, "optimizer", None)
    return {
        "optimizer": None if optimizer is None else optimizer.name.lower(),
        "parameters": getattr(p.history, "parameters", math.nan),
        "steps": float(p.run.steps.sum()),
        "examples": float((p.run.steps * p.run.batch_size).sum()),
        "batch_size": p.own_batch_size,
        "devices": p.own_devices,
        "hours": float(hours),
        "measured_steps": measured_steps,
        "measuring_share": share,
    }


def _told(found: object, *names: str) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def finite(value: Any) -> Any:
    """Return builtins that JSON can write: bands as dictionaries, None for NaN and infinities.

    Example:
        >>> finite({"steps": np.array([1.0, math.inf]), "bounds": (math.nan, 2)})
        {'steps': [1.0, None], 'bounds': [None, 2]}
    """
    if isinstance(value, Bounded):
        return finite(asdict(settled(value)))
    if isinstance(value, np.ndarray | np.generic):
        return finite(value.tolist())
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
