# SPDX-License-Identifier: Apache-2.0
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lab.jobs.jobs_for_tests import CPU, SWEEP
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from refused import refused
from torch import nn
from torch.optim import SGD, Adagrad
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Record
from noisescale.lab.sweep.settings import ModuleDefaults
from noisescale.lab.sweep.trial_fit import MadeModule, describe, train_task

JOB = replace(SWEEP, own=ModuleDefaults(64, 8, 0.01), batch_sizes=(8, 16, 32, 64), epochs=20)


class Line(pl.LightningModule):
    """y = w x, from w = 0 to w = 1, with a validation loss of (1 - w)².

    Of a dict of batches, the batch "some" counts. "loss" is logged in training and in validation.

    Args:
        lr: Of its optimizer.
        bad: The step from which on the loss is no number.
        schedule: A function of the optimizer and the steps of the whole training.
        by: How often the schedule goes on.
    """

    def __init__(
        self,
        lr: float = 0.01,
        bad: float = math.inf,
        *,
        optimizer: Any = SGD,
        schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
        by: str = "step",
    ) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.lr, self.bad = lr, bad
        self.optimizer, self.schedule, self.by = optimizer, schedule, by

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch["some"] if isinstance(batch, dict) else batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log_dict({"train_loss": loss, "loss": loss})
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss * math.nan if self.global_step >= self.bad else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log_dict({"val_loss": loss, "loss": 7.0, "accuracy": 0.5})

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=self.lr)
        if self.schedule is None:
            return optimizer
        schedule = self.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        scheduled = {"scheduler": schedule, "interval": self.by, "monitor": "val_loss"}
        return [optimizer], [scheduled]


ONES = TensorDataset(torch.ones(64, 1), torch.ones(64, 1))


def data(batch_size: int = 8) -> tuple[Any, Any]:
    return DataLoader(ONES, batch_size=batch_size, shuffle=True), DataLoader(ONES, batch_size=64)


def task(size: int = 8, rate: float = 0.01, goal: str = "val_loss<=0.5", **changed: Any) -> Record:
    job = replace(JOB, goal=Goal.read(goal), **changed)
    return job.task(size, {"learning_rate": rate}, 0).spec


def described(
    module: Any = None,
    on: Any = None,
    goal: str = "val_loss<=0.5",
    size: int = 8,
    search: Sequence[str] = (),
) -> ModuleDefaults:
    made = MadeModule(module or Line(), data() if on is None else on)
    return describe(made, CPU, Goal.read(goal), size, search)


def trained(folder: Path, spec: Record, module: Any = None, on: Any = None) -> dict[str, Any]:
    train_task(MadeModule(module or Line(), on or data()), spec, folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each batch that is trained."""
    found: list[Any] = []
    monkeypatch.setattr(Line, "on_train_batch_start", lambda self, batch, _: found.append(batch))
    return found


def steps_by_hand(rate: float, goal: float = 0.5) -> int:
    """Steps of w += 2 lr (1 - w) until (1 - w)² is at the goal."""
    return math.ceil(math.log(goal) / 2 / math.log(1 - 2 * rate))


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_a_training_stops_at_its_goal_with_the_given_learning_rate(
    tmp_path: Path, rate: float
) -> None:
    found = trained(tmp_path, task(rate=rate))

    by_hand = steps_by_hand(rate)
    assert found["ended"] == "reached"
    assert found["values"][-1] <= 0.5 < found["values"][-2]
    assert by_hand <= found["steps"][-1] <= math.ceil(1.05 * by_hand) + 1
    assert found["values"][0] == pytest.approx((1 - 2 * rate) ** 2, rel=1e-5)
    assert found["steps"][:4] == [1, 2, 3, 4]
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][0] > 0


def test_batches_are_accumulated_whole_and_epochs_have_no_smaller_step(
    tmp_path: Path, batches: list[Any]
) -> None:
    """64 examples make 2 steps of 24: a third of 16 is left out."""
    spec = task(24, batch_sizes=(24,), max_device_batch_size=12, epochs=5)

    found = trained(tmp_path, spec)

    assert {len(batch[0]) for batch in batches} == {12}
    assert len(batches) == 2 * found["steps"][-1] == 20
    assert found["ended"] == "out of steps"


def test_data_without_a_loader_are_shuffled_anew_in_each_epoch(
    tmp_path: Path, batches: list[Any]
) -> None:
    numbered = TensorDataset(torch.zeros(64, 1), torch.arange(64.0).unsqueeze(1))
    trained(tmp_path, {**task(epochs=2), "most_steps": 16}, on=(numbered, ONES))

    seen = torch.cat([batch[1].flatten() for batch in batches]).tolist()
    epochs = [seen[:64], seen[64:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 2
    assert epochs[0] != epochs[1] != sorted(seen[64:]) != epochs[0]


def test_a_training_that_cannot_win_stops_and_without_a_finite_loss_it_has_diverged(
    tmp_path: Path,
) -> None:
    """Also where the metric does not show that the loss is no number."""
    found = trained(tmp_path, task(), Line(bad=3))
    lost = trained(tmp_path, task(goal="accuracy>=1"), Line(bad=3))
    (tmp_path / "limit").write_text("7")
    pruned = trained(tmp_path, task())

    assert (found["ended"], found["values"][-1]) == ("diverged", None)
    assert (lost["ended"], lost["values"][-1]) == ("diverged", 0.5)
    assert (pruned["ended"], pruned["steps"][-1]) == ("stopped early", 7)


def test_a_metric_of_the_training_steps_will_do(tmp_path: Path) -> None:
    found = trained(tmp_path, task(goal="train_loss<=0.5"), on=ONES)

    assert found["ended"] == "reached"
    assert abs(found["steps"][-1] - steps_by_hand(0.01)) <= 2


class Loads(pl.LightningDataModule):
    """With any loaders to train on."""

    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders

    def train_dataloader(self) -> Any:
        return self.loaders

    def val_dataloader(self) -> Any:
        return data()[1]


@pytest.mark.parametrize("on", [data(4), Loads(data(4)[0]), (ONES, ONES)])
def test_all_kinds_of_data_are_trained_and_described(tmp_path: Path, on: Any) -> None:
    own = described(Line(0.03), on, size=16)
    found = trained(tmp_path, task(), on=on)

    size = 16 if isinstance(on, tuple) and on[0] is ONES else 4
    assert own == ModuleDefaults(64.0, size, 0.03, momentum=0.0, weight_decay=0.0)
    assert found["steps"][-1] == trained(tmp_path, task())["steps"][-1]


class FewAtATime(BatchSampler):
    """A batch sampler of the user's own."""


TAKEN = SubsetRandomSampler(range(50))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(ONES, 4, sampler=TAKEN),
        DataLoader(ONES, batch_sampler=FewAtATime(TAKEN, 4, drop_last=False)),
    ],
    ids=["single", "in batches"],
)
def test_a_sampler_of_fewer_examples_makes_no_smaller_batch(
    tmp_path: Path, loader: Any, batches: list[Any]
) -> None:
    """Of 64 examples 50 are taken: 3 steps of 2 micro-batches of 8, and no fourth of one."""
    own = described(on=(loader, data()[1]))
    batches.clear()
    shape: dict[str, Any] = {"own": own, "batch_sizes": (8, 16), "max_device_batch_size": 8}
    spec = task(16, 0.001, "val_loss<=1e-9", epochs=5, **shape)
    found = trained(tmp_path, spec, on=(loader, data()[1]))

    assert (own.examples, own.batch_size) == (50, 4)
    assert sum(len(batch[0]) for batch in batches) == 16 * found["steps"][-1]
    assert found["steps"][-1] == spec["most_steps"]


def test_combined_loaders_have_batches_of_the_size_that_is_swept(
    tmp_path: Path, batches: list[Any]
) -> None:
    on = Loads(CombinedLoader({"some": data()[0], "other": data(4)[0]}, "min_size"))

    trained(tmp_path, task(16), on=on)

    assert {len(one[0]) for batch in batches for one in batch.values()} == {16}


class Shifts(DataLoader[Any]):
    """Changes what the data set has."""

    def __iter__(self) -> Any:
        for inputs, targets in super().__iter__():
            yield inputs, targets + 1


class Batches:
    """Neither a DataLoader nor a data set."""

    def __iter__(self) -> Any:
        return iter(data()[0])


@pytest.mark.parametrize(
    ("on", "requirement"),
    [
        (Loads(Batches()), "return a DataLoader"),
        (Loads([data()[0], Batches()]), "return a DataLoader"),
        ((Shifts(ONES, 8), data()[1]), "a subclass"),
        (Loads(Shifts(ONES, 8)), "a subclass"),
    ],
)
def test_loaders_whose_batches_cannot_be_made_again_are_refused(
    tmp_path: Path, on: Any, requirement: str
) -> None:
    """They would be trained with batches of another size, or on other examples."""
    with refused("train_dataloader", requirement=requirement) as first:
        described(on=on)
    with refused("train_dataloader", got=first.value.got):
        trained(tmp_path, task(16), on=on)


class Stream(IterableDataset[Any]):
    """40 examples. It does not say how many."""

    def __iter__(self) -> Any:
        return iter(ONES[place] for place in range(40))


def test_a_stream_shorter_than_a_batch_ends_the_training(tmp_path: Path) -> None:
    spec = task(64, own=ModuleDefaults(math.inf, 8, 0.01))
    on = DataLoader(Stream(), batch_size=8), data()[1]

    with refused("batch_sizes", requirement="at most the number of examples"):
        trained(tmp_path, spec, on=on)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward"])
def test_a_module_that_sets_the_learning_rate_itself_is_searched_too(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a step or within it."""
    plain = trained(tmp_path, task(rate=0.05))

    def set_rate(module: Line, *_: Any) -> None:
        module.trainer.optimizers[0].param_groups[0]["lr"] = module.lr

    monkeypatch.setattr(Line, hook, set_rate)
    found = trained(tmp_path, task(rate=0.05))

    assert found["values"] == plain["values"]


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Over a tenth of all steps."""
    warm = int(0.1 * steps)
    return LambdaLR(optimizer, lambda step: min(1, step / warm))


def test_the_first_step_describes_modules_with_a_batch_size_or_a_warm_up_of_their_own() -> None:
    of_batch = Line()
    of_batch.save_hyperparameters({"batch_size": 8})

    assert described(of_batch).fixed_batch_size == 8
    assert described().fixed_batch_size is None
    assert described(Line(0.03, schedule=warm_up)).learning_rate == 0.03


def test_a_plateau_of_a_metric_is_not_one_of_validations_that_were_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss falls in each epoch. From step 160 on, several epochs pass between two looks."""
    rates: list[float] = []

    def note(module: Line) -> None:
        rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])

    monkeypatch.setattr(Line, "on_train_end", note)
    module = Line(schedule=lambda by, _: ReduceLROnPlateau(by, patience=1), by="epoch")

    found = trained(tmp_path, task(16, 0.0002, "val_loss<=0.1", epochs=60), module)

    assert found["steps"][-1] > 300
    assert rates == [0.01]


def test_a_training_that_stops_itself_keeps_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step at which no look is due."""

    def stop(module: Line, _: Any) -> None:
        if module.global_step == 105:
            time.sleep(0.3)
            module.trainer.should_stop = True

    monkeypatch.setattr(Line, "on_before_backward", stop)
    found = trained(tmp_path, task(rate=0.001, goal="val_loss<=1e-9"))

    assert found["steps"][-1] == 106
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][-1] - found["seconds"][-2] >= 0.3


def falling(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


def of_transformers(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """As its get_linear_schedule_with_warmup."""
    return LambdaLR(optimizer, partial(falling, num_training_steps=steps))


@pytest.mark.parametrize(
    ("schedule", "by", "name", "fits"),
    [
        (lambda optimizer, steps: OneCycleLR(optimizer, 0.1, steps), "step", "OneCycleLR", True),
        (CosineAnnealingLR, "step", "CosineAnnealingLR", True),
        (CosineAnnealingLR, "epoch", "CosineAnnealingLR", False),
        (lambda by, _: CosineAnnealingLR(by, 1000), "step", "CosineAnnealingLR", False),
        (of_transformers, "step", "LambdaLR", True),
        (warm_up, "step", "LambdaLR", False),
        (StepLR, "step", "StepLR", False),
    ],
)
def test_schedules_are_named_and_one_of_the_trainings_length_is_known(
    schedule: Any, by: str, name: str, fits: bool
) -> None:
    own = described(Line(schedule=schedule, by=by))

    assert (own.schedules, own.schedules_fit) == ((name,), fits)


@pytest.mark.parametrize(
    ("goal", "of_a_batch", "met"),
    [
        ("val_loss<=0.9", False, False),
        ("val_loss<=0.99", False, True),  # (1 - 0.02)² = 0.96
        ("val_loss>=0.5", False, True),
        ("train_loss<=0", True, False),
        ("loss<=1", False, False),
    ],
)
def test_a_goal_of_a_single_batch_and_one_that_a_step_meets_are_known(
    goal: str, of_a_batch: bool, met: bool
) -> None:
    own = described(goal=goal)

    assert (own.of_a_batch, own.met) == (of_a_batch, met)


def manual() -> Line:
    module = Line()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("given", "argument", "got"),
    [
        ({"goal": "val_los<=1"}, "goal", "val_los"),
        ({"on": ONES, "goal": "mean_loss<=1"}, "goal", "'mean_loss', which"),
        ({"module": Line(optimizer=Adagrad), "search": ["momentum"]}, "search", "momentum"),
        ({"on": 3}, "data", "int"),
        ({"module": manual()}, "module", ""),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_trained(
    given: dict[str, Any], argument: str, got: str
) -> None:
    with refused(argument) as found:
        described(**given)
    assert got in found.value.got
