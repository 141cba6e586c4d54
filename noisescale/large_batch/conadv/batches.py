# SPDX-License-Identifier: Apache-2.0
"""Batches with adversarial inputs that are made one batch ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from noisescale.checks import refuse

if TYPE_CHECKING:
    from noisescale.large_batch.conadv.adversary import ConcurrentAdversary


class AdversarialBatches:
    """Each batch with its adversarial inputs: (batch, inputs), made by `ConcurrentAdversary.over`.

    Take each optimizer step before the next batch is asked for: then the inputs of a batch are made
    at the weights of `staleness` steps ago. Those of the first batch take the weights that are
    there. One batch is read ahead, and moved to the model's device.

    Its length, sampler and batch sampler are those of the loader. So a Trainer of Lightning can go
    through it, and sets the sampler's epoch. Under several ranks Lightning gives a
    DistributedSampler to a DataLoader alone: pass the loader one yourself.

    Raises:
        ValueError: Where an epoch begins under several ranks, if a DataLoader has the same examples
            for all of them.
    """

    def __init__(
        self,
        adversary: ConcurrentAdversary,
        batches: Iterable[Any],
        loss_of: Callable[[Any, Any], Tensor],
        inputs_of: Callable[[Any], Tensor],
    ) -> None:
        self._adversary, self._batches = adversary, batches
        self._loss_of, self._inputs_of = loss_of, inputs_of
        self.sampler = getattr(batches, "sampler", None)
        self.batch_sampler = getattr(batches, "batch_sampler", None)

    def __len__(self) -> int:
        """Return the number of batches, if the loader has one."""
        return len(self._batches)  # type: ignore[arg-type]  # a TypeError if it has none

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield each batch with its adversarial inputs."""
        self._check_ranks()
        adversary, left = self._adversary, iter(self._batches)
        adversary.drop()  # what an iteration that was left early prepared
        for first in left:
            batch = on_device(first, adversary.device)
            inputs = adversary.perturb(*self._task(batch))
            break
        else:
            return
        for each in left:
            following = on_device(each, adversary.device)
            if adversary.staleness:
                adversary.prepare(*self._task(following))
            yield batch, inputs
            batch = following
            inputs = (
                adversary.take() if adversary.staleness else adversary.perturb(*self._task(batch))
            )
        yield batch, inputs

    def _task(self, batch: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        return self._inputs_of(batch), lambda output: self._loss_of(output, batch)

    def _check_ranks(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        same_on_all = isinstance(self.sampler, (RandomSampler, SequentialSampler))
        if several and same_on_all and isinstance(self._batches, DataLoader):
            refuse(
                "batches",
                "have examples of their own on each rank",
                f"a DataLoader with a {type(self.sampler).__name__}",
                "Pass `sampler=DistributedSampler(dataset)` to the DataLoader.",
            )


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all tensors on a device; lists, tuples and mappings are searched."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: on_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(on_device(value, device) for value in batch)
    return batch


def interleaved(clean: Tensor, adversarial: Tensor) -> Tensor:
    """Return both copies of each example as rows one after the other, for one forward pass.

    DDP wants one forward pass for each backward pass where the model has buffers. If the noise
    scale is measured by halves of a batch, the model has to return `output.unflatten(0, (-1, 2))`:
    halves are made of what the first dimension counts.

    Args:
        clean: Shape (batch, ...), inputs or labels.
        adversarial: The same shape; pass labels twice.

    Returns:
        Shape (2·batch, ...).

    Examples:
        >>> interleaved(torch.tensor([1, 2]), torch.tensor([10, 20])).tolist()
        [1, 10, 2, 20]
    """
    return torch.stack([clean, adversarial], 1).flatten(0, 1)
