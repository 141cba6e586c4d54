# SPDX-License-Identifier: Apache-2.0
"""AdasumReduction: train by Adasum, with a callback."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from noisescale.checks import refuse, require_count
from noisescale.lightning import trainer_access
from noisescale.lightning.trainer_access import SettingRefusal
from noisescale.methods.across_ranks.own_steps import OwnSteps
from noisescale.methods.adasum.optimizer import AdasumOptimizer

if TYPE_CHECKING:
    import pytorch_lightning as pl

PREFIX = "adasum"


class AdasumReduction(OwnSteps[AdasumOptimizer]):
    """Combine the steps of ranks by Adasum, where DDP would average their gradients.

    Past the critical batch size the mean of more gradients is hardly better than the mean of fewer.
    Adasum adds up what gradients do not share. Each rank steps by its own gradient with its own
    moments, and the changes are combined, see `AdasumOptimizer`. DDP's all-reduce is turned off.

    The learning rate is not scaled with the number of ranks. The best one of a single process times
    2 to 2.5 is a start (Maleki et al.). With `ranks_per_node` above 1, times that number as well.
    Less weight decay may be needed.

    At log steps every logger gets, over all parameters, `adasum/coefficient` (1 where two vectors
    were added, 1/2 where they were averaged), `adasum/cosine` of the angle between them, and
    `adasum/orthogonality`, |Adasum|² over Σ|change of a rank|²: 1 if changes of all ranks are
    orthogonal, 1/W if they are parallel. `adasum/orthogonality/<layer>` has it layer by layer.

    A NoiseScaleMonitor beside it measures as ever. As nobody averages gradients any more, its
    measured steps do.

    Moments differ from rank to rank. So each rank writes its own beside the checkpoint, into
    `last.ckpt.ranks/` for `last.ckpt`, and resuming is exact. If they are not there, or the number
    of ranks is another one, a warning says so and all ranks go on from the mean of what is there.

    Args:
        local_steps: Steps of each rank before ranks are combined. Above 1 the noise scale cannot be
            measured, as ranks then have different weights.
        ranks_per_node: The number of ranks whose mean is taken before, such as the ranks of a node.
        log_layers: Whether to log the orthogonality of each layer.

    Raises:
        ValueError: If a number is not positive and whole.
        MisconfigurationException: When a fit starts, if several processes train otherwise than by
            DDP, or their number is no multiple of `ranks_per_node`.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="ddp", callbacks=[AdasumReduction()])  # doctest: +SKIP

    References:
        Maleki et al. 2020, arXiv:2006.02924.
    """

    def __init__(
        self, local_steps: int = 1, ranks_per_node: int = 1, *, log_layers: bool = True
    ) -> None:
        self.local_steps = require_count("local_steps", local_steps, "Pass 1 to combine each step.")
        self.ranks_per_node = require_count("ranks_per_node", ranks_per_node, "Pass 1 for none.")
        self.log_layers = log_layers
        self.same_weights_in_each_step = local_steps == 1
        super().__init__()
        self._groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not trainer_access.steps_now(trainer):
            return
        if trainer.world_size > 1 and trainer_access.should_log(trainer):
            with self._guard("The statistics of Adasum were not logged"):
                self._log(trainer, pl_module)

    def _prepare(self, trainer: pl.Trainer) -> None:
        self._groups = self._groups_of(trainer)

    def _wrap(self, optimizer: Optimizer) -> AdasumOptimizer:
        group, mean_group = self._groups
        return AdasumOptimizer(optimizer, group, self.local_steps, mean_group=mean_group)

    def _advice(self) -> str:
        return (
            "AdasumReduction combines ranks in place of DDP's mean. The learning rate is not scaled"
            " with the number of ranks: start with 2 to 2.5 times the best one of a single"
            f" {'node' if self.ranks_per_node > 1 else 'process'}."
        )

    def _groups_of(
        self, trainer: pl.Trainer
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Return the ranks that are combined, and the ranks whose mean is taken before."""
        size, ranks = self.ranks_per_node, trainer.world_size
        if size == 1 or ranks == 1:
            return None, None
        if ranks % size:
            refuse(
                "ranks_per_node",
                f"divide the number of ranks, {ranks}",
                size,
                "Pass the ranks of a node.",
                error=SettingRefusal,
            )
        nodes = [list(range(first, first + size)) for first in range(0, ranks, size)]
        within, _ = dist.new_subgroups_by_enumeration(nodes)
        across, _ = dist.new_subgroups_by_enumeration([list(x) for x in zip(*nodes, strict=True)])
        return across, within

    def _weights_of(self, optimizer: AdasumOptimizer) -> list[Tensor]:
        # Between two reductions each rank has weights of its own.
        return [p.detach() for p in optimizer.trained_parameters] if optimizer.steps_done else []

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics: dict[str, float] = {}
        for index, optimizer in enumerate(self._optimizers):
            if optimizer.statistics is None or optimizer.steps_done:
                continue  # nothing new
            prefix = f"{PREFIX}/{index}" if len(self._optimizers) > 1 else PREFIX
            layers = _layers_of(pl_module, optimizer) if self.log_layers else []
            metrics |= _metrics(prefix, optimizer, layers)
        self._publish(trainer, metrics, "the statistics of Adasum")


def _layers_of(module: torch.nn.Module, optimizer: AdasumOptimizer) -> list[str]:
    """Return the layer of each trained parameter: its name without the last part."""
    names = {id(p): name.rpartition(".")[0] or name for name, p in module.named_parameters()}
    return [names.get(id(p), "other") for p in optimizer.trained_parameters]


def _metrics(prefix: str, optimizer: AdasumOptimizer, layers: list[str]) -> dict[str, float]:
    """Return means over all parameters, and over the parameters of each layer."""
    assert optimizer.statistics is not None
    coefficient, cosine, orthogonality = torch.stack(optimizer.statistics).tolist()
    found = {
        f"{prefix}/coefficient": _mean(coefficient),
        f"{prefix}/cosine": _mean(cosine),
        f"{prefix}/orthogonality": _mean(orthogonality),
    }
    of_layer: dict[str, list[float]] = {}
    for layer, value in zip(layers, orthogonality, strict=False):
        of_layer.setdefault(layer, []).append(value)
    return found | {
        f"{prefix}/orthogonality/{layer}": _mean(values) for layer, values in of_layer.items()
    }


def _mean(values: list[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
