# SPDX-License-Identifier: Apache-2.0
"""The document of a run in its checkpoints: the callbacks save it, to go on from there."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisescale.history.document import Document, Line
from noisescale.printable import printable
from noisescale.refusal import Refusal

OF_TRANSFORMERS = "trainer_state.json"


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint of Lightning or of transformers' Trainer."""
    return path.suffix == ".ckpt" or (path / OF_TRANSFORMERS).is_file()


def weights_in(folder: Path) -> list[Path]:
    """Return the files with all weights of the model in a checkpoint of transformers' Trainer."""
    found = [*folder.glob("model[.-]*safetensors")] or [*folder.glob("pytorch_model[.-]*bin")]
    return found if (folder / OF_TRANSFORMERS).is_file() else []


def document_in_checkpoint(path: Path) -> Document:
    """Return the document that a monitor has saved in a checkpoint. Weights are not read.

    Raises:
        Refusal: If the file is empty or damaged, or has no document.
        OSError: If the file cannot be read.
    """
    lines = (_of_lightning if path.suffix == ".ckpt" else _of_transformers)(path)
    if not lines:
        raise Refusal(
            path,
            "be a checkpoint of a run with NoiseScaleMonitor or NoiseScaleCallback",
            "one without the state of a monitor",
            "Name the folder of the run, or a checkpoint of a run with the callback.",
            word="unmeasured",
        )
    try:
        return Document(lines)
    except Refusal:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damage(path, "one in which a part is missing") from None


def _of_lightning(path: Path) -> list[Line]:
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
    states = [state for state in saved.get("callbacks", {}).values() if isinstance(state, Mapping)]
    return [line for state in states for one in _optimizers(state) for line in _document(one)]


def _of_transformers(path: Path) -> list[Line]:
    file = path / OF_TRANSFORMERS
    try:
        callbacks = json.loads(file.read_text(encoding="utf-8"))["stateful_callbacks"]
        states = [each["attributes"]["_loaded"] for each in _callbacks_of(callbacks)]
        return _document(states[0]) if states else []
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damage(file, "something else") from None


def _optimizers(state: Mapping[str, Any]) -> list[Any]:
    """Return the states of the optimizers, if it is the state of a monitor."""
    found = state.get("optimizers")
    return found if isinstance(found, list) else []


def _document(state: object) -> list[Line]:
    found = state.get("document", []) if isinstance(state, Mapping) else []
    return found if isinstance(found, list) else []


def _callbacks_of(callbacks: Mapping[str, Any]) -> list[Any]:
    """Return the states of NoiseScaleCallbacks. Several callbacks of one class leave a list."""
    found = callbacks.get("NoiseScaleCallback", [])
    return found if isinstance(found, list) else [found]


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
