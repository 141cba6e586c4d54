# SPDX-License-Identifier: Apache-2.0
"""Modules under the names they had in 0.1: imported from where they are now, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]

_NOW = {
    "averages": "estimation.averages",
    "band": "bounded",
    "batch_counter": "batches.batch_counter",
    "batch_size": "batches.batch_size",
    "collectors.examples.coverage": "collectors.per_example.coverage",
    "collectors.examples.hooks": "collectors.per_example.hooks",
    "collectors.examples.layers": "collectors.per_example.layers",
    "collectors.examples.norms": "collectors.per_example.norms",
    "collectors.examples.probe": "collectors.per_example.probe",
    "collectors.examples.verdicts": "collectors.per_example.exclusions",
    "collectors.fsdp_unit": "collectors.fsdp.units",
    "collectors.rows.window": "collectors.rows.window_layout",
    "csv_files": "csv_lines",
    "estimates": "meter.estimates",
    "estimator": "estimation.estimator",
    "event_files": "history.event_files",
    "fieller": "estimation.ratio_interval",
    "hugging_face.host": "hugging_face.trainer_access",
    "increments": "history.increments",
    "level": "estimation.level",
    "lightning.accumulation": "lightning.scheduler.accumulation",
    "lightning.batch_size_scheduler": "lightning.scheduler.batch_size_scheduler",
    "lightning.batches": "lightning.resized_loaders",
    "lightning.device_batches": "lightning.scheduler.device_batches",
    "lightning.host": "lightning.trainer_access",
    "lightning.measurements": "lightning.monitor.meters",
    "lightning.memory_trial": "lightning.scheduler.memory_trial",
    "lightning.noise_scale_monitor": "lightning.monitor.noise_scale_monitor",
    "lightning.reporting": "lightning.monitor.reporting",
    "lightning.schedulable": "lightning.scheduler.schedulable",
    "lightning.schedules": "lightning.scheduler.schedules",
    "lightning.starting": "lightning.scheduler.starting",
    "lightning.tensorboard_layout": "lightning.monitor.tensorboard_layout",
    "logged_tags": "history.metric_names",
    "measurement": "meter.logged_meter",
    "moments": "estimation.moments",
    "own_pass": "collectors.own_pass",
    "prediction.blocks": "history.blocks",
    "prediction.predicting": "predictor",
    "prediction.remarks": "prediction.warnings_and_assumptions",
    "prediction.rows": "history.rows",
    "prediction.run_law": "history.run_law",
    "prediction.stretches": "history.segments",
    "recent": "estimation.recent",
    "runs": "history.reading",
    "scheduling.auto_warm_up": "large_batch.autowu.auto_warm_up",
    "scheduling.checks": "checks",
    "scheduling.epoch_losses": "large_batch.autowu.epoch_losses",
    "scheduling.loss_minimum": "large_batch.autowu.loss_minimum",
    "scheduling.plan": "plan",
    "scheduling.run_so_far": "scheduling.critical_batch_size_so_far",
    "scheduling.warm_up": "large_batch.legw",
    "scheduling.warm_up_then_cosine": "large_batch.autowu.warm_up_then_cosine",
    "shared_examples": "batches.shared_examples",
    "step_timer": "meter.step_timer",
    "sweep": "tradeoff.fit",
    "sweep_files": "tradeoff.sweep_files",
}


class _Moved(MetaPathFinder, Loader):
    """Finds a module of before, and loads the one of now in its place."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or name not in _NOW:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        now = f"{_PACKAGE}.{_NOW[spec.name.partition('.')[2]]}"
        warnings.warn(
            f"`{spec.name}` is now `{now}`. Import it from there, or its public names from"
            f" `{_PACKAGE}`.",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.import_module(now)

    def exec_module(self, module: ModuleType) -> None:
        """It has been loaded."""


def former_names(module: str, now: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names have moved or changed.

    Args:
        module: Its `__name__`.
        now: From a former name to the module and the name of now, as in "noisescale.predict".
    """

    def find(name: str) -> Any:
        if name not in now:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, renamed = now[name].rpartition(".")
        warnings.warn(
            f"`{module}.{name}` is now `{now[name]}`. Import it from there.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(home), renamed)

    return find


def install() -> None:
    """Have modules of before be found, after all that there are."""
    if not any(type(finder).__name__ == _Moved.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
