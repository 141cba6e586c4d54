# SPDX-License-Identifier: Apache-2.0
"""A prediction in builtin types."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from noisescale._version import __version__
from noisescale.prediction.same_batch import as_records
from noisescale.report.records import fields_of, finite

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

ROW = (
    *("batch_size", "devices", "device_batch_size", "accumulation", "steps", "examples", "hours"),
    *("device_hours", "cost", "basis", "extrapolated"),
)
HARDWARE = ("max_device_batch_size", "devices_per_node", "price_per_device_hour")
DECISION = ("verdict", "batch_size", "likely", "headline", "reason", "next")
SECOND_RUN = ("batch_sizes", "steps", "result", "scatter")
"""The keys of a row, of the devices, of a decision and of a second run."""


def as_dict(p: Prediction) -> dict[str, Any]:
    """Return everything but the history, in builtin types.

    | key | meaning |
    |---|---|
    | `version`, `unit`, `confidence` | of noisescale; of batch sizes; coverage of the bounds |
    | `resolved` | whether the critical batch size has a value, not only a lower bound |
    | `critical_batch_size` | B_crit = E_min/S_min, with errors of theory and measurement |
    | `critical_batch_size_by_noise_scale` | B_crit by the noise scale, with its own error only |
    | `best_batch_size` | for as many examples as the run has; from its training loss |
    | `levels` | the noise scale between and within groups of rows, and the balance of both; \
      groups, rows of each, the share of groups without a gradient; the best rows of a group at \
      the costs given; None if not measured |
    | `noise_scale_now` | the noise scale as it was shown last |
    | `decision` | verdict; the batch size to train with, None if it is not known; the likely \
      range of the critical batch size; headline, reason and next steps; the critical batch size \
      with its bounds, and whether it is of the run's end |
    | `decisions` | the same by the number of the optimizer, or why there is none |
    | `learning_rate` | at the batch size that the decision names: batch size, factor on the old \
      rate, rule, whether it was swept, the factor it was off by, reason, command; or None |
    | `recommended` | the row of the decision's batch size on the run's devices |
    | `on_more_devices` | one of `rows`: the most devices that pay off by the values alone, see \
      its `basis`; None if none do |
    | `twice_the_devices` | batch size, devices; steps, time and compute as ratios to the run's; \
      the basis of its seconds |
    | `rows` | batch size, devices, device batch, accumulation; steps, examples, hours ... |
    | `tradeoff` | S_min, E_min, gamma |
    | `calibration` | kappa of B_crit = kappa·B_simple, its source, and whether it is theory |
    | `second_run` | batch sizes and steps of both runs, their result and scatter; may be None |
    | `run` | steps, examples, batch size, devices, hours; the number of measured steps, and the \
      share of the time that measuring took |
    | `step_time` | whether hours are known; most examples on a device; devices in a node |
    | `same_batch` | the run's batch on each number of devices, if asked for: device batch, \
      accumulation, seconds of a step, hours of the run |
    | `ramp` | if asked for, the launcher, its lines and notes; batch sizes and the examples at \
      which they begin; the examples of the run; steps and examples over those of one batch size |
    | `model_card` | a line of Markdown |
    | `warnings`, `assumptions` | whole sentences |

    A quantity with bounds is `{"value", "low", "high"}`. Unknown values are None: the value if only
    bounds are known, the upper bound if there is none, and a batch size that changed along the run.
    """
    twice = p.row_on(2 * p.own_devices)
    steps, time = p.position.steps(twice.batch_size), p.hours_ratio(twice)
    known = p.hardware.step_time is not None
    record: dict[str, Any] = finite(
        {
            "version": __version__,
            **fields_of(p, "unit", "confidence", "resolved", "critical_batch_size"),
            **fields_of(p, "critical_batch_size_by_noise_scale"),
            **fields_of(p, "best_batch_size", "noise_scale_now"),
            "levels": _levels(p),
            "decision": fields_of(p.decision, *DECISION)
            | {"at_end": p.position.at_end, "critical": p.position.critical},
            "decisions": {
                str(n): d if isinstance(d, str) else fields_of(d, *DECISION)
                for n, d in p.decisions.items()
            },
            "learning_rate": p.learning_rate and p.learning_rate.to_dict(),
            "recommended": fields_of(p.recommended, *ROW),
            "on_more_devices": fields_of(p.on_more_devices, *ROW) if p.on_more_devices else None,
            "twice_the_devices": {
                **fields_of(twice, "batch_size", "devices"),
                **{"steps": steps, "time": time, "compute": time * 2.0, "basis": twice.basis},
            },
            "rows": [fields_of(row, *ROW) for row in p.rows],
            "tradeoff": fields_of(p.law.middle, "min_steps", "min_examples")
            | fields_of(p.law, "gamma"),
            "calibration": fields_of(p.calibration, "kappa", "source")
            | {"theory": p.calibration.is_theory},
            "second_run": fields_of(p.second_run, *SECOND_RUN) if p.second_run else None,
            "run": _run(p),
            "step_time": {"known": known} | fields_of(p.hardware, *HARDWARE),
            "same_batch": as_records(p.same_batch),
            "ramp": _ramp(p),
            **fields_of(p, "model_card", "warnings", "assumptions"),
        }
    )
    return record


def _levels(p: Prediction) -> dict[str, Any] | None:
    if (levels := p.levels) is None:
        return None
    counts = fields_of(levels, "groups", "rows_per_group", "still")
    return {**levels.bounds, **counts, "best_rows_per_group": p.best_rows_per_group}


def _ramp(p: Prediction) -> dict[str, Any] | None:
    if (ramp := p.ramp) is None:
        return None
    _, lines, notes = ramp.to_copy()
    return {
        **fields_of(ramp, "launcher", "batch_size", "examples", "steps_ratio", "examples_ratio"),
        **{"lines": lines, "notes": notes},
        "stages": [stage._asdict() for stage in ramp.stages],
    }


def _run(p: Prediction) -> dict[str, Any]:
    seconds = p.history["seconds_per_step"]
    timed_steps = np.isfinite(seconds)
    hours = math.nan
    if timed_steps.any():  # Segments that were not timed take as long as the others.
        mean = (p.run.steps * seconds)[timed_steps].sum() / p.run.steps[timed_steps].sum()
        hours = mean * p.run.steps.sum() / 3600
    measured_steps, share = p.measuring or (math.nan, math.nan)
    optimizer = p.history.optimizer
    beside = {}
    if optimizer is not None and optimizer.beside is not None:
        beside = {
            "optimizer_beside": optimizer.beside.name.lower(),
            "optimizer_share": optimizer.share,
        }
    return {
        "optimizer": None if optimizer is None else optimizer.kind.name.lower(),
        **beside,
        "parameters": p.history.parameters,
        "steps": float(p.run.steps.sum()),
        "examples": p.run.examples,
        "batch_size": p.own_batch_size,
        "devices": p.own_devices,
        "hours": float(hours),
        "measured_steps": measured_steps,
        "measuring_share": share,
    }
