# SPDX-License-Identifier: Apache-2.0
"""DecentLaMReduction: train by decentralized momentum SGD, with a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from noisescale.checks import refuse
from noisescale.lightning import trainer_access
from noisescale.methods.across_ranks.own_steps import OwnSteps
from noisescale.methods.decentlam.optimizer import DecentLaM

if TYPE_CHECKING:
    import pytorch_lightning as pl

METRIC = "decentlam/consensus_distance"


class DecentLaMReduction(OwnSteps[DecentLaM]):
    """Average each rank's weights with its neighbours' weights, where DDP would average gradients.

    Each rank steps by its own gradient, with the momentum of `DecentLaM`. DDP's all-reduce is
    turned off: a rank waits for its neighbours alone. If the model has buffers (as of BatchNorm),
    DDP goes on to send rank 0's to all. The module has to return `torch.optim.SGD`.

    The learning rate is the one that SGD needs with the global batch under DDP, with its warm-up:
    with equal shares of all ranks both are the same.

    Ranks have weights of their own. Their mean is swapped in for validation. Checkpoints hold it as
    the module's weights, and the module has it when the fit ends. Each is one all-reduce of the
    weights. Buffers are not averaged: validations and checkpoints use rank 0's.

    At log steps every logger gets `decentlam/consensus_distance`: the mean over ranks of the
    squared distance of their weights to the mean, over the squared norm of the mean. That is one
    more all-reduce of the weights at each log step.

    Resuming is exact. The checkpoint has the weights and moments of rank 0 as well, and each other
    rank writes its own into `last.ckpt.ranks/` for `last.ckpt`. If they are not there, or the
    number of ranks is another one, a warning says so and all ranks go on from the mean.

    A NoiseScaleMonitor beside it is refused: gradients at different weights say nothing about the
    noise of one.

    Args:
        topology: See `DecentLaM`.
        log_distance: Whether to log the consensus distance.

    Raises:
        ValueError: When a fit starts, if the topology is not possible, or if several optimizers
            share a parameter.
        TypeError: When a fit starts, if an optimizer is no `torch.optim.SGD`.
        MisconfigurationException: When a fit starts, if several processes train otherwise than by
            DDP.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> callback = DecentLaMReduction(topology="ring")
        >>> trainer = Trainer(strategy="ddp", callbacks=[callback])  # doctest: +SKIP

    References:
        Yuan et al. 2021, arXiv:2104.11981.
    """

    same_weights_in_each_step = False
    measurable_if = "Measure in a run under DDP alone"
    what_ranks_have = "The weights and the optimizer's moments"

    def __init__(self, topology: Any = "exponential", *, log_distance: bool = True) -> None:
        super().__init__()
        self.topology, self.log_distance = topology, log_distance

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        several = trainer.world_size > 1 and trainer_access.steps_now(trainer)
        if several and self.log_distance and trainer_access.should_log(trainer):
            self._log(trainer, [each.consensus_distance() for each in self._optimizers])

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if trainer.world_size > 1 and trainer_access.is_fitting(trainer):
            for each in self._optimizers:
                each.swap_in_mean()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_back()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            for each in self._optimizers:
                each.average_()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._swap_back()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"weights": self._own_weights()} if state["ranks"] > 1 else state

    def _prepare(self, trainer: pl.Trainer) -> None:
        """Refuse a parameter of several optimizers: each would average it, and swap the mean in."""
        seen: set[Tensor] = set()
        for optimizer in trainer.optimizers if trainer.world_size > 1 else ():
            own = [p for group in optimizer.param_groups for p in group["params"]]
            if shared := seen.intersection(own):
                needed = "give each parameter to one optimizer"
                got = f"one of shape {tuple(shared.pop().shape)} in several"
                remedy = "Put shared parameters into one of them, or leave DecentLaMReduction out."
                refuse("configure_optimizers", needed, got, remedy)
            seen |= set(own)

    def _wrap(self, optimizer: Optimizer) -> DecentLaM:
        return DecentLaM(optimizer, self.topology)

    def _advice(self) -> str:
        return (
            "DecentLaMReduction averages the weights of neighbours in place of DDP's mean of"
            " gradients. Use the learning rate and the warm-up of SGD with the global batch."
        )

    def _weights_of(self, optimizer: DecentLaM) -> list[Tensor]:
        return optimizer.own_weights

    def _before_saving(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Have the checkpoint hold the mean as the module's weights."""
        if trainer_access.was_interrupted(trainer):
            return  # by one rank alone, maybe
        means: dict[int, Tensor] = {}
        for each in self._optimizers:
            if not each.is_swapped:
                found = each.mean_weights()
                means |= {
                    p.data_ptr(): mean
                    for p, mean in zip(found.parameters, found.mean, strict=True)
                    if p.numel()
                }
        weights = checkpoint["state_dict"]
        for name, value in weights.items():
            if isinstance(value, Tensor) and value.data_ptr() in means:
                weights[name] = means[value.data_ptr()]

    def _swap_back(self) -> None:
        for each in self._optimizers:
            each.swap_back()

    def _log(self, trainer: pl.Trainer, distances: list[float]) -> None:
        several = len(distances) > 1
        names = [f"{METRIC}/{index}" if several else METRIC for index in range(len(distances))]
        with self._guard("The consensus distance was not logged"):
            self._publish(
                trainer, dict(zip(names, distances, strict=True)), "the consensus distance"
            )
