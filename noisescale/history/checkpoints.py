# SPDX-License-Identifier: Apache-2.0
"""The history of a run in its checkpoints: the callbacks save it, to go on from there."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from noisescale.history.history import History
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.printable import printable
from noisescale.refusal import Refusal

_OF_TRANSFORMERS = "trainer_state.json"


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint of Lightning or of transformers' Trainer."""
    return path.suffix == ".ckpt" or (path / _OF_TRANSFORMERS).is_file()


def history_in_checkpoint(path: Path, monitor: str, optimizer: int) -> History:
    """Return what a monitor ("" is one without a name) had measured of an optimizer.

    Weights are not read. If the monitor has not saved the kind of the optimizer, it is
    found from the optimizer's settings.

    Raises:
        Refusal: If the file is empty or damaged, or has no history of this monitor and optimizer.
        OSError: If the file cannot be read.
    """
    found, kind_of = (_of_lightning if path.suffix == ".ckpt" else _of_transformers)(path)
    if not found:
        raise Refusal(
            path,
            "be a checkpoint of a run with NoiseScaleMonitor or NoiseScaleCallback",
            "one without the state of a monitor",
            "Name the folder of the run, or a checkpoint of a run with the callback.",
            word="unmeasured",
        )
    if monitor not in found:
        names = ", ".join(repr(name) if name else "one without a name" for name in sorted(found))
        raise Refusal(
            "monitor",
            f"be the name of a monitor in {path}",
            repr(monitor or None),
            f"Its monitors: {names}.",
            word="absent",
        )
    states = found[monitor]
    if optimizer >= len(states):
        raise Refusal(
            "optimizer",
            f"be the number of an optimizer that was measured in {path}",
            optimizer,
            "Leave it out for the first optimizer.",
            word="absent",
        )
    try:
        state = states[optimizer]
        unit = state["meter"]["estimates"]["whole"]["unit"]
        groups = [name for name in state["history"]["columns"] if name.startswith("group/")]
        known = OptimizerMix.from_log(state["history"].get("optimizer", {})) or kind_of(optimizer)
        history = History(extra_columns=groups, unit=unit, optimizer=known)
        history.load_state_dict(state["history"])
    except (KeyError, TypeError, ValueError):
        raise _damage(path, "one in which a part is missing") from None
    if not len(history):
        raise Refusal(
            path,
            "have a row of the history",
            "none",
            "Take a later checkpoint: the monitor had not logged yet.",
            word="empty",
        )
    history.source = path
    return history


_States = dict[str, list[Any]]
"""The states of each monitor's optimizers, by the monitor's name."""

_KindOf = Callable[[int], OptimizerMix | None]
"""A function from the number of an optimizer to its kind, if that is known."""


def _of_lightning(path: Path) -> tuple[_States, _KindOf]:
    import torch

    file = path / "meta.pt" if path.is_dir() else path  # a folder with sharded weights
    if not file.stat().st_size:
        raise _damage(path, "an empty file")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise Refusal(
            path,
            "have builtins and tensors only",
            f"one that torch does not load with `weights_only=True`: {_first_line(error)}",
            "Name the folder of the run instead.",
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise _damage(path, f"one that torch cannot read: {_first_line(error)}") from None
    if not isinstance(saved, Mapping):
        raise _damage(path, f"an object of type {type(saved).__name__}")
    found = {
        _monitor_name(key): state["optimizers"]
        for key, state in saved.get("callbacks", {}).items()
        if isinstance(state, Mapping) and _are_states(state.get("optimizers"))
    }
    groups = [state["param_groups"] for state in saved.get("optimizer_states", [])]
    return found, lambda k: _kind_of(groups[k]) if k < len(groups) else None


def _kind_of(groups: Sequence[Mapping[str, Any]]) -> OptimizerMix | None:
    """Return the kind of an optimizer whose settings are those of torch's Adam, SGD or Muon.

    Checkpoints of earlier versions do not name it otherwise. The settings of Lion are also those of
    others.

    Examples:
        >>> _kind_of([{"lr": 0.1, "betas": (0.9, 0.95), "amsgrad": False}]).kind.name
        'ADAM'
        >>> _kind_of([{"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False}]).kind.name
        'MOMENTUM'
        >>> _kind_of([{"lr": 0.1}])
    """
    if all({"betas", "amsgrad"} <= group.keys() for group in groups):
        return OptimizerMix(OptimizerKind.ADAM)
    if all({"nesterov", "ns_steps"} <= group.keys() for group in groups):
        return OptimizerMix(OptimizerKind.SPECTRAL)
    if all({"dampening", "nesterov"} <= group.keys() for group in groups):
        moves = any(group["momentum"] for group in groups)
        return OptimizerMix(OptimizerKind.MOMENTUM if moves else OptimizerKind.SGD)
    return None


def _of_transformers(path: Path) -> tuple[_States, _KindOf]:
    file = path / _OF_TRANSFORMERS
    try:
        callbacks = json.loads(file.read_text(encoding="utf-8"))["stateful_callbacks"]
        states = [each["attributes"]["_loaded"] for each in _callbacks_of(callbacks)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damage(file, "something else") from None
    return ({"": states[:1]} if _are_states(states[:1]) else {}), lambda _: None


def _callbacks_of(callbacks: Mapping[str, Any]) -> list[Any]:
    """Return the states of NoiseScaleCallbacks. Several callbacks of one class leave a list."""
    found = callbacks.get("NoiseScaleCallback", [])
    return found if isinstance(found, list) else [found]


def _are_states(states: object) -> bool:
    return isinstance(states, list) and any("history" in state for state in states)


def _monitor_name(key: str) -> str:
    """Return the name of a monitor from the key of its state.

    Examples:
        >>> _monitor_name("NoiseScaleMonitor"), _monitor_name("NoiseScaleMonitor{'name': 'wide'}")
        ('', 'wide')
    """
    brace = key.find("{")
    return "" if brace < 0 else str(ast.literal_eval(key[brace:]).get("name") or "")


def _damage(path: Path, got: str) -> Refusal:
    return Refusal(
        path,
        "be a whole checkpoint",
        got,
        "Take another checkpoint of the run, or name the folder of the run.",
        word="damaged",
    )


def _first_line(error: Exception) -> str:
    return printable(str(error).strip().partition("\n")[0][:100])
