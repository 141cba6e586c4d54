# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale of a training run, and what it says about the batch size.

Names are imported when they are first used, so that `import noisescale` stays light: the
arithmetic needs numpy and scipy alone, the meter torch, the monitor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noisescale.estimator import NoiseScale as NoiseScale
    from noisescale.estimator import NoiseScaleEstimator as NoiseScaleEstimator
    from noisescale.history import History as History
    from noisescale.lightning.batch_size_scheduler import BatchSizeScheduler as BatchSizeScheduler
    from noisescale.lightning.noise_scale_monitor import NoiseScaleMonitor as NoiseScaleMonitor
    from noisescale.meter import NoiseScaleMeter as NoiseScaleMeter
    from noisescale.moments import GradientMoments as GradientMoments
    from noisescale.moments import gradient_moments as gradient_moments
    from noisescale.own_pass import measuring as measuring
    from noisescale.prediction import Calibration as Calibration
    from noisescale.prediction import Prediction as Prediction
    from noisescale.prediction import predict as predict
    from noisescale.scheduling.auto_warm_up import AutoWarmUp as AutoWarmUp
    from noisescale.scheduling.controller import BatchSizeController as BatchSizeController
    from noisescale.scheduling.plan import Plan as Plan
    from noisescale.scheduling.warm_up import LegwWarmUp as LegwWarmUp
    from noisescale.sweep import TradeoffFit as TradeoffFit
    from noisescale.sweep import fit_tradeoff as fit_tradeoff
    from noisescale.tradeoff import Tradeoff as Tradeoff

__version__ = "0.1.0"

_HOME = {
    "AutoWarmUp": "scheduling.auto_warm_up",
    "BatchSizeController": "scheduling.controller",
    "BatchSizeScheduler": "lightning.batch_size_scheduler",
    "Calibration": "prediction",
    "GradientMoments": "moments",
    "History": "history",
    "LegwWarmUp": "scheduling.warm_up",
    "NoiseScale": "estimator",
    "NoiseScaleEstimator": "estimator",
    "NoiseScaleMeter": "meter",
    "NoiseScaleMonitor": "lightning.noise_scale_monitor",
    "Plan": "scheduling.plan",
    "Prediction": "prediction",
    "Tradeoff": "tradeoff",
    "TradeoffFit": "sweep",
    "fit_tradeoff": "sweep",
    "gradient_moments": "moments",
    "measuring": "own_pass",
    "predict": "prediction",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
