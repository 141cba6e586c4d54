# SPDX-License-Identifier: Apache-2.0
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from refused import refused
from torch import nn
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
from noisescale.lab.jobs.jobs import Record, Training
from noisescale.lab.parameters import range_parameter
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob
from noisescale.lab.sweep.trial_fit import Made, describe, train_task

CPU = Training("train.py:make", accelerator="cpu")
SEARCH = Search((range_parameter("learning_rate", 0.001, 0.1, "log"),), 3, 1)


class Line(pl.LightningModule):
    """y = w x, from w = 0 to w = 1, with a validation loss of (1 - w)².

    Args:
        lr: Of its optimizer.
        bad: The step from which on the loss is no number.
        schedule: A function of the optimizer and the steps of the whole training.
        by: How often the schedule goes on.
        logs: Whether the mean of the loss over an epoch is logged.
    """

    def __init__(
        self,
        lr: float = 0.01,
        bad: float = math.inf,
        *,
        optimizer: Any = torch.optim.SGD,
        schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None,
        by: str = "step",
        logs: bool = False,
    ) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.lr, self.bad, self.logs = lr, bad, logs
        self.optimizer, self.schedule, self.by = optimizer, schedule, by

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        if self.logs:
            self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss * math.nan if self.global_step >= self.bad else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

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


def task(
    size: int = 8,
    rate: float = 0.01,
    *,
    most: int | None = None,
    epochs: float = 20,
    goal: str = "val_loss<=0.5",
    own: Own | None = None,
) -> Record:
    own = own or Own(64, 8, 0.01)
    job = SweepJob(CPU, own, Goal.read(goal), (8, 16, 32, 64), SEARCH, epochs, most)
    return job.task(size, {"learning_rate": rate}, 0).spec


def described(
    module: Any = None,
    on: Any = None,
    goal: str = "val_loss<=0.5",
    size: int = 8,
    search: Sequence[str] = (),
) -> Own:
    made = Made(module or Line(), data() if on is None else on)
    return describe(made, CPU, Goal.read(goal), size, search)


def trained(folder: Path, spec: Record, module: Any = None, on: Any = None) -> dict[str, Any]:
    train_task(Made(module or Line(), on or data()), spec, folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Examples of each batch that is trained."""
    found: list[int] = []

    def count(self: Line, batch: Any, batch_idx: int) -> None:
        found.extend(
            len(one[0]) for one in (batch.values() if isinstance(batch, dict) else [batch])
        )

    monkeypatch.setattr(Line, "on_train_batch_start", count)
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
    tmp_path: Path, sizes: list[int]
) -> None:
    """64 examples make 2 steps of 24: a third of 16 is left out."""
    spec = {**task(16, most=4), "batch_size": 24, "device_batch_size": 12, "accumulation": 2}
    spec |= {"batches_of_epoch": 4, "most_steps": 10, "most_epochs": 5}

    found = trained(tmp_path, spec)

    assert set(sizes) == {12}
    assert len(sizes) == 2 * found["steps"][-1] == 20
    assert found["ended"] == "out of steps"


def test_data_without_a_loader_are_shuffled_anew_in_each_epoch(tmp_path: Path) -> None:
    seen: list[float] = []

    class Noting(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.extend(batch[1].flatten().tolist())

    numbered = TensorDataset(torch.zeros(64, 1), torch.arange(64.0).unsqueeze(1))
    trained(tmp_path, {**task(epochs=2), "most_steps": 16}, Noting(), (numbered, ONES))

    epochs = [seen[:64], seen[64:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 2
    assert epochs[0] != epochs[1] != sorted(seen[64:]) != epochs[0]


def test_a_training_that_cannot_win_stops_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("7")

    found = trained(tmp_path, task())

    assert (found["ended"], found["steps"][-1]) == ("stopped early", 7)


def test_a_training_without_a_finite_loss_has_diverged(tmp_path: Path) -> None:
    found = trained(tmp_path, task(), Line(bad=3))
    lost = trained(tmp_path, task(goal="accuracy>=1"), Accurate(bad=3))

    assert (found["ended"], found["values"][-1]) == ("diverged", None)
    assert (lost["ended"], lost["values"][-1]) == ("diverged", 0.5)


class Accurate(Line):
    """With a metric that does not show that the loss is no number."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", 0.5)


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
    assert own == Own(64.0, size, 0.03, momentum=0.0, weight_decay=0.0)
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
    tmp_path: Path, loader: Any, sizes: list[int]
) -> None:
    """Of 64 examples 50 are taken: 3 steps of 2 micro-batches of 8, and no fourth of one."""
    own = described(on=(loader, data()[1]))
    sizes.clear()
    job = SweepJob(CPU, own, Goal.read("val_loss<=1e-9"), (8, 16), SEARCH, 5, 8)
    spec = job.task(16, {"learning_rate": 0.001}, 0).spec
    found = trained(tmp_path, spec, on=(loader, data()[1]))

    assert (own.examples, own.batch_size) == (50, 4)
    assert sum(sizes) == 16 * found["steps"][-1]
    assert found["steps"][-1] == spec["most_steps"]


class Several(Line):
    """Of a dict of batches, one counts."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["some"], batch_idx)


def test_combined_loaders_have_batches_of_the_size_that_is_swept(
    tmp_path: Path, sizes: list[int]
) -> None:
    on = Loads(CombinedLoader({"some": data()[0], "other": data(4)[0]}, "min_size"))

    trained(tmp_path, task(16), Several(), on)

    assert set(sizes) == {16}


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
    spec = task(64, own=Own(math.inf, 8, 0.01))
    on = DataLoader(Stream(), batch_size=8), data()[1]

    with refused("batch_sizes", requirement="at most the number of examples"):
        trained(tmp_path, spec, on=on)


class Sets(Line):
    """Sets the learning rate itself, within a step or before it."""

    def __init__(self, within: bool = True) -> None:
        super().__init__()
        self.within = within

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.within:
            self.trainer.optimizers[0].param_groups[0]["lr"] = self.lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.within:
            self.trainer.optimizers[0].param_groups[0]["lr"] = self.lr
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("within", [True, False])
def test_a_module_that_sets_the_learning_rate_itself_is_searched_too(
    within: bool, tmp_path: Path
) -> None:
    found = trained(tmp_path, task(rate=0.05), Sets(within))

    assert found["values"] == trained(tmp_path, task(rate=0.05))["values"]


class OfBatch(Line):
    """With a batch size among its hyperparameters."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Over a tenth of all steps."""
    warm = int(0.1 * steps)
    return LambdaLR(optimizer, lambda step: min(1, step / warm))


def test_the_first_step_describes_modules_with_a_batch_size_or_a_warm_up_of_their_own() -> None:
    assert described(OfBatch(8)).fixed_batch_size == 8
    assert described().fixed_batch_size is None
    assert described(Line(0.03, schedule=warm_up)).learning_rate == 0.03


class Patient(Line):
    """Says which learning rate it has at the end."""

    rate: float

    def on_train_end(self) -> None:
        Patient.rate = self.trainer.optimizers[0].param_groups[0]["lr"]


def test_a_plateau_of_a_metric_is_not_one_of_validations_that_were_left_out(tmp_path: Path) -> None:
    """The loss falls in each epoch. From step 160 on, several epochs pass between two looks."""
    module = Patient(schedule=lambda optimizer, _: ReduceLROnPlateau(optimizer, patience=1))
    module.by = "epoch"

    found = trained(tmp_path, task(16, 0.0002, epochs=60, goal="val_loss<=0.1"), module)

    assert found["steps"][-1] > 300
    assert Patient.rate == 0.01


class Stops(Line):
    """Stops by itself in a step at which no look is due."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 105:
            time.sleep(0.3)
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def test_a_training_that_stops_itself_keeps_its_time(tmp_path: Path) -> None:
    found = trained(tmp_path, task(rate=0.001, goal="val_loss<=1e-9"), Stops())

    assert found["steps"][-1] == 106
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][-1] - found["seconds"][-2] >= 0.3


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "OneCycleLR": lambda optimizer, steps: OneCycleLR(optimizer, 0.1, steps),
    "CosineAnnealingLR": CosineAnnealingLR,
    # As its get_linear_schedule_with_warmup.
    "transformers": lambda optimizer, steps: LambdaLR(
        optimizer, partial(falling, num_training_steps=steps)
    ),
    "own": lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / steps),
    "1000": lambda optimizer, steps: CosineAnnealingLR(optimizer, 1000),
    "by epochs": CosineAnnealingLR,
    "StepLR": StepLR,
}
FITTING = "OneCycleLR", "CosineAnnealingLR", "transformers"


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_are_named_and_one_of_the_trainings_length_is_known(kind: str) -> None:
    by = "epoch" if kind == "by epochs" else "step"

    own = described(Line(schedule=SCHEDULES[kind], by=by))

    names = {"transformers": "LambdaLR", "own": "LambdaLR"}
    other = "CosineAnnealingLR" if kind in ("1000", "by epochs") else kind
    assert own.schedules == (names.get(kind, other),)
    assert own.schedules_fit == (kind in FITTING)


def falling(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


class Both(Line):
    """Logs a loss in training and in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("loss", 7.0)


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
    own = described(Both(), goal=goal)

    assert (own.of_a_batch, own.met) == (of_a_batch, met)


def manual() -> Line:
    module = Line()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("given", "argument", "got"),
    [
        ({"goal": "val_los<=1"}, "goal", "val_los"),
        (
            {"module": Line(logs=True), "on": ONES, "goal": "mean_loss<=1"},
            "goal",
            "'mean_loss', which",
        ),
        (
            {"module": Line(optimizer=torch.optim.Adagrad), "search": ["momentum"]},
            "search",
            "momentum",
        ),
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
