# SPDX-License-Identifier: Apache-2.0
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Record, Training
from noisescale.lab.parameters import range_parameter
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob
from noisescale.lab.sweep.trial_fit import Made, describe, train_task

CPU = Training("train.py:make", accelerator="cpu")
GOAL = Goal.read("val_loss<=0.5")


class Line(pl.LightningModule):
    """y = w x, from w = 0 to w = 1, with a validation loss of (1 - w)²."""

    def __init__(self, lr: float = 0.01, bad: float = math.inf) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.lr, self.bad = lr, bad

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss * math.nan if self.global_step >= self.bad else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


ONES = TensorDataset(torch.ones(64, 1), torch.ones(64, 1))


def data(batch_size: int = 8) -> tuple[Any, Any]:
    return DataLoader(ONES, batch_size=batch_size, shuffle=True), DataLoader(ONES, batch_size=64)


def task(
    size: int = 8, rate: float = 0.01, *, most: int | None = None, epochs: float = 20, **other: Any
) -> Record:
    search = Search((range_parameter("learning_rate", 0.001, 0.1, "log"),), 3, 1)
    job = SweepJob(
        CPU, Own(64, 8, 0.01), other.get("goal", GOAL), (8, 16, 32), search, epochs, most
    )
    return job.task(size, {"learning_rate": rate}, 0).spec


def trained(folder: Path, spec: Record, module: Any = None, on: Any = None) -> dict[str, Any]:
    train_task(Made(module or Line(), on or data()), spec, folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def steps_by_hand(rate: float, goal: float) -> int:
    """Steps of w += 2 lr (1 - w) until (1 - w)² is at the goal."""
    return math.ceil(math.log(goal) / 2 / math.log(1 - 2 * rate))


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_a_training_stops_at_its_goal_with_the_given_learning_rate(
    tmp_path: Path, rate: float
) -> None:
    found = trained(tmp_path, task(rate=rate))

    by_hand = steps_by_hand(rate, 0.5)
    assert found["ended"] == "reached"
    assert found["values"][-1] <= 0.5 < found["values"][-2]
    assert by_hand <= found["steps"][-1] <= math.ceil(1.05 * by_hand) + 1
    assert found["values"][0] == pytest.approx((1 - 2 * rate) ** 2, rel=1e-5)
    assert found["steps"][:4] == [1, 2, 3, 4]
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][0] > 0


def test_batches_are_accumulated_whole_and_epochs_have_no_smaller_step(tmp_path: Path) -> None:
    """64 examples make 2 steps of 24: a third of 16 is left out."""
    module = Line()
    sizes: list[int] = []
    training_step = Line.training_step

    def counted(self: Line, batch: Any, batch_idx: int) -> torch.Tensor:
        sizes.append(len(batch[0]))
        return training_step(self, batch, batch_idx)

    spec = task(16, most=4)
    spec = {**spec, "batch_size": 24, "device_batch_size": 12, "accumulation": 2}
    spec |= {"batches_of_epoch": 4, "most_steps": 10, "most_epochs": 5}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Line, "training_step", counted)
        found = trained(tmp_path, spec, module)

    assert set(sizes) == {12}
    assert len(sizes) == 2 * found["steps"][-1] == 20
    assert found["ended"] == "out of steps"


def test_data_without_a_loader_are_shuffled_anew_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def noted(self: Line, batch: Any, batch_idx: int) -> torch.Tensor:
        seen.extend(batch[1].flatten().tolist())
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    monkeypatch.setattr(Line, "training_step", noted)
    numbered = TensorDataset(torch.zeros(64, 1), torch.arange(64.0).unsqueeze(1))
    trained(tmp_path, {**task(epochs=2), "most_steps": 16}, on=(numbered, ONES))

    epochs = [seen[:64], seen[64:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 2
    assert epochs[0] != epochs[1] != sorted(seen[64:]) != epochs[0]


def test_a_training_that_cannot_win_stops_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("7")

    found = trained(tmp_path, task())

    assert (found["ended"], found["steps"][-1]) == ("stopped early", 7)


def test_a_training_without_a_finite_loss_has_diverged(tmp_path: Path) -> None:
    found = trained(tmp_path, task(), Line(bad=3))

    assert found["ended"] == "diverged"
    assert found["values"][-1] is None
    lost = trained(tmp_path, task(goal=Goal.read("accuracy>=1")), Accurate(bad=3))
    assert (lost["ended"], lost["values"][-1]) == ("diverged", 0.5)


class Accurate(Line):
    """With a metric that does not show that the loss is no number."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", 0.5)


def test_a_metric_of_the_training_steps_will_do(tmp_path: Path) -> None:
    found = trained(tmp_path, task(goal=Goal.read("train_loss<=0.5")), on=ONES)

    assert found["ended"] == "reached"
    assert abs(found["steps"][-1] - steps_by_hand(0.01, 0.5)) <= 2


class Module(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return data(4)[0]

    def val_dataloader(self) -> Any:
        return data()[1]


@pytest.mark.parametrize("on", [data(4), Module(), (ONES, ONES)])
def test_all_kinds_of_data_are_trained_and_described(tmp_path: Path, on: Any) -> None:
    own = describe(Made(Line(0.03), on), CPU, GOAL, 16)
    found = trained(tmp_path, task(), on=on)

    size = 16 if isinstance(on, tuple) and on[0] is ONES else 4
    assert own == Own(64.0, size, 0.03, momentum=0.0, weight_decay=0.0)
    assert found["steps"][-1] == trained(tmp_path, task())["steps"][-1]


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_of_fewer_examples_makes_no_smaller_batch(
    tmp_path: Path, in_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 examples 50 are taken: 3 steps of 2 micro-batches of 8, and no fourth of one."""
    taken = SubsetRandomSampler(range(50))
    batches: Any = FewAtATime(taken, 4, drop_last=False)
    loader = (
        DataLoader(ONES, batch_sampler=batches)
        if in_batches
        else DataLoader(ONES, 4, sampler=taken)
    )
    seen: list[int] = []
    monkeypatch.setattr(
        Line, "on_train_batch_start", lambda self, batch, _: seen.append(len(batch[0]))
    )

    own = describe(Made(Line(), (loader, data()[1])), CPU, GOAL, 8)
    seen.clear()
    search = Search((range_parameter("learning_rate", 0.001, 0.1, "log"),), 3, 1)
    job = SweepJob(CPU, own, Goal.read("val_loss<=1e-9"), (8, 16), search, 5, 8)
    spec = job.task(16, {"learning_rate": 0.001}, 0).spec
    found = trained(tmp_path, spec, on=(loader, data()[1]))

    assert (own.examples, own.batch_size) == (50, 4)
    assert sum(seen) == 16 * found["steps"][-1]
    assert found["steps"][-1] == spec["most_steps"]


class FewAtATime(BatchSampler):
    """A batch sampler of the user's own."""


class Loads(pl.LightningDataModule):
    """With any loaders to train on."""

    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders

    def train_dataloader(self) -> Any:
        return self.loaders

    def val_dataloader(self) -> Any:
        return data()[1]


class Several(Line):
    """Of a dict of batches, one counts."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["some"], batch_idx)


def test_combined_loaders_have_batches_of_the_size_that_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def counted(self: Several, batch: Any, batch_idx: int) -> None:
        seen.extend(len(each[0]) for each in batch.values())

    monkeypatch.setattr(Several, "on_train_batch_start", counted)
    on = Loads(CombinedLoader({"some": data()[0], "other": data(4)[0]}, "min_size"))

    trained(tmp_path, task(16), Several(), on)

    assert set(seen) == {16}


class Shifts(DataLoader[Any]):
    """Changes what the data set has."""

    def __iter__(self) -> Any:
        for inputs, targets in super().__iter__():
            yield inputs, targets + 1


class Batches:
    """Neither a DataLoader nor a data set."""

    def __iter__(self) -> Any:
        return iter(data()[0])


def test_loaders_whose_batches_cannot_be_made_again_are_refused(tmp_path: Path) -> None:
    """They would be trained with batches of another size, or on other examples."""
    for on, said in [
        (Loads(Batches()), "must return a DataLoader, .* got Batches"),
        (Loads([data()[0], Batches()]), "must return a DataLoader, .* got Batches"),
        ((Shifts(ONES, 8), data()[1]), "must be a DataLoader, or a subclass .* got Shifts"),
        (Loads(Shifts(ONES, 8)), "must be a DataLoader, or a subclass .* got Shifts"),
    ]:
        with pytest.raises(ValueError, match=f"`train_dataloader` {said}"):
            describe(Made(Line(), on), CPU, GOAL, 8)
        with pytest.raises(ValueError, match=f"`train_dataloader` {said}"):
            trained(tmp_path, task(16), on=on)


class Stream(IterableDataset[Any]):
    """40 examples. It does not say how many."""

    def __iter__(self) -> Any:
        return iter(ONES[place] for place in range(40))


def test_a_stream_shorter_than_a_batch_ends_the_training(tmp_path: Path) -> None:
    search = Search((range_parameter("learning_rate", 0.001, 0.1, "log"),), 3, 1)
    job = SweepJob(CPU, Own(math.inf, 8, 0.01), GOAL, (8, 64), search, 20, None)
    spec = job.task(64, {"learning_rate": 0.01}, 0).spec
    on = DataLoader(Stream(), batch_size=8), data()[1]

    with pytest.raises(ValueError, match="at most the number of examples of an epoch, got 64"):
        trained(tmp_path, spec, on=on)


class Sets(Line):
    """Sets the learning rate itself, within a step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] = self.lr
        return super().training_step(batch, batch_idx)


class SetsBetweenSteps(Line):
    """Sets the learning rate itself, before a step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = self.lr


@pytest.mark.parametrize("kind", [Sets, SetsBetweenSteps])
def test_a_module_that_sets_the_learning_rate_itself_is_searched_too(
    kind: type[Line], tmp_path: Path
) -> None:
    found = trained(tmp_path, task(rate=0.05), kind())

    assert found["values"] == trained(tmp_path, task(rate=0.05))["values"]


class OfBatch(Line):
    """With a batch size among its hyperparameters."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_batch_size_among_the_hyperparameters_is_told() -> None:
    assert describe(Made(OfBatch(8), data()), CPU, GOAL, 8).fixed_batch_size == 8
    assert describe(Made(Line(), data()), CPU, GOAL, 8).fixed_batch_size is None


class Warm(Line):
    """With a warm-up over a tenth of all steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        warm = int(0.1 * self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / warm))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_the_step_that_describes_a_module_leaves_room_for_a_warm_up() -> None:
    assert describe(Made(Warm(0.03), data()), CPU, GOAL, 8).learning_rate == 0.03


class Patient(Line):
    """With a learning rate that falls where the validation loss does not."""

    rates: list[float]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }

    def on_train_end(self) -> None:
        Patient.rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]


def test_a_plateau_of_a_metric_is_not_one_of_validations_that_were_left_out(tmp_path: Path) -> None:
    """The loss falls in each epoch. From step 160 on, several epochs pass between two looks."""
    spec = task(16, 0.0002, epochs=100, goal=Goal.read("val_loss<=0.1"))

    found = trained(tmp_path, spec, Patient())

    assert found["steps"][-1] > 500
    assert Patient.rates == [0.01]


class Stops(Line):
    """Stops by itself in a step at which no look is due."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 105:
            time.sleep(0.3)
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def test_a_training_that_stops_itself_keeps_its_time(tmp_path: Path) -> None:
    found = trained(tmp_path, task(rate=0.001, goal=Goal.read("val_loss<=1e-9")), Stops())

    assert found["steps"][-1] == 106
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][-1] - found["seconds"][-2] >= 0.3


class Fixed(Line):
    """With an optimizer without momentum."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters())


class OfEpochs(Line):
    """With a metric that is logged when an epoch ends."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss


def test_schedules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def scheduled(self: Line) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    monkeypatch.setattr(Line, "configure_optimizers", scheduled)

    own = describe(Made(Line(), data()), CPU, GOAL, 8)
    assert own.schedules == ("StepLR",)
    assert not own.schedules_fit


@pytest.mark.parametrize(
    "kind", ["OneCycleLR", "CosineAnnealingLR", "transformers", "own", "1000", "by epochs"]
)
def test_a_schedule_of_the_trainings_length_is_known(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scheduled(self: Line) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        made: dict[str, Any] = {
            "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps),
            "CosineAnnealingLR": lambda: CosineAnnealingLR(optimizer, int(steps)),
            # As its get_linear_schedule_with_warmup.
            "transformers": lambda: LambdaLR(optimizer, partial(falling, num_training_steps=steps)),
            "own": lambda: LambdaLR(optimizer, lambda step: 1 - step / steps),
            "1000": lambda: CosineAnnealingLR(optimizer, 1000),
            "by epochs": lambda: CosineAnnealingLR(optimizer, int(steps)),
        }
        by = "epoch" if kind == "by epochs" else "step"
        schedule = {"scheduler": made[kind](), "interval": by}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    monkeypatch.setattr(Line, "configure_optimizers", scheduled)

    assert describe(Made(Line(), data()), CPU, GOAL, 8).schedules_fit == (kind in FITTING)


FITTING = "OneCycleLR", "CosineAnnealingLR", "transformers"


def falling(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


def test_a_metric_of_a_single_batch_is_known_as_such() -> None:
    class Both(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("loss", 7.0)

    of = {
        name: describe(Made(Both(), data()), CPU, Goal.read(f"{name}<=1"), 8).of_a_batch
        for name in ("val_loss", "train_loss", "loss")
    }

    assert of == {"val_loss": False, "train_loss": True, "loss": False}


def test_a_goal_that_a_single_step_meets_is_known_as_such() -> None:
    met = {
        goal: describe(Made(Line(), data()), CPU, Goal.read(goal), 8).met
        for goal in ("val_loss<=0.9", "val_loss<=0.99", "val_loss>=0.5")  # (1 - 0.02)² = 0.96
    }

    assert met == {"val_loss<=0.9": False, "val_loss<=0.99": True, "val_loss>=0.5": True}


def test_what_does_not_fit_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ValueError, match="`goal` must be about a metric that the module logs, got"):
        describe(Made(Line(), data()), CPU, Goal.read("val_los<=1"), 8)
    with pytest.raises(ValueError, match="got 'mean_loss', which is logged when an epoch ends"):
        describe(Made(OfEpochs(), ONES), CPU, Goal.read("mean_loss<=1"), 8)
    with pytest.raises(ValueError, match="`search` must name what the optimizer has, got momentum"):
        describe(Made(Fixed(), data()), CPU, GOAL, 8, ["momentum"])
    with pytest.raises(ValueError, match=r"`data` must be a Dataset, a DataLoader or .* got int"):
        describe(Made(Line(), 3), CPU, GOAL, 8)
    manual = Line()
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="`module` must use automatic optimization for a sweep"):
        describe(Made(manual, data()), CPU, GOAL, 8)
