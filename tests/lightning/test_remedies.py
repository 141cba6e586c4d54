# SPDX-License-Identifier: Apache-2.0
"""What NoiseScaleMonitor says helps does help: each remedy is followed, and is measured then."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import CLASSES, FEATURES, classifier, data, fit_here, heard, loader, network
from remedies import Case, Found, check
from torch import Tensor, nn
from torch.utils.data import DataLoader

from noisescale import NoiseScaleMonitor

STEPS, ROWS = 4, 8


def cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x), y)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


class ByHand(L.LightningModule):
    """Steps by manual optimization."""

    def __init__(self, how: str = "", net: Callable[[], nn.Module] = network) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how, self.net = how, net()

    def configure_optimizers(self) -> Any:
        if "within" in self.how:
            made = {p: torch.optim.SGD([p], lr=1e-3) for p in self.parameters()}
            for which, p in enumerate(made):
                p.register_post_accumulate_grad_hook(partial(self._step, which))
            return list(made.values())
        made = torch.optim.SGD(self.parameters(), lr=1e-3)
        if "unnamed" in self.how:
            self.own = made
        return None if "unnamed" in self.how else made

    def _step(self, which: int, p: nn.Parameter) -> None:
        optimizer = self.optimizers(use_pl_optimizer="past" not in self.how)[which]
        optimizer.step()
        optimizer.zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        inputs = zip(x.chunk(2), y.chunk(2), strict=True) if "chunks" in self.how else [(x, y)]
        if "losses" in self.how:
            inputs = [(x, y), (-x, y)]
        losses = [cross_entropy(self.net, *one) for one in inputs]
        for loss in [sum(losses)] if "added" in self.how else losses:
            (loss.backward if "unseen" in self.how else partial(self.manual_backward, loss))()
        if "within" in self.how or ("every other" in self.how and batch_idx % 2 == 0):
            return
        if "unnamed" in self.how:
            optimizer: Any = self.own
        else:
            optimizer = self.optimizers(use_pl_optimizer="past" not in self.how)
        optimizer.step()
        optimizer.zero_grad()


class Packed(L.LightningModule):
    """Four sequences in a row, as a collator that flattens gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        return nn.functional.cross_entropy(self.net(ids).flatten(0, 1), ids.roll(1).flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def flattened(rows: list[Any]) -> Any:
    lengths = torch.tensor([0, 3, 7, 11, 16], dtype=torch.int32)
    x = torch.stack([one for one, _ in rows]).flatten()[:16]
    return {"input_ids": (x > 0).long()[None], "cu_seqlens": lengths}


def columns(rows: Any) -> Any:
    return [list(column) for column in zip(*rows, strict=True)]


plain = partial(loader, ROWS, 2 * STEPS * ROWS)


def fit(
    module: Callable[[], Any],
    batches: Callable[[], Any] = plain,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    **options: Any,
) -> Found:
    """Train in Lightning."""
    torch.manual_seed(0)
    monitor = NoiseScaleMonitor(every_n_steps=1, **options)
    with heard() as told:
        fit_here(
            monitor,
            model=module(),
            train_loader=batches(),
            max_epochs=epochs,
            accumulate_grad_batches=accumulate,
            log_every_n_steps=1,
        )
    told = [one for one in told if not one.startswith("The train loader takes")]
    return Found(told, sum(logged.meter.measured_steps for logged in monitor.meters), monitor)


def stacked(batch: Any) -> Any:
    return len(batch[0])


class Stacking(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]  # its own
        return cross_entropy(self.net, *map(torch.stack, batch))


in_columns = partial(DataLoader, data(2 * STEPS * ROWS), ROWS, collate_fn=columns)
in_one_batch = partial(loader, ROWS, ROWS)
in_two_batches = partial(loader, ROWS // 2, ROWS)
flat = partial(DataLoader, data(2 * STEPS * ROWS), ROWS, collate_fn=flattened)
batch_normalized = partial(classifier, net=normalized())
MORE = "manual_backward` for each of several batches before the optimizer's `step`"
AFTER = "Call `step` of the optimizers that `self.optimizers()` returns, after `manual_backward`"
FITS = {
    "steps within the pass": Case(
        AFTER, partial(fit, partial(ByHand, "within")), partial(fit, ByHand)
    ),
    "steps within the pass, past Lightning": Case(
        AFTER, partial(fit, partial(ByHand, "within, past")), partial(fit, ByHand)
    ),
    "steps past Lightning": Case(
        AFTER, partial(fit, partial(ByHand, "past")), partial(fit, ByHand)
    ),
    "no optimizer": Case(
        "`configure_optimizers` must return the optimizers that step",
        partial(fit, partial(ByHand, "unnamed")),
        partial(fit, ByHand),
    ),
    "no backward pass": Case(
        "`self.manual_backward(loss)`",
        partial(fit, partial(ByHand, "unseen")),
        partial(fit, ByHand),
    ),
    "chunks of a batch": Case(
        "have the loader return the chunks as batches",
        partial(fit, partial(ByHand, "chunks")),
        partial(fit, partial(ByHand, "every other")),
    ),
    "several losses of a batch": Case(
        "add the losses and call `manual_backward` once a batch",
        partial(fit, partial(ByHand, "losses")),
        partial(fit, partial(ByHand, "losses, added")),
    ),
    "BatchNorm": Case(
        "`Trainer(accumulate_grad_batches=2)`",
        partial(fit, batch_normalized),
        partial(fit, batch_normalized, accumulate=2),
    ),
    "BatchNorm by hand": Case(
        MORE,
        partial(fit, partial(ByHand, net=normalized)),
        partial(fit, partial(ByHand, "every other", normalized)),
    ),
    "an epoch of one batch": Case(
        "use half the batch size in the data loader and `accumulate_grad_batches=2`",
        partial(fit, batch_normalized, in_one_batch, epochs=STEPS, accumulate=2),
        partial(fit, batch_normalized, in_two_batches, epochs=STEPS, accumulate=2),
    ),
    "an epoch of one batch, micro-batches": Case(
        "use half the batch size in the data loader and `accumulate_grad_batches=2`",
        partial(
            fit, classifier, in_one_batch, epochs=STEPS, accumulate=2, small_batch="micro_batch"
        ),
        partial(fit, classifier, in_two_batches, epochs=STEPS, accumulate=2),
    ),
    "packed rows": Case(
        "Accumulate two or more micro-batches",
        partial(fit, Packed, flat),
        partial(fit, Packed, flat, accumulate=2),
    ),
    "batches of unknown size": Case(
        "Pass a function from a batch to the number",
        partial(fit, Stacking, in_columns),
        partial(fit, Stacking, in_columns, batch_size_fn=stacked),
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_what_a_monitor_says_helps_does(name: str) -> None:
    check(FITS[name], STEPS)
