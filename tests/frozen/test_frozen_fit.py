# SPDX-License-Identifier: Apache-2.0
"""A fit at fixed weights: what it sees, and that it leaves everything as it was."""

import copy
from contextlib import nullcontext
from math import nan
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from refused import refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale.frozen.frozen_fit import BatchStatistics, FitRequest, frozen_fit
from noisescale.frozen.judged_monitor import JudgedMonitor
from noisescale.lightning.checkpoints import Checkpoint
from noisescale.lightning.training import seed_all

ON_CPU = {"accelerator": "cpu", "devices": 1}


class Module(L.LightningModule):
    """With what a training step changes: statistics, a queue, a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1)
        )
        self.teacher = nn.Linear(4, 6).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(3))
        self.seen_steps: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0, prog_bar=True)
        (x,) = batch
        loss = (self.net(x) - x.sum(dim=1, keepdim=True)).square().mean()
        return {"loss": loss + 0.01 * (self.net[0](x) - self.teacher(x)).square().mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen_steps.append(self.trainer.global_step)
        with torch.no_grad():
            self.queue += 1  # type: ignore[operator]  # a tensor
            self.teacher.weight.lerp_(self.net[0].weight, 0.5)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(steps))]


def examples(count: int = 64, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=batch_size, **options)


def seen_by(module: Any, loader: Any, batches: int = 12, **options: Any) -> BatchStatistics:
    return frozen_fit(
        module,
        nullcontext({"train_dataloaders": loader}),
        options.pop("asked", FitRequest()),
        enough=lambda seen: seen.batches >= batches,
        **{"trainer_options": ON_CPU, **options},
    )


def test_module_data_and_random_numbers_are_bitwise_as_before() -> None:
    torch.manual_seed(0)
    module = Module()
    state = copy.deepcopy(module.state_dict())
    rng = torch.get_rng_state()
    module.net[0].weight.grad = torch.ones(6, 4)

    seen_by(module, examples(shuffle=True), judged=[JudgedMonitor(name="half")])

    assert all(torch.equal(a, state[name]) for name, a in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(module.net[0].weight.grad, torch.ones(6, 4))
    assert module.seen_steps == []
    assert not module.net[0]._forward_hooks


def without_dropout() -> Module:
    torch.manual_seed(1)
    module = Module()
    module.net[2] = nn.Identity()
    return module


def test_gradients_are_those_of_each_batch_at_the_same_weights() -> None:
    """By hand: each batch at the weights, the teacher and the statistics of the beginning."""
    module = without_dropout()
    gradients = []
    for batch in examples():
        net = copy.deepcopy(module.net)
        (x,) = batch
        loss = (net(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss = loss + 0.01 * (net[0](x) - module.teacher(x)).square().mean()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]).double())
    found = torch.stack(gradients)

    seen = seen_by(module, examples(), asked=FitRequest(elementwise=True))

    assert seen.again  # it does not shuffle: after the epoch come the same batches
    assert seen.batches == len(found) == 8
    for k, one in enumerate(seen.whole, start=1):
        mean = found[:k].mean(dim=0)
        assert (one.weight, one.examples, one.before) == (8, 8, 8 * k)
        assert one.along == pytest.approx(float(found[k] @ mean), rel=1e-4)
        deviation = 8 * k / (k + 1) * float((found[k] - mean).square().sum())
        assert one.deviation == pytest.approx(deviation, rel=1e-4)
    mean = torch.cat([x.flatten() for x in seen.mean.values()])
    variance = torch.cat([x.flatten() for x in seen.variance.values()])
    assert torch.allclose(mean.double(), found.mean(dim=0), atol=1e-6)
    assert torch.allclose(variance.double(), 8 * found.var(dim=0), rtol=1e-3, atol=1e-6)


def test_successive_batches_are_compared_in_pairs() -> None:
    seen = seen_by(without_dropout(), examples(), asked=FitRequest(successive=lambda _: True))

    assert list(seen.differences) == [2, 4, 6, 8]
    # Of the first two: |g_2 - g_1|² is twice what the second one deviates from the first.
    assert seen.differences[2] == pytest.approx(seen.whole[0].deviation, rel=1e-5)


def test_groups_are_parts_of_the_whole() -> None:
    seen = seen_by(Module(), examples(), asked=FitRequest(groups={"head": r"net\.3"}))

    assert seen.group_names == ("head",)
    assert len(seen.entries) == 2
    for head, rest, whole in zip(*seen.entries, seen.whole, strict=True):
        assert 0 < head.deviation < whole.deviation == head.deviation + rest.deviation


def test_weights_are_what_a_mean_is_over() -> None:
    asked = FitRequest(weight_fn=lambda batch: 3.0, batch_size_fn=lambda batch: 2.0)

    seen = seen_by(Module(), examples(), asked=asked)

    assert {(one.weight, one.examples) for one in seen.whole} == {(3.0, 2.0)}


def test_schedules_of_the_module_stand_at_the_step_of_the_checkpoint(tmp_path: Any) -> None:
    steps: list[int] = []

    class Watched(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(self.trainer.global_step)
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    weights = Module().state_dict()
    saved = Checkpoint(tmp_path / "x", 300, weights, [])
    module = Watched()
    torch.manual_seed(1)
    seen = seen_by(module, examples(), checkpoint=saved)

    assert set(steps) == {300}
    module.load_state_dict(weights)
    torch.manual_seed(1)
    assert seen.whole == seen_by(module, examples()).whole


class Steps(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.net[3].bias += 0.1
        return loss


class StepsData(Module):
    """Without autograd's knowing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[3].weight.data.mul_(1.01)
        return super().training_step(batch, batch_idx)


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Frozen(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.requires_grad_(False).parameters())


def with_step(step: Any) -> type[Module]:
    """A module with another training step."""
    return type("Other", (Module,), {"training_step": step})


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        (Steps, "'net.3.bias' changed"),
        (StepsData, "'net.3.weight' changed"),
        (ByHand, "ByHand without"),
        (with_step(lambda self, batch, _: self.net(batch[0]).sum() * nan), "nan in batch 1"),
        (Frozen, "none"),
        (with_step(lambda *_: None), "none in 20 batches"),
    ],
)
def test_modules_that_cannot_be_measured_are_refused(kind: Any, got: str) -> None:
    seed_all(0)
    with refused("target", got=got):
        seen_by(kind(), examples(shuffle=True))


def test_other_processes_are_refused() -> None:
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_fork"}
    with refused("strategy", got="'ddp_fork', which starts others"):
        seen_by(Module(), examples(), trainer_options=options)
