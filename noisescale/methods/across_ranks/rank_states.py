# SPDX-License-Identifier: Apache-2.0
"""What only one rank has, in a file beside the checkpoint: Lightning saves rank 0's alone.

The file of rank 3 of 8 beside `last.ckpt` is `last.ckpt.ranks/3-of-8.pt`. It is written and removed
with the checkpoint, through the same plugin.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from torch import Tensor

from noisescale.collectors.squared_norms import wide_dtype
from noisescale.guard import Guard
from noisescale.lightning.trainer_access import was_interrupted
from noisescale.methods.across_ranks.wrapped_optimizer import WrappedOptimizer

if TYPE_CHECKING:
    import pytorch_lightning as pl

State = dict[str, Any]


class RankStates:
    """Writes a file for each rank while a fit goes on.

    Args:
        trainer: Its strategy is set up.
        state_of: Returns what this rank alone has.
        guard: Warns of a file that cannot be written. The checkpoint is whole without it.
        before_saving: Called on all ranks with each checkpoint before it is written.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        state_of: Callable[[], State],
        guard: Guard,
        before_saving: Callable[[pl.Trainer, State], None],
    ) -> None:
        strategy: Any = trainer.strategy
        self._trainer, self._strategy, self._state_of, self._guard = (
            trainer,
            strategy,
            state_of,
            guard,
        )
        self._before_saving = before_saving
        self._save, self._remove = strategy.save_checkpoint, strategy.remove_checkpoint
        strategy.save_checkpoint, strategy.remove_checkpoint = (
            self._save_states,
            self._remove_states,
        )

    def close(self) -> None:
        """Leave checkpoints alone from now on."""
        del self._strategy.save_checkpoint, self._strategy.remove_checkpoint

    def _save_states(self, checkpoint: State, filepath: Any, storage_options: Any = None) -> None:
        self._before_saving(self._trainer, checkpoint)
        self._save(checkpoint, filepath, storage_options=storage_options)
        if "optimizer_states" not in checkpoint:
            return
        if not was_interrupted(self._trainer):  # then this rank may be alone
            # Metrics in its name may differ between ranks. It is rank 0's file that is there.
            filepath = self._strategy.broadcast(str(filepath))
        if self._trainer.is_global_zero:
            return
        with self._guard("This rank's state is not in the checkpoint"):
            state = {"global_step": checkpoint["global_step"], **self._state_of()}
            trainer = self._trainer
            path = _file(filepath, trainer.global_rank, trainer.world_size)
            self._strategy.checkpoint_io.save_checkpoint(state, path)

    def _remove_states(self, filepath: Any) -> None:
        self._remove(filepath)
        with self._guard("The states of ranks were not removed with their checkpoint"):
            if self._trainer.is_global_zero and _exists(folder := _folder(filepath)):
                self._strategy.checkpoint_io.remove_checkpoint(folder)


def own_state(trainer: pl.Trainer, guard: Guard) -> State | None:
    """Return what this rank saved beside the checkpoint that the fit goes on from.

    None on rank 0, whose state is in the checkpoint, and if it is not there.
    """
    if trainer.global_rank == 0 or trainer.ckpt_path is None:
        return None
    with guard("This rank's state was not read"):
        path = _file(_real(trainer.ckpt_path), trainer.global_rank, trainer.world_size)
        return _of_this_step(trainer, path)
    return None


def own_buffers(module: pl.LightningModule | None) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint has of rank 0 alone, none without a module."""
    if module is None:
        return {}
    names = {name for name, _ in module.named_buffers()}
    return {name: value for name, value in module.state_dict().items() if name in names}


def load_own_buffers(module: pl.LightningModule, buffers: dict[str, Tensor]) -> None:
    """Write what `own_buffers` returned on this rank into its buffers."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            with torch.no_grad():
                buffer.copy_(buffers[name])


def states_of_former_ranks(trainer: pl.Trainer, ranks: int, guard: Guard) -> list[State]:
    """Return this rank's part of what `ranks` ranks saved, but for rank 0's in the checkpoint.

    Of former ranks each rank reads every W-th, so that together they read all that are there. A
    file of another step than the checkpoint's is left out.
    """
    found: list[State] = []
    for rank in range(trainer.global_rank, ranks, trainer.world_size):
        with guard(f"The state of the former rank {rank} was not read"):
            path = _file(_real(trainer.ckpt_path), rank, ranks)
            if rank and (state := _of_this_step(trainer, path)) is not None:
                found.append(state)
    return found


def _of_this_step(trainer: pl.Trainer, path: str) -> State | None:
    if not _exists(path):
        return None
    state: State = trainer.strategy.checkpoint_io.load_checkpoint(path)
    return state if state.get("global_step") == trainer.global_step else None


def _real(path: Any) -> str:
    """Return the local file that a link like `last.ckpt` points to, or another path as it is."""
    return str(path) if "://" in str(path) else os.path.realpath(path)


def _folder(filepath: Any) -> str:
    return f"{filepath}.ranks"


def _file(filepath: Any, rank: int, ranks: int) -> str:
    return f"{_folder(filepath)}/{rank}-of-{ranks}.pt"


def _exists(path: str) -> bool:
    filesystem, inside = url_to_fs(path)
    return bool(filesystem.exists(inside))


def mean_of_states_(
    optimizer: WrappedOptimizer, states: list[dict[str, Any]], *, counts_own: bool
) -> None:
    """Replace the moments of the optimizer by their mean over the states of all ranks.

    Local steps since the last reduction are forgotten. A moment that only some ranks have (of
    an expert that only they used) is the mean of theirs if rank 0 has it, and is left out
    otherwise. All ranks must call this function.

    Args:
        optimizer: With the state of the checkpoint, the same on all ranks.
        states: More states, read on this rank alone.
        counts_own: Whether the optimizer's present state is one of them: on one rank.
    """
    base = copy.deepcopy(optimizer.state_between_rounds())
    optimizer.load_state_dict(base)
    # On the parameter's device, where its group has a backend: Adam counts steps on the CPU.
    sums = {
        key: torch.zeros_like(value, dtype=wide_dtype(p.device), device=p.device)
        for key, p, value in _moments(optimizer)
    }
    counts = {key: total.new_zeros(1) for key, total in sums.items()}
    for state in [*([base] if counts_own else []), *states]:
        optimizer.load_state_dict(copy.deepcopy(state))
        for key, _, value in _moments(optimizer):
            if key in sums:
                sums[key] += value.to(sums[key].device)
                counts[key] += 1
    optimizer.load_state_dict(base)
    if dist.is_initialized():
        for key in sums:
            dist.all_reduce(sums[key])
            dist.all_reduce(counts[key])
    with torch.no_grad():
        for key, _, value in _moments(optimizer):
            value.copy_((sums[key] / counts[key]).view_as(value))


def _moments(optimizer: WrappedOptimizer) -> Iterator[tuple[tuple[int, str], Tensor, Tensor]]:
    """Yield the state's floating-point tensors: a key common to all ranks, parameter, value."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for index, p in enumerate(parameters):
        for name, value in sorted(optimizer.state.get(p, {}).items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield (index, name), p, value
