# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, from which branches start and at whose weights is measured."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from noisescale.history.checkpoints import OF_TRANSFORMERS, is_checkpoint, weights_in
from noisescale.refusal import FileRefusal, Refusal

if TYPE_CHECKING:
    import pytorch_lightning as pl

_REMEDY = "Name a file of ModelCheckpoint, or a folder checkpoint-N of transformers' Trainer."


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a checkpoint that are needed here."""

    path: Path
    step: int
    """The number of optimizer steps before the checkpoint."""
    weights: dict[str, Any]
    """The trained weights, not the averages that WeightAveraging may have stored as well."""
    optimizers: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path, *, to_train: bool = False, name: str = "checkpoint") -> Checkpoint:
        """Read what Lightning's ModelCheckpoint wrote, or transformers' Trainer.

        Args:
            path: The file, or the Trainer's folder.
            to_train: Whether training continues from the checkpoint. This needs the optimizer's
                state, in a file of Lightning.
            name: Name of the argument, for errors.

        Raises:
            ValueError: If the file is not a checkpoint, or a needed part is missing.
            OSError: If the file cannot be read.
        """
        folder = path.is_dir() and not to_train
        if not (path.is_file() or folder):
            raise FileRefusal(name, "be a file", f"{path}, which is not a file", _REMEDY)
        try:
            read = (
                _of_trainer(path, name) if folder else torch.load(path, "cpu", weights_only=False)
            )
            found = cls(
                path,
                int(read["global_step"]),
                read.get("current_model_state", read["state_dict"]),
                list(read.get("optimizer_states", ())),
            )
        except OSError:
            raise
        except Exception as error:
            raise Refusal(
                name,
                "be a checkpoint of Lightning or of transformers' Trainer",
                f"{path}, which failed to load with {type(error).__name__}: {error}",
                _REMEDY,
            ) from error
        if to_train and not found.goes_on:
            raise Refusal(
                name,
                "contain the optimizer's state",
                f"{path} without it",
                "Without this state branches would not continue the run. Save a checkpoint"
                " after the first step, with `ModelCheckpoint(save_weights_only=False)`.",
            )
        return found

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of the parameter groups; NaN without an optimizer's state."""
        groups = [group for state in self.optimizers for group in state.get("param_groups", ())]
        return max((float(group["lr"]) for group in groups), default=math.nan)

    @property
    def goes_on(self) -> bool:
        """Whether training can continue: the optimizer's state is there, or plain SGD has none."""
        groups = [group for state in self.optimizers for group in state.get("param_groups", ())]
        keeps = any(group.get("momentum") or "betas" in group for group in groups)
        return bool(groups) and (not keeps or all(state.get("state") for state in self.optimizers))


def _of_trainer(folder: Path, name: str) -> dict[str, Any]:
    """Return the parts of a checkpoint of transformers' Trainer, named as Lightning names them."""
    if not (files := weights_in(folder)):
        lacks = "the weights of a model" if is_checkpoint(folder) else OF_TRANSFORMERS
        raise FileRefusal(
            name,
            f"have {OF_TRANSFORMERS} and model.safetensors, whole or in shards",
            f"{folder} without {lacks}",
            f"{_REMEDY} If it has an adapter, load this in `target`, by `PeftModel.from_pretrained("
            f"model, folder, is_trainable=True)`, and measure without `{name}`.",
        )
    from transformers.modeling_utils import load_state_dict

    return {
        "global_step": json.loads((folder / OF_TRANSFORMERS).read_text("utf-8"))["global_step"],
        "state_dict": {key: x for file in files for key, x in load_state_dict(file).items()},
        "optimizer_states": [torch.load(x, "cpu", mmap=True) for x in folder.glob("optimizer.pt")],
    }


def load_weights(module: pl.LightningModule, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into a module.

    Raises:
        ValueError: If the weights are of another module.
    """
    try:
        module.load_state_dict(checkpoint.weights, strict=module.strict_loading)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise Refusal(
            "checkpoint",
            "be of this module",
            checkpoint.path,
            f"Its weights do not fit: {reason[:300]}. Name a checkpoint of the same module.",
        ) from error


def steps_in(folder: Path) -> dict[Path, int]:
    """Return the checkpoints in a folder, with the number of optimizer steps before each.

    The steps are read from the names of the files, or else from the files. Files that cannot be
    read are left out. Those of transformers' Trainer are folders.
    """
    found = {}
    for path in filter(is_checkpoint, sorted(folder.glob("*"))):
        if named := re.search(r"(?:^|-)step=(\d+)(?:-|\.ckpt$)|^checkpoint-(\d+)$", path.name):
            found[path] = int(named[1] or named[2])
        else:
            with suppress(ValueError, OSError):
                found[path] = Checkpoint.read(path).step
    return found
