# SPDX-License-Identifier: Apache-2.0
"""One line about the batch size of a run, for a model card."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from noisescale._version import __version__
from noisescale.prediction.run_hardware import devices_of, usual_batch_sizes
from noisescale.prediction.statements import critical_batch_size
from noisescale.report.numbers import count, plural

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

LABEL = "For a model card"

_COMPARED = {
    "Ddp": "devices",
    "DdpOfParts": "replicas of a model in parts",
    "DeepSpeed": "micro-batches under DeepSpeed",
    "Fsdp1": "devices under FSDP",
    "Fsdp2": "devices under FSDP2",
    "Halves": "halves of batches",
    "MicroBatch": "micro-batches",
    "TensorParallel": "micro-batches under tensor parallelism",
    "Unaveraged": "devices",
}
"""What each way of measuring compares; the name of another way is not for readers."""


def model_card(p: Prediction) -> str:
    """Return one line of Markdown: batch size, critical batch size, of which steps, by what."""
    said = [
        f"**Batch size**: {_batch_size(p)} on {_devices(p)}.",
        f"**Critical batch size**{_optimizer(p)}: {_critical(p)}.",
        f"**Measured by**: noisescale {__version__}{_what_was_compared(p)}.",
    ]
    return " ".join(" ".join(said).split())


def _what_was_compared(p: Prediction) -> str:
    accumulated = (p.history["accumulation"] > 1).mean() > 0.5  # an epoch's end may have one
    way = "MicroBatch" if p.history.way == "Halves" and accumulated else p.history.way
    compared = _COMPARED.get(way)
    return "" if compared is None else f", which compared {compared}"


def _batch_size(p: Prediction) -> str:
    if p.own_batch_size is not None:
        return f"{count(p.own_batch_size)} {p.unit}"
    sizes = usual_batch_sizes(p.history)
    ends = f"{count(float(np.nanmin(sizes)))} to {count(float(np.nanmax(sizes)))}"
    return f"{ends} {p.unit}, last {count(round(p.position.batch_size))},"


def _devices(p: Prediction) -> str:
    devices = devices_of(p.history)
    return "devices not known" if devices is None else plural(devices, "device")


def _optimizer(p: Prediction) -> str:
    return f" of optimizer {p.number}, which allows least" if p.by_optimizer else ""


def _critical(p: Prediction) -> str:
    """Return the critical batch size as the answer says it; "not known" without any bound."""
    band = p.critical_batch_size
    if not (math.isfinite(band.value) or band.low > 0 or math.isfinite(band.high)):
        return f"not known from {_steps(p)}"
    _, decides, at_end = critical_batch_size(p).sentence.partition("at its end, which decides, ")
    if decides:
        return f"{at_end}, at the end of {_steps(p)}"
    said = critical_batch_size(p).sentence.removesuffix(", of the whole run")
    if p.second_run is not None:
        return f"{said}, by two runs to {p.second_run.result}"
    if p.calibration.branched is not None:
        return f"{said}, by branches of the run and the noise scale of {_steps(p)}"
    if not p.calibration.is_theory:
        said += f", with kappa = {p.calibration.kappa.value:.3g} ({p.calibration.source})"
    return f"{said}, by the noise scale of {_steps(p)}"


def _steps(p: Prediction) -> str:
    """Return the part of the training that the critical batch size is of."""
    steps, planned = float(p.run.steps.sum()), p.history.planned_steps
    if math.isfinite(planned) and planned > steps:
        return f"the first {count(round(steps))} of {count(planned)} steps"
    return f"{'the first' if p.under_way else 'all'} {plural(round(steps), 'step')}"
