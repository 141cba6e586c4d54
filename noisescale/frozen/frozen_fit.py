# SPDX-License-Identifier: Apache-2.0
"""A fit in which no weight changes: the gradients of a module's batches, as training makes them.

A Trainer runs it, so that hooks, devices, precision, `self.log` and DDP are those of a training.
The optimizer's step computes the loss and steps no weight. What batches change in the module
(running statistics, queues, a teacher's weights) is put back before the next one.
"""

from __future__ import annotations

import math
import pickle
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from noisescale.batches.shared_examples import row_checksums
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.groups import Groups
from noisescale.collectors.tensor_parallel import is_whole
from noisescale.estimation.independent_batches import BatchProducts
from noisescale.frozen.gradient_mean import GradientMean, on_host
from noisescale.frozen.judged_monitor import JudgedMonitor
from noisescale.frozen.kept_state import KeptState
from noisescale.frozen.order import draws_at_random, goes_in_order
from noisescale.lightning.checkpoints import Checkpoint, load_weights
from noisescale.lightning.monitor.meters import trained_parameters
from noisescale.lightning.trainer_access import (
    BatchCounter,
    Callback,
    isolate_rng,
    skip_batches,
    tensors_of,
)
from noisescale.lightning.training import copy_to_train, plain_trainer, quiet
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    import pytorch_lightning as pl

_ENDLESS = 10**6
"""More steps than are ever taken."""

_JUMPS = 3
"""How often a stream is read on, to batches far from those that were measured."""

_JUMP = 4
"""Batches that are read, as a multiple of those measured; each time this many times more."""

_LANDED = 6
"""Batches that are measured there."""

_LEAST_SECONDS = 5.0
"""Seconds that reading on once may take, or as many as measuring has taken."""

_FEW = 20
"""Batches of which one has to bring a gradient."""


@dataclass
class BatchStatistics:
    """What was seen of the batches so far."""

    group_names: tuple[str, ...] = ()
    entries: list[list[BatchProducts]] = field(default_factory=list)
    """The products of each batch after the first, for each group and for the rest."""
    differences: dict[int, float] = field(default_factory=dict)
    """τ by each second batch and the one before it, by the number of the second one."""
    sizes: list[float] = field(default_factory=list)
    """Examples of each batch, over all devices."""
    left_out: int = 0
    """Batches without a gradient, or with one that is not finite."""
    again: bool = False
    """Whether the loader began to repeat its batches."""
    near: int = 0
    """The number of batches before those from far on in the data; 0 if there are none."""
    loader: Any = None
    optimizer: Any = None
    mean: dict[str, Tensor] = field(default_factory=dict)
    variance: dict[str, Tensor] = field(default_factory=dict)

    @property
    def whole(self) -> list[BatchProducts]:
        """The products of the whole gradient."""
        return [
            some[0]._replace(
                along=math.fsum(one.along for one in some),
                deviation=math.fsum(one.deviation for one in some),
            )
            for some in zip(*self.entries, strict=True)
        ]

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self.sizes)

    @property
    def batch_size(self) -> float:
        """Examples in a batch, over all devices. The last one of an epoch may be smaller."""
        return statistics.median(self.sizes)


@dataclass(frozen=True)
class FitRequest:
    """What a fit at fixed weights looks at."""

    groups: Groups | None = None
    batch_size_fn: Callable[[Any], float] | None = None
    weight_fn: Callable[[Any], Any] | None = None
    successive: Callable[[Any], bool] = lambda loader: False
    """Whether each second batch of a loader is compared with the one before it."""
    elementwise: bool = False
    """Whether to keep the mean and the variance of each element."""
    far: Callable[[Any], bool] = lambda loader: False
    """Whether some batches of a loader are to come from far on in its data, once there are enough.

    What a stream holds can be alike for long, and a shuffle buffer only mixes neighbours.
    """
    until: float = math.inf
    """When reading on has to end, by `time.monotonic`."""


def frozen_fit(
    module: pl.LightningModule,
    fitted: AbstractContextManager[dict[str, Any]],
    asked: FitRequest,
    *,
    checkpoint: Checkpoint | None = None,
    judged: Sequence[JudgedMonitor] = (),
    enough: Callable[[BatchStatistics], bool],
    trainer_options: dict[str, Any],
) -> BatchStatistics:
    """Take gradients of batches at fixed weights until there are enough.

    Args:
        module: The module; the fit is of a copy.
        fitted: Gives the arguments of `Trainer.fit` that are data.
        asked: See `FitRequest`.
        checkpoint: Weights to be measured. Default: those of the module.
        judged: Monitors whose answers are noted.
        enough: Called after each batch.
        trainer_options: Arguments of the Trainer.

    Raises:
        ValueError: If the module, the data or the settings do not allow it.
    """
    if not module.automatic_optimization:
        raise Refusal(
            "target",
            "have automatic optimization",
            f"{type(module).__name__} without",
            "Its training step decides when weights change. Measure a module whose training step"
            " returns the loss, or give the network and a `loss`.",
        )
    looking = _Looking(asked, judged, enough, checkpoint)
    ours = {
        "max_epochs": _ENDLESS,
        "max_steps": looking.step + _ENDLESS,
        "callbacks": [*judged, looking],
    }
    with quiet(), isolate_rng(), fitted as data:
        trainer = plain_trainer(module, {**ours, **trainer_options})
        if "MultiProcessing" in type(trainer.strategy.launcher).__name__:
            raise Refusal(
                "strategy",
                'train in this process, as "ddp" does in a script',
                f"{trainer_options.get('strategy')!r}, which starts others",
                "Use one device, or start the command by torchrun.",
            )
        trainer.fit(copy_to_train(module), **data)
    return looking.seen


class _Looking(Callback):
    """Takes in the gradient of each batch.

    A callback's hooks run before those of the module, and the module's state may be made in its own
    hooks up to the first batch. So the state is kept when that batch starts.
    """

    def __init__(
        self,
        asked: FitRequest,
        judged: Sequence[JudgedMonitor],
        enough: Callable[[BatchStatistics], bool],
        checkpoint: Checkpoint | None,
    ) -> None:
        self._asked, self._judged, self._enough = asked, judged, enough
        self._checkpoint = checkpoint
        self.step = 0 if checkpoint is None else checkpoint.step
        self.seen = BatchStatistics()
        self._state: KeptState | None = None
        self._keys: set[int] = set()
        self._weight: float | None = None
        """The weight of the batch under way; None if it is left out."""
        self._examples = 0.0
        self._has_loss = False
        self._tried = self._tried_before_epoch = self._looked = 0
        self._jumps = self._landed = 0
        self._in_pass = self._to_skip = 0
        """Batches of this pass through the data that were read, and are to be skipped in the next.
        """
        self._began = time.monotonic()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._checkpoint is not None:  # after `setup`, which may make layers
            load_weights(pl_module, self._checkpoint)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tried_before_epoch, self._in_pass = self._tried, 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._state is None:
            self._state = self._begin(trainer, pl_module)
        self._state.put_back()
        _set_step(trainer, self.step)
        self._has_loss = False
        self._in_pass += 1
        if self._to_skip:
            self._weight = None
            return
        examples = float(self._count(batch))
        weight = examples if self._asked.weight_fn is None else float(self._asked.weight_fn(batch))
        here = [examples, weight, float(self._is_again(batch))]
        device = trainer.strategy.root_device
        sums = trainer.strategy.reduce(torch.tensor(here, device=device), reduce_op="sum")
        self._examples, self._weight, again = map(float, sums)
        if again:
            self._weight, self.seen.again = None, True
            trainer.should_stop = True

    def on_before_backward(self, *_: Any) -> None:
        self._has_loss = True

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        if self._weight is None:
            return
        weight, self._weight = self._weight, None
        seen = self.seen
        if not (self._has_loss and _are_finite(self._trained.values())):
            seen.left_out += 1
            return
        for entry, products in zip(
            seen.entries, self._mean.add(weight, self._examples), strict=False
        ):
            entry.append(products)
        seen.sizes.append(self._examples)
        if (trace := self._mean.difference(weight)) is not None:
            seen.differences[seen.batches] = trace

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._tried += 1
        self._check(outputs)
        if self._to_skip:
            skipped, self._to_skip = self._to_skip - 1, 0
            self._in_pass += skip_batches(trainer, skipped, self._asked.until)
            return
        if self.seen.batches > self._looked:
            self._looked = self.seen.batches
            for monitor in self._judged:
                monitor.look(self.seen.batches)
        if self._tried >= _FEW and not self.seen.batches:
            raise Refusal(
                "target",
                "bring finite gradients",
                f"none in {self._tried} batches",
                "Measure another checkpoint, or in float32. A `loss` has to use the network that it"
                " is given.",
            )
        if self.seen.batches < max(self._landed, 1):
            return
        if 0 < self._jumps < _JUMPS:
            self._read_on(trainer)
        elif self._enough(self.seen):
            is_late = time.monotonic() >= self._asked.until
            if self._jumps or is_late or not self._asked.far(self.seen.loader):
                trainer.should_stop = True
            else:
                self._read_on(trainer)

    def _read_on(self, trainer: pl.Trainer) -> None:
        """Go on with batches that come later in the data."""
        self._jumps += 1
        self.seen.near = self.seen.near or self.seen.batches
        self._landed = self.seen.batches + _LANDED
        self._mean.forget_last()
        now = time.monotonic()
        until = min(now + max(now - self._began, _LEAST_SECONDS), self._asked.until)
        further = _JUMP**self._jumps * self._landed
        read = skip_batches(trainer, further, until)
        self._in_pass += read
        if read < further and time.monotonic() < until:  # the data end here: go to other parts
            self._to_skip = max(self._in_pass * self._jumps // (_JUMPS + 1), 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._tried == self._tried_before_epoch and self.seen.batches:
            self.seen.again = trainer.should_stop = True
        elif self._tried == self._tried_before_epoch:
            raise Refusal(
                "data",
                "bring batches each time that they are gone through",
                "none",
                "Give a DataLoader, and not what can be gone through only once.",
            )
        if goes_in_order(self.seen.loader):  # also where examples are augmented at random
            self.seen.again = trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._state is not None:
            self._state.put_back()
        if self._asked.elementwise:
            seen, names = self.seen, list(self._trained)
            seen.mean = dict(zip(names, self._mean.mean, strict=True))
            scale = sum(seen.sizes) / self._mean.weight / max(seen.batches - 1, 1)
            variances = [x * scale for x in self._mean.deviations]
            seen.variance = dict(zip(names, variances, strict=True))

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> KeptState:
        """Begin with the first batch."""
        norms = GradientNorms(_trained_parameters(trainer, module), self._asked.groups)
        loader = trainer.train_dataloader
        self._mean = GradientMean(
            norms.parameters,
            norms.entry_of,
            norms.partition,
            successive=self._asked.successive(loader),
            elementwise=self._asked.elementwise,
        )
        self._trained = dict(zip(norms.names, norms.parameters, strict=True))
        seen = self.seen
        seen.group_names, seen.entries = norms.group_names, [[] for _ in range(norms.partition)]
        seen.loader, seen.optimizer = loader, trainer.optimizers[0]
        for optimizer in trainer.optimizers:
            _hold(optimizer)
        for config in trainer.strategy.lr_scheduler_configs:
            config.scheduler.step = lambda *_, **__: None  # type: ignore[method-assign]  # this one
        self._count = self._asked.batch_size_fn or BatchCounter(trainer, "measure")
        return KeptState(module, self._trained)

    def _is_again(self, batch: Any) -> bool:
        """Return whether there was a batch of the same examples before, and not by chance."""
        if draws_at_random(self.seen.loader):
            return False
        key = _key_of(batch)
        again = key is not None and key in self._keys
        if key is not None:
            self._keys.add(key)
        return again

    def _check(self, outputs: Any) -> None:
        """Raise if the loss is not finite, or if a weight was changed."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and not bool(torch.isfinite(loss).all()):
            raise Refusal(
                "target",
                "have a finite loss",
                f"{float(loss):g} in batch {self._tried}",
                "Measure another checkpoint.",
            )
        assert self._state is not None
        self._state.check_trained()


def _key_of(batch: Any) -> int | None:
    """Return a number for the examples of a batch, in any order; None if there is none."""
    rows = row_checksums(tensors_of(batch))
    if rows is not None:
        return hash(tuple(rows.sort().values.tolist()))
    try:
        return hash(pickle.dumps(batch))
    except Exception:  # of an odd kind of batch
        return None


def _trained_parameters(
    trainer: pl.Trainer, module: pl.LightningModule
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the optimizer, with their names."""
    ids = {id(p) for p in trained_parameters(trainer) if p.requires_grad}
    found = [(name, p) for name, p in module.named_parameters() if id(p) in ids]
    if not found:
        raise Refusal(
            "target",
            "have parameters that require a gradient",
            "none",
            "Unfreeze those that are trained.",
        )
    if parts := [name for name, p in found if not is_whole(p)] or len(found) != len(ids):
        got = parts[0] if isinstance(parts, list) else type(trainer.strategy).__name__
        raise Refusal(
            "strategy",
            "leave whole parameters on each device",
            f"parts ({got})",
            'Use "auto" or "ddp", which need more memory, or measure in training.',
        )
    return found


def _hold(optimizer: Any) -> None:
    """Have an optimizer compute the loss, and step no weight."""

    def step(closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()

    optimizer.step = step


def _set_step(trainer: pl.Trainer, step: int) -> None:
    """Have schedules of the module's own stand at a step."""
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    progress.optimizer.step.total.completed = step


def _are_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether there are gradients, all of them finite."""
    norms = on_host([p.grad.norm() for p in parameters if p.grad is not None])
    return bool(norms) and all(map(math.isfinite, norms))
