# SPDX-License-Identifier: Apache-2.0
"""A prediction or a fit of a sweep in builtin types and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np

from noisescale._version import __version__
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
"""The keys of a row, of the devices, of a second run, and of a run of a sweep."""


def as_dict(p: PredictionRecord) -> dict[str, Any]:
    """Return everything but the history, in builtin types.

    | key | meaning |
    |---|---|
    | `version`, `unit`, `confidence` | of noisescale; of batch sizes; coverage of the bounds |
    | `resolved` | whether the critical batch size has a value, not only a lower bound |
    | `critical_batch_size` | B_crit = E_min/S_min, with errors of theory and measurement |
    | `critical_batch_size_by_noise_scale` | B_crit by the noise scale, with its own error only |
    | `recommended` | one of `rows`: the best on the run's devices, or the cheapest |
    | `on_more_devices` | one of `rows`: the most devices that pay off; None if none do |
    | `twice_the_devices` | batch size, devices; time and compute as ratios to the run's own |
    | `rows` | batch size, devices, device batch, accumulation; steps, examples, hours ... |
    | `tradeoff` | S_min, E_min, gamma |
    | `calibration` | kappa of B_crit = kappa·B_simple, its source, and whether it is theory |
    | `second_run` | batch sizes and steps of both runs, their result and scatter; may be None |
    | `run` | steps, examples, batch size, devices, hours; the number of measured steps, and the \
      share of the time that measuring took |
    | `step_time` | whether hours are known; most examples on a device; devices in a node |
    | `warnings`, `assumptions` | whole sentences |

    A quantity with bounds is `{"value", "low", "high"}`. Unknown values are None: the value if only
    bounds are known, the upper bound if there is none, and a batch size that changed along the run.
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
    """Return `as_dict` as JSON by RFC 8259, without NaN and infinity."""
    return json.dumps(as_dict(p), indent=2, allow_nan=False, ensure_ascii=False)


def fit_as_dict(
    fit: TradeoffFit,
    *,
    unit: str = "examples",
    optimal_batch_size: float | None = None,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Return a fit of a sweep in builtin types. Bounds and None are as in `as_dict`.

    | key | meaning |
    |---|---|
    | `version`, `unit`, `confidence` | of noisescale; of batch sizes; coverage of the bounds |
    | `min_steps`, `min_examples`, `critical_batch_size` | S_min, E_min and their ratio |
    | `sharpness` | the exponent α of the law |
    | `overhead_batch_size` | the batch size with 20 % overhead; None if B_opt was not given |
    | `rms_log_residual` | root mean square of the residuals of log steps |
    | `sweep` | batch size, measured and fitted steps, log residual of each run |
    | `warnings` | whole sentences |
    """
    found, fitted_steps = fit.regimes(confidence), map(fit.steps, fit.batch_sizes)
    sweep = zip(fit.batch_sizes, fit.measured_steps, fitted_steps, fit.log_residuals, strict=True)
    record: dict[str, Any] = finite(
        {
            "version": __version__,
            "unit": unit,
            "confidence": confidence,
            **_told(found, "min_steps", "min_examples", "critical_batch_size", "sharpness"),
            "overhead_batch_size": None
            if optimal_batch_size is None
            else fit.overhead_batch_size(0.2, optimal_batch_size),
            "rms_log_residual": fit.rms_log_residual,
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
    """Return values that JSON can hold: bands as dictionaries, None for NaN and infinities.

    Examples:
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
