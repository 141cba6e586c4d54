# SPDX-License-Identifier: Apache-2.0
"""What a training imports: told by a cold one, and imported before warm ones are forked."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import random
import signal
import sys
import sysconfig
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import torch

from noisescale.lab.jobs.jobs import Record
from noisescale.lab.jobs.trial_process import IMPORTS

LONGEST = 300
"""Seconds after which imports are taken to hang, and their process ends."""


def write_imports(folder: Path, training: Record, set_by_script: Mapping[str, str | None]) -> None:
    """Write which modules this training has imported, and from where.

    Packages are imported before the fork of a training, and the user's own modules never: a
    training draws what they draw after its seed was set.

    Args:
        folder: Of the training.
        training: Its settings, which name the user's module.
        set_by_script: Environment variables that the user's module has set; None: has removed.
    """
    places = [Path((training[each] or "").rpartition(":")[0]) for each in ("target", "data")]
    own = {each.stem if each.suffix == ".py" else each.name.partition(".")[0] for each in places}
    own |= {"__main__", "__mp_main__", "noisescale.lab.jobs.trial"}
    origins = {name: origin for name in list(sys.modules) if (origin := _origin_of(name))}
    packages = [
        name
        for name, origin in origins.items()
        if not {name, name.partition(".")[0]} & own and _is_installed(name, origin)
    ]
    found = {
        "packages": packages,
        "own": {name: origin for name, origin in origins.items() if name not in packages},
        "origins": {name: origins[name] for name in packages},
        "environment": dict(set_by_script),
        "defaults": torch_defaults(),
    }
    (folder / IMPORTS).write_text(json.dumps(found))


def _origin_of(name: str) -> str | None:
    """Return the file of a loaded module; None if it has none, as one that is built in."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if not isinstance(spec, ModuleSpec) or spec.name != name or not spec.has_location:
        return None
    return spec.origin


def _is_installed(name: str, origin: str) -> bool:
    ours = name.partition(".")[0] == "noisescale"
    standard = origin.startswith(sysconfig.get_path("stdlib") + os.sep)
    return ours or standard or bool({"site-packages", "dist-packages"} & {*Path(origin).parts})


def torch_defaults() -> list[str]:
    """Return what a package may read of torch at its import."""
    return [str(torch.get_default_dtype()), str(torch.get_default_device())]


def changes_of(before: Mapping[str, str]) -> dict[str, str | None]:
    """Return the environment variables that differ from before; None stands for a removed one.

    Lightning's seeds are left out. They are read when a training begins.
    """
    names = {*before, *os.environ} - {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}
    return {
        name: os.environ.get(name)
        for name in sorted(names)
        if before.get(name) != os.environ.get(name)
    }


def import_reported(report: Path) -> str:
    """Import what a cold training has reported.

    Returns:
        Why a training that is forked from here may differ from a cold one; "" if none may.
    """
    signal.alarm(LONGEST)
    try:
        return _import_reported(json.loads(report.read_text())) or why_not_to_fork()
    finally:
        signal.alarm(0)
        gc.collect()
        gc.freeze()  # else each training copies the pages of these objects


def _import_reported(found: Record) -> str:
    importlib.import_module("noisescale.lightning.training")  # before the seed of every training
    drawn = _random_states()
    for name in found["packages"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a package raises where it is not wanted
            return f"the import of {name} fails: {type(error).__name__}: {error}"
    if _random_states() != drawn:
        return "a package draws random numbers when it is imported"
    for name, origin in found["origins"].items():
        if _origin_of(name) not in (None, origin):
            return f"{name} is {_origin_of(name)} for a package and {origin} for the script"
    if own := [name for name in found["own"] if name in sys.modules and name != "__main__"]:
        return f"a package imports a module of the name of your own {own[0]}"
    if torch_defaults() != found["defaults"]:
        return "the script changes torch's default dtype or device, which a package may have read"
    environment = found["environment"].items()
    if changed := [name for name, value in environment if os.environ.get(name) != value]:
        return f"the script changes {', '.join(changed)}. Set it before the command"
    return ""


def why_not_to_fork() -> str:
    """Return why a fork of this process may hang or fail; "" if nothing speaks against it."""
    child = os.fork()  # for it OpenBLAS ends its idle threads, and nobody else does
    if not child:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(child, 0)
    if status:
        return "a package uses a GPU when it is imported"
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"a package starts {threads - 1} threads when it is imported"


def _random_states() -> bytes:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
    return pickle.dumps(states)
