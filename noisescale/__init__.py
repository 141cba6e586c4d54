# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale of a training run, and what it says about the batch size.

Names are imported when they are first used, so that `import noisescale` stays light: the
arithmetic needs numpy and scipy alone, the meter torch, the monitor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noisescale.collectors.own_pass import measuring as measuring
    from noisescale.estimation.estimator import NoiseScaleEstimator as NoiseScaleEstimator
    from noisescale.estimation.moments import GradientMoments as GradientMoments
    from noisescale.estimation.moments import gradient_moments as gradient_moments
    from noisescale.estimation.noise_scale import NoiseScale as NoiseScale
    from noisescale.frozen.measure import Measurement as Measurement
    from noisescale.frozen.measure import measure as measure
    from noisescale.history.history import History as History
    from noisescale.history.reading import read_run as read_run
    from noisescale.lab.branch.branch import branch as branch
    from noisescale.lab.compare.compare import compare as compare
    from noisescale.lab.compare.profiles import algoperf_score as algoperf_score
    from noisescale.lab.compare.profiles import performance_profile as performance_profile
    from noisescale.lab.compare.steps_to_result import steps_to_result as steps_to_result
    from noisescale.lab.sweep.answer import Sweep as Sweep
    from noisescale.lab.sweep.sweep import sweep as sweep
    from noisescale.lab.tune.answer import Tune as Tune
    from noisescale.lab.tune.carbs.sampler import CarbsSampler as CarbsSampler
    from noisescale.lab.tune.tune import tune as tune
    from noisescale.lightning.monitor.noise_scale_monitor import (
        NoiseScaleMonitor as NoiseScaleMonitor,
    )
    from noisescale.lightning.scheduler.batch_size_scheduler import (
        BatchSizeScheduler as BatchSizeScheduler,
    )
    from noisescale.meter.noise_scale_meter import NoiseScaleMeter as NoiseScaleMeter
    from noisescale.methods.adasum.all_reduce import (
        adasum_all_reduce_ as adasum_all_reduce_,
    )
    from noisescale.methods.adasum.optimizer import AdasumOptimizer as AdasumOptimizer
    from noisescale.methods.adasum.reduction import (
        AdasumReduction as AdasumReduction,
    )
    from noisescale.methods.adasum.rule import adasum as adasum
    from noisescale.methods.autowu.auto_warm_up import AutoWarmUp as AutoWarmUp
    from noisescale.methods.conadv import ConcurrentAdversary as ConcurrentAdversary
    from noisescale.methods.decentlam.optimizer import DecentLaM as DecentLaM
    from noisescale.methods.decentlam.reduction import (
        DecentLaMReduction as DecentLaMReduction,
    )
    from noisescale.methods.decentlam.topology import metropolis_weights as metropolis_weights
    from noisescale.methods.legw import LegwWarmUp as LegwWarmUp
    from noisescale.methods.repeated_augmentation import (
        RepeatedAugmentationSampler as RepeatedAugmentationSampler,
    )
    from noisescale.plan import Plan as Plan
    from noisescale.prediction import Calibration as Calibration
    from noisescale.prediction.predict import Prediction as Prediction
    from noisescale.prediction.predict import predict as predict
    from noisescale.profiling.profile import profile as profile
    from noisescale.rules.horizon import Horizon as Horizon
    from noisescale.rules.horizon import horizon as horizon
    from noisescale.rules.rescale import Rescale as Rescale
    from noisescale.rules.rescale import rescale as rescale
    from noisescale.scheduling.controller import BatchSizeController as BatchSizeController
    from noisescale.tradeoff.fit import TradeoffFit as TradeoffFit
    from noisescale.tradeoff.fit import fit_tradeoff as fit_tradeoff
    from noisescale.tradeoff.fit_sweep import fit as fit
    from noisescale.tradeoff.tradeoff import Tradeoff as Tradeoff

from noisescale._version import __version__ as __version__

_HOME = {
    "AdasumOptimizer": "methods.adasum.optimizer",
    "AdasumReduction": "methods.adasum.reduction",
    "AutoWarmUp": "methods.autowu.auto_warm_up",
    "BatchSizeController": "scheduling.controller",
    "BatchSizeScheduler": "lightning.scheduler.batch_size_scheduler",
    "Calibration": "prediction",
    "CarbsSampler": "lab.tune.carbs.sampler",
    "DecentLaM": "methods.decentlam.optimizer",
    "DecentLaMReduction": "methods.decentlam.reduction",
    "ConcurrentAdversary": "methods.conadv",
    "GradientMoments": "estimation.moments",
    "History": "history.history",
    "Horizon": "rules.horizon",
    "LegwWarmUp": "methods.legw",
    "Measurement": "frozen.measure",
    "NoiseScale": "estimation.noise_scale",
    "NoiseScaleEstimator": "estimation.estimator",
    "NoiseScaleMeter": "meter.noise_scale_meter",
    "NoiseScaleMonitor": "lightning.monitor.noise_scale_monitor",
    "Plan": "plan",
    "Prediction": "prediction.predict",
    "RepeatedAugmentationSampler": "methods.repeated_augmentation",
    "Rescale": "rules.rescale",
    "Sweep": "lab.sweep.answer",
    "Tradeoff": "tradeoff.tradeoff",
    "TradeoffFit": "tradeoff.fit",
    "Tune": "lab.tune.answer",
    "adasum": "methods.adasum.rule",
    "adasum_all_reduce_": "methods.adasum.all_reduce",
    "algoperf_score": "lab.compare.profiles",
    "compare": "lab.compare.compare",
    "branch": "lab.branch.branch",
    "fit": "tradeoff.fit_sweep",
    "fit_tradeoff": "tradeoff.fit",
    "gradient_moments": "estimation.moments",
    "horizon": "rules.horizon",
    "measure": "frozen.measure",
    "measuring": "collectors.own_pass",
    "metropolis_weights": "methods.decentlam.topology",
    "performance_profile": "lab.compare.profiles",
    "predict": "prediction.predict",
    "profile": "profiling.profile",
    "read_run": "history.reading",
    "rescale": "rules.rescale",
    "steps_to_result": "lab.compare.steps_to_result",
    "sweep": "lab.sweep.sweep",
    "tune": "lab.tune.tune",
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
