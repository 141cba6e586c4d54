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

_KEPT_THEIR_NAMES = {
    ("", "batches"): "batch_counter batch_size shared_examples",
    ("", "collectors"): "own_pass",
    ("", "estimation"): "estimator level moments recent",
    ("", "history"): "event_files increments",
    ("", "meter"): "estimates",
    ("", "tradeoff"): "sweep_files",
    ("collectors.examples", "collectors.per_example"): "coverage hooks layers norms probe",
    ("lightning", "lightning.monitor"): "noise_scale_monitor reporting tensorboard_layout",
    ("lightning", "lightning.scheduler"): "accumulation batch_size_scheduler device_batches"
    " memory_trial schedulable schedules",
    ("prediction", "history"): "blocks rows run_law",
    ("scheduling", ""): "checks plan",
    ("scheduling", "large_batch.autowu"): "auto_warm_up epoch_losses loss_minimum"
    " warm_up_then_cosine",
}
"""From the room of before and that of now to the modules that went from one to the other."""

_NOW = {
    f"{before}.{name}".strip("."): f"{now}.{name}".strip(".")
    for (before, now), names in _KEPT_THEIR_NAMES.items()
    for name in names.split()
} | {
    "band": "bounded",
    "collectors.comm_hooks": "collectors.ddp",
    "collectors.examples": "collectors.per_example",
    "collectors.examples.verdicts": "collectors.per_example.exclusions",
    "collectors.fsdp_unit": "collectors.fsdp.units",
    "collectors.halves.retained": "collectors.halves.upset",
    "collectors.rows.reduced_rows": "collectors.rows.step_rows",
    "collectors.rows.window": "collectors.rows.window_layout",
    "csv_files": "csv_lines",
    "fieller": "estimation.ratio_interval",
    "hugging_face.host": "hugging_face.trainer_access",
    "lightning.batches": "lightning.resized_loaders",
    "lightning.host": "lightning.trainer_access",
    "lightning.measurements": "lightning.monitor.meters",
    "lightning.starting": "lightning.scheduler.scheduled_fit",
    "logged_tags": "history.metric_names",
    "measurement": "meter.logged_meter",
    "prediction.predicting": "predictor",
    "prediction.remarks": "prediction.warnings_and_assumptions",
    "prediction.stretches": "history.segments",
    "runs": "history.reading",
    "scheduling.move": "scheduling.decision",
    "scheduling.run_so_far": "scheduling.critical_batch_size_so_far",
    "scheduling.warm_up": "large_batch.legw",
    "step_timer": "meter.step_timer",
    "sweep": "tradeoff.fit",
}
"""Names of modules, without that of the package, before and now."""


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
        module = importlib.import_module(now)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which has been executed, its own spec back."""
        former = module.__spec__
        module.__spec__ = former and former.loader_state


def former_names(module: str, now: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, from former names to those of now ("noisescale.predict")."""

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
    """Have modules of before be found, first of all: below a room they would be found anew."""
    if not any(type(finder).__name__ == _Moved.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
