# SPDX-License-Identifier: Apache-2.0
"""The losses of an epoch, left on their device until it ends, then averaged over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectives import device_for
from noisescale.refusal import Refusal


class EpochLosses:
    """Collect one loss a step without waiting for it; read them all when the epoch ends.

    Args:
        group: The ranks to average over where a process group is initialised, by default all.

    Examples:
        >>> losses = EpochLosses()
        >>> for step in ([1.0, 3.0], [5.0]):  # two micro-batches, then one
        ...     for loss in step:
        ...         losses.observe(torch.tensor(loss))
        ...     losses.end_step()
        >>> losses.end_epoch()
        tensor([2., 5.])
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._observed = False
        self.clear()

    def clear(self) -> None:
        """Forget the epoch under way."""
        self._micro_batches: list[Tensor] = []
        self._steps: list[Tensor] = []

    def observe(self, loss: Tensor | float) -> None:
        """Record the loss of a micro-batch."""
        value = torch.as_tensor(loss).detach()
        if value.numel() != 1:
            raise Refusal(
                "loss",
                "be a single number",
                f"shape {tuple(value.shape)}",
                "Reduce it as for the backward pass, by `loss.mean()` for instance.",
            )
        # A copy: a captured CUDA graph, for one, writes the next loss to the same place.
        self._micro_batches.append(value.reshape(()).to(torch.float32, copy=True))

    def end_step(self) -> None:
        """Average the losses observed since the last step; NaN if there were none."""
        seen = self._micro_batches
        if seen:
            self._steps.append(_on_one_device(seen).mean() if len(seen) > 1 else seen[0])
        else:
            self._steps.append(torch.tensor(torch.nan))
        self._observed |= bool(seen)
        self._micro_batches = []

    def end_epoch(self) -> Tensor:
        """Return the losses of the steps, on the CPU, averaged over ranks; begin a new epoch.

        This is the one place where ranks and the host wait. An optimizer step that counts as
        several steps has one loss for them, and NaN for the others. An epoch may have only NaN.

        Raises:
            RuntimeError: If there has never been a loss.
        """
        if not self._observed:
            raise RuntimeError(
                "`observe` must be called with the loss of each step, got no loss in"
                f" {len(self._steps)} steps. Call `scheduler.observe(loss)` where the loss is"
                " computed, in Lightning in `training_step`."
            )
        losses = _on_one_device(self._steps)
        if dist.is_available() and dist.is_initialized():
            losses = losses.to(device_for(self._group, losses.device))
            dist.all_reduce(losses, group=self._group)
            losses /= dist.get_world_size(self._group)
        self.clear()
        return losses.cpu()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's losses of the current epoch. Nothing is exchanged between ranks."""
        return {
            "micro_batches": _on_one_device(self._micro_batches).tolist(),
            "steps": _on_one_device(self._steps).tolist(),
            "observed": self._observed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._micro_batches = [torch.tensor(loss) for loss in state["micro_batches"]]
        self._steps = [torch.tensor(loss) for loss in state["steps"]]
        self._observed = state["observed"]


def _on_one_device(losses: list[Tensor]) -> Tensor:
    """Stack losses on one device: steps without a loss or from a checkpoint are on the CPU."""
    device = next((loss.device for loss in losses if loss.device.type != "cpu"), "cpu")
    return torch.stack([loss.to(device) for loss in losses]) if losses else torch.empty(0)
