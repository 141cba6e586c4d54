# SPDX-License-Identifier: Apache-2.0
"""A larger micro-batch is tried before it is adopted, and the trial leaves no trace."""

import random
import re
import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fits import CLASSES, FEATURES, fit, loader
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from named_batches import InMemory, Names, fitted, names, stays
from ranks import in_a_fork
from tiers import slow
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.lightning.scheduler.memory_trial import _copy, fits
from noisescale.scheduling.policies import Given


class Head(LightningModule):
    """A LightningModule in another, that asks for the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / self.trainer.accumulate_grad_batches


class Stateful(LightningModule):
    """Everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.head = Head()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.calls = 0
        self.outputs: list[Tensor] = []
        self.by_name: dict[str, Any] = {}
        self.head.register_forward_hook(self.count)
        self.sizes: list[int] = []

    def count(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.by_name["output"] = output
        self.calls += 100

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.sizes.append(len(x))
        self.calls += 1
        output = self.head(self.body(x * (1 + random.random() + np.random.rand())))
        self.outputs.append(output.sum())
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy)
        self.log_dict({"epoch_and_step": float(self.current_epoch + self.global_step)})
        loss = nn.functional.cross_entropy(output, y) + 0 * self.optimizers().param_groups[0]["lr"]
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def everything(module: Any, fitting: Any) -> dict[str, Any]:
    return {
        "state": {k: v.numpy().copy() for k, v in module.state_dict().items()},
        "gradients": [p.grad.numpy().copy() for p in module.parameters()],
        "metric": {k: v.numpy().copy() for k, v in module.accuracy.metric_state.items()},
        "calls": module.calls,
        "outputs": [t.item() for t in module.outputs],
        "by_name": module.by_name["output"].detach().float().numpy().copy(),
        "sizes": list(module.sizes),
        "random": (random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()),
        "logged": {k: v.item() for k, v in fitting.callback_metrics.items()},
        "results": str(fitting._results),
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in module.modules()
        ],
        "parameter hooks": [
            (p._backward_hooks, p._post_accumulate_grad_hooks) for p in module.parameters()
        ],
        "training": [m.training for m in module.modules()],
    }


class Tries(BatchSizeScheduler):
    """Does nothing but try a batch of 64 rows in every epoch."""

    def __init__(self) -> None:
        super().__init__(stays)
        self.seen: list[Any] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.batch = arguments[3]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        before = everything(pl_module, trainer)
        why = fits(trainer, self.batch, 8.0)
        self.seen.append((why, before, everything(pl_module, trainer)))
        super().on_train_epoch_end(trainer, pl_module)


def seeded(callback: Any, module: Any, *others: Any, **options: Any) -> Any:
    """The Trainer after two epochs of twelve batches of 8."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    data = loader(8, examples=96)
    return fitted(callback, *others, module=module, data=data, max_epochs=2, **options)


@pytest.mark.filterwarnings("ignore:A step of one micro-batch in one process")
def test_a_trial_leaves_no_trace() -> None:
    """Beside a monitor, which has hooks of its own."""

    def parameters(callback: Any) -> list[Tensor]:
        module = Stateful()
        seeded(callback, module, NoiseScaleMonitor(small_batch="micro_batch"))
        return [*module.parameters(), *module.buffers()]

    tries = Tries()
    with_trials, without = parameters(tries), parameters(BatchSizeScheduler(stays))

    assert len(tries.seen) == 2
    for why, before, after in tries.seen:
        assert why is None
        np.testing.assert_equal(after, before)
    assert all(torch.equal(a, b) for a, b in zip(with_trials, without, strict=True))


def grows(module: Any, data: Any = None, epochs: int = 2) -> tuple[BatchSizeScheduler, list[int]]:
    """From batches of 2 to one of 32, as far as memory goes; and the sizes of those that came."""
    callback = BatchSizeScheduler({0: 32}, max_batch_size=32, max_device_batch_size=16)
    data = names(64, 2) if data is None else data
    fitted(callback, module=module, data=data, max_epochs=epochs)
    return callback, [len(batch) for batch in module.arrived]


class OutOfMemory(Names):
    """On the last rank, above `most` rows."""

    def __init__(self, examples: int, most: int = 4) -> None:
        super().__init__(examples)
        self.most = most

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if len(batch) > self.most and rank == ranks - 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 MiB\nand more")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("monitored", [False, slow(True)])
def test_what_does_not_fit_on_one_rank_is_adopted_on_none(
    monitored: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = BatchSizeScheduler({0: 32}, max_batch_size=32, max_device_batch_size=16)
    (first, second) = fit(
        callback,
        *([NoiseScaleMonitor(small_batch="micro_batch")] if monitored else []),
        model=OutOfMemory(64, most=2),
        train_loader=names(64, 2),
        max_epochs=3,
        results=lambda _, module: (str(callback.plan), [len(batch) for batch in module.arrived]),
    )

    assert first == second == ("32 = 2 x 8 micro-batches x 2 devices", [2] * 48)
    told = [line for line in capfd.readouterr().out.splitlines() if "does not fit" in line]
    numbers = [re.findall(r"step (\d+):.* of (\d+) rows.* most (\d+) rows", line) for line in told]
    assert numbers == [[("2", "16", "9")], [("4", "8", "5")], [("6", "4", "3")]]
    assert all(line.endswith("Reason: another device failed") for line in told)


def test_what_does_not_fit_halves_the_way_until_something_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    callback, sizes = grows(OutOfMemory(64), epochs=5)

    assert sizes == [2] * 32 * 3 + [4] * 16 * 2  # after 16 and 8 have been tried
    assert str(callback.plan) == "32 = 4 x 8 micro-batches x 1 device"
    assert callback.state_dict()["controller"]["lowered_to"] == 5  # more is not to be tried again
    told = [line for line in capsys.readouterr().out.splitlines() if "does not fit" in line]
    assert len(told) == 2
    assert told[0].endswith(" CUDA out of memory. Tried to allocate 20 MiB")  # in one line


def test_the_trial_is_of_the_rows_that_are_wanted_whatever_batch_it_repeats() -> None:
    """After an epoch of one step, which ends with its last batch, that is one of the epoch before.

    What it would be taken for, rows of the epoch before times the growth of now, fits.
    """
    module = OutOfMemory(32, most=20)
    by_examples = Given({0: 8, 32: 32}, by="examples")
    callback = BatchSizeScheduler(by_examples, max_batch_size=32, max_device_batch_size=32)

    fitted(callback, module=module, data=names(32, 2), max_epochs=3)

    assert [len(batch) for batch in module.arrived] == [2] * 16 + [8] * 8


@pytest.mark.parametrize(
    "gives",
    [
        lambda module, batch: module.weight[batch].mean(),
        lambda module, batch: {"loss": module.weight[batch].mean(), "more": 1},
        lambda module, batch: None,
    ],
)
@pytest.mark.filterwarnings("ignore:.training_step. returned `None`")
def test_every_kind_of_training_step_can_be_tried(gives: Callable[[Any, Any], Any]) -> None:
    class Plain(Names):
        def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
            self.arrived.append(batch.tolist())
            return gives(self, batch)

    _, sizes = grows(Plain(64))

    assert sizes == [2] * 32 + [16] * 4


@pytest.mark.slow
@in_a_fork
def test_of_a_compiled_module_the_original_is_left_alone_too() -> None:
    torch._dynamo.reset()

    _, sizes = grows(torch.compile(Names(64), backend="eager", dynamic=True))

    assert sizes == [2] * 32 + [16] * 4


def test_batch_norms_that_wait_for_other_ranks_are_tried_without() -> None:
    class Norms(Names):
        def __init__(self) -> None:
            super().__init__(8)
            self.norm = nn.SyncBatchNorm(3)

    module = Norms()
    copied = _copy(SimpleNamespace(lightning_module=module))

    x = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(copied.norm(x), nn.BatchNorm2d(3)(x))
    assert type(module.norm) is nn.SyncBatchNorm


@pytest.mark.filterwarnings("ignore:The tensors of a batch differ")
def test_a_batch_of_unequal_parts_grows_where_it_has_rows() -> None:
    """Two per-class weights go with every batch, and stay two."""
    weights = torch.tensor([1.0, 2.0])

    class Weighted(Names):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert len(batch["weights"]) == 2
            return super().training_step(batch["rows"], batch_idx) * batch["weights"].sum()

    def collate(rows: list[int]) -> dict[str, Tensor]:
        return {"rows": torch.tensor(rows), "weights": weights}

    data = torch.utils.data.DataLoader(range(64), batch_size=4, collate_fn=collate)

    _, sizes = grows(Weighted(64), data)

    assert sizes == [4] * 16 + [16] * 4


class Raises(torch.autograd.Function):
    """An error in the middle of a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise MemoryError("no more")


class UntoldError(Exception):
    """An error that does not even say what it is."""

    def __str__(self) -> str:
        raise ValueError("nothing to say")


def fails(module: Any, x: Tensor) -> Tensor:
    module.body.eval()
    module.body[0].weight.requires_grad_(False)
    module.body[1].running_mean.fill_(7.0)
    raise RuntimeError("out of memory")


def fails_wordless(module: Any, x: Tensor) -> Tensor:
    raise UntoldError


def fails_in_backward(module: Any, x: Tensor) -> Tensor:
    return Raises.apply(x.requires_grad_())  # type: ignore[no-any-return,no-untyped-call]


def fails_in_the_trainer(module: Any, x: Tensor) -> Tensor:
    module.trainer.should_stop = True
    module.trainer.lightning_module.calls = 99
    module.trainer.lightning_module.log("rows", float(len(x)))
    module.trainer.callback_metrics["rows"] = torch.tensor(1.0)
    module.optimizers().param_groups[0]["lr"] = 99.0
    module.logger.log_metrics({"rows": len(x)})
    module.logger.experiment.whatever(len(x))
    raise RuntimeError("after all of that")


def cannot_be_copied(module: Any, x: Tensor) -> Tensor:
    return x


class Faulty(Stateful):
    def __init__(self, fault: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault
        if fault is cannot_be_copied:
            self.lock = threading.Lock()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 8:
            batch = [self.fault(self, batch[0]), batch[1]]
        return super().training_step(batch, batch_idx)


def trained(callback: Any, fault: Callable[[Any, Tensor], Tensor], precision: Any) -> Any:
    module, logger = Faulty(fault), InMemory()
    mixed = precision == "16-mixed"
    precise: dict[str, Any] = {"precision": None if mixed else precision}
    precise["plugins"] = [MixedPrecision("16-mixed", "cpu")] if mixed else None
    fitting = seeded(callback, module, logger=logger, log_every_n_steps=1, **precise)
    return {
        **everything(module, fitting),
        "steps": fitting.global_step,
        "rate": fitting.optimizers[0].param_groups[0]["lr"],
        "scaler": fitting.precision_plugin.state_dict(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "logs": logger.logged,
    }


@cache
def without_trial(precision: str) -> Any:
    return trained(BatchSizeScheduler(stays), fails, precision)


FAULTS = [fails_in_the_trainer, fails_wordless, cannot_be_copied, fails_in_backward, fails]


@pytest.mark.parametrize(
    ("fault", "precision"),
    [
        *((fault, "32-true") for fault in FAULTS[:3]),
        *(slow(fault, "32-true") for fault in FAULTS[3:]),
        *(slow(fault, "16-mixed") for fault in FAULTS),
    ],
)
def test_a_fault_in_the_trial_leaves_training_bitwise_as_it_is(
    fault: Callable[[Any, Tensor], Tensor], precision: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with_trial = trained(tries := Tries(), fault, precision)

    assert [bool(why) for why, _, _ in tries.seen] == [True, True]
    for _, before, after in tries.seen:
        np.testing.assert_equal(after, before)
    assert with_trial["steps"] == 24
    np.testing.assert_equal(with_trial, without_trial(precision))
