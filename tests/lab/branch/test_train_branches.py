# SPDX-License-Identifier: Apache-2.0
import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
from lab.branch.regression import BATCH_SIZE, Regression, examples, seen, train
from refused import refused
from tiers import slow_but
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from noisescale import History
from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.lab.branch.planning import BranchOptions, plan_branches
from noisescale.lab.branch.train_branches import train_branches
from noisescale.lightning.checkpoints import Checkpoint
from noisescale.prediction.branches import BranchedRun

Run = tuple[History, Path]
Train = Callable[..., BranchedRun]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    return train(folder), folder / "saved"


@pytest.fixture
def trained(run: Run, tmp_path: Path) -> Train:
    """Train branches of the run; at 4 times its batch size in one order, unless asked else.

    Learning rates are not searched for: it takes four branches in place of one.
    """

    def trained(
        module: Any = None,
        data: Any = None,
        options: dict[str, Any] | None = None,
        *,
        loss_examples: int | None = 64,
        **plan: Any,
    ) -> BranchedRun:
        usual: dict[str, Any] = {"batch_sizes": ["4x"], "orders": 1, "learning_rate": "none"}
        branching = plan_branches(BranchOptions(*run, **usual | plan))
        return train_branches(
            branching,
            Regression() if module is None else module,
            examples() if data is None else data,
            tmp_path / "b.json",
            loss_examples=loss_examples,
            accelerator="cpu",
            **(options or {}),
        )

    return trained


def test_the_middle_of_the_run_to_its_end_is_branched(run: Run) -> None:
    branching = plan_branches(BranchOptions(*run, ["4x", 96]))

    assert (branching.checkpoint.step, branching.end) == (40, 80)
    names = [path.name for path in branching.course]
    assert names == ["epoch=0-step=60.ckpt", "epoch=0-step=80.ckpt"]
    plans = [(plan.device_batch_size, plan.accumulation) for plan in branching.plans]
    assert plans == [(8, 4), (8, 12)]  # no device was seen to take more
    assert branching.rule == "sqrt"
    assert [plan.batch_size for plan in plan_branches(BranchOptions(*run)).plans] == [8, 32, 128]
    # Learning rates that are nearly one are not searched.
    assert branching.factors(8.05) == [pytest.approx(1.0, abs=0.01)]
    assert branching.factors(32) == [2.0, pytest.approx(2**0.5), pytest.approx(2**0.25), 1.0]


def test_expected_steps_go_by_the_learning_rate_of_the_part_that_is_branched(run: Run) -> None:
    """Under Adam B_crit is expected at 1.6 x the noise scale, and at 1 x where the rate fell."""
    history, folder = run
    step, found = history["step"], []
    for rate in (np.where(step < 20, 1.0, 0.3), np.linspace(1.0, 0.0, len(step))):
        columns = {**{name: history[name] for name in history}, "learning_rate": rate}
        changed = History.from_columns(columns, optimizer=OptimizerMix(OptimizerKind.ADAM))
        planned = plan_branches(BranchOptions(changed, folder, ["4x"]))
        found.append(replace(planned, by_noise_scale=Bounded(50.0, 40.0, 60.0)))

    early, late = found  # it fell before the checkpoint at step 40, and along the whole run
    for branching, factor in ((early, 1.6), (late, 1.0)):
        critical = factor * 50.0
        expected = branching.steps * (1 + critical / 128) / (1 + critical / BATCH_SIZE)
        assert branching.steps_at(128).value == pytest.approx(expected)


def test_branches_go_on_from_the_checkpoint_to_the_loss_of_the_run(
    run: Run, tmp_path: Path
) -> None:
    history, folder = run
    asked = BranchOptions(history, folder, ["1x", "4x"], max_device_batch_size=64)
    branching = plan_branches(asked)
    module = Regression()
    before = copy.deepcopy(module.state_dict())
    rng = torch.get_rng_state()
    seen.clear()

    branched = train_branches(
        branching, module, examples(), tmp_path / "b.json", loss_examples=200, accelerator="cpu"
    )

    # As brute force has the losses of the checkpoints, over the same examples.
    held = torch.arange(200).mul(1999).div(199).round().long()
    for (step, loss), path in zip(branched.course, (40, 60, 80), strict=True):
        module.load_state_dict(Checkpoint.read(folder / f"epoch=0-step={path}.ckpt").weights)
        x, y = (tensor[held] for tensor in examples().tensors)
        assert step == path
        assert loss == pytest.approx((module.net(x) - y).square().mean().item(), rel=0.02)
    module.load_state_dict(before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [(b.batch_size, b.order) for b in branched.branches] == [
        (size, order) for order in range(3) for size in (8.0, 32.0)
    ]
    for one in branched.branches:
        assert one.losses[0] == pytest.approx(branched.course[0][1])
        steps = one.steps_to(branched.goal)
        assert steps is not None
        assert steps < 1.5 * 40
    assert BranchedRun.from_file(tmp_path / "b.json") == branched
    # Half of the run's schedule is over: 0.75 of the learning rate, times the root of 4.
    larger = [(lr, betas) for lr, betas, size in seen if size == 32]
    lr, betas = larger[0]
    assert lr == pytest.approx(2 * 0.75 * 0.02)
    assert betas == (0.9, pytest.approx(0.999**4))
    assert all(betas == again for _, again in larger)
    assert 2 * 0.5 * 0.02 <= larger[-1][0] < lr  # and it goes on with the run's schedule


def test_what_they_cost_has_the_evaluations_of_the_loss_in_it(run: Run, trained: Train) -> None:
    plan: dict[str, Any] = {"max_device_batch_size": 64, "orders": 3, "learning_rate": "none"}
    passes: list[int] = []

    class Counted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            passes.append(len(batch[0]) if self.net.training else -len(batch[0]))
            return super().training_step(batch, batch_idx)

    trained(Counted(), loss_examples=200, **plan)

    took = sum(size for size in passes if size > 0)
    evaluated = -sum(size for size in passes if size < 0)
    assert evaluated > 4 * took  # small branches
    history = run[0]
    timed = history["seconds_per_step"] > 0
    counts = np.diff(history["step"], prepend=0.0)[timed]
    seconds = np.average(history["seconds_per_step"][timed], weights=counts) / BATCH_SIZE
    expected = plan_branches(BranchOptions(*run, ["4x"], **plan)).device_hours(200)
    assert expected.value == pytest.approx(seconds / 3600 * (took + evaluated / 3), rel=0.4)
    assert expected.low < expected.value < expected.high


def test_each_branch_begins_with_the_checkpoints_state(trained: Train) -> None:
    """Loading a state does not copy its tensors: one branch would train those of the next."""
    began: list[float] = []

    class Counted(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if not began or self is not counted[-1]:
                counted.append(self)
                began.append(float(next(iter(self.state.values()))["step"]))
            return super().step(closure)

    counted: list[Any] = []
    trained(Regression(Counted), orders=3)

    assert began[-3:] == [40, 40, 40]  # what came before took losses


def test_the_learning_rate_goes_as_recorded_whatever_the_module_sets(
    run: Run, trained: Train
) -> None:
    """A schedule by epochs, and a warm-up by `global_step` as in Lightning's documentation."""

    class Warm(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-6 * (self.trainer.global_step + 1)
            optimizer.step(closure=closure)

    class Seen(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            stepped.append(self.param_groups[0]["lr"])
            return result

    stepped: list[float] = []
    branching = plan_branches(BranchOptions(*run, ["4x"]))
    assert branching.learning_rate_at(0) == 1
    assert branching.learning_rate_at(1e9) == pytest.approx(0.5 / 0.75, rel=0.02)
    trained(Warm(Seen))

    falling = [lr for lr in stepped if lr > 0.001]  # before, one step took losses
    assert falling[0] == pytest.approx(0.75 * 0.02, rel=1e-3)
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert min(falling) >= 0.5 * 0.02 * 0.98


def test_a_smaller_learning_rate_is_taken_where_it_gets_there_sooner(trained: Train) -> None:
    """At 64 times the learning rate the weights jump about and come down slowly."""
    plan = {
        "batch_sizes": ["64x"],
        "learning_rate": "linear",
        "orders": 2,
        "max_device_batch_size": 512,
    }

    first, second = trained(loss_examples=200, **plan).branches

    tried = {*first.diverged_at, *first.slower_at, first.learning_rate_factor}
    assert len(tried) > 1
    assert tried <= {64.0, 8.0, 64.0**0.25, 1.0}
    assert first.learning_rate_factor < 64
    assert second.learning_rate_factor <= first.learning_rate_factor
    assert second.slower_at == ()


def test_a_clipped_run_has_clipped_branches(trained: Train) -> None:
    norms: list[float] = []

    class Clipped(Regression):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            norms.extend([float(torch.nn.utils.get_total_norm(grads))] if grads else [])

    trained(Clipped(), options={"gradient_clip_val": 0.5})

    assert max(norms) == pytest.approx(0.5, rel=1e-3)


def test_of_averaged_weights_those_that_are_trained_go_on(run: Run, tmp_path: Path) -> None:
    """As Lightning's WeightAveraging writes them."""
    _, folder = run
    saved = torch.load(folder / "epoch=0-step=40.ckpt", weights_only=False)
    averaged = {name: torch.zeros_like(value) for name, value in saved["state_dict"].items()}
    torch.save(
        {**saved, "state_dict": averaged, "current_model_state": saved["state_dict"]},
        tmp_path / "averaged.ckpt",
    )

    read = Checkpoint.read(tmp_path / "averaged.ckpt")

    assert torch.equal(read.weights["net.weight"], saved["state_dict"]["net.weight"])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(examples())


def weighted() -> DataLoader[Any]:
    """The first half of the examples alone."""
    weights = [1.0] * 1000 + [0.0] * 1000
    sampler = WeightedRandomSampler(weights, 2000)
    return DataLoader(examples(), batch_size=8, sampler=sampler)


def in_buckets() -> DataLoader[Any]:
    """Batches of the first 1,000 examples, by a sampler of one's own."""

    class Buckets(Sampler[list[int]]):
        def __iter__(self) -> Any:
            for start in torch.randperm(125).tolist():
                yield list(range(8 * start, 8 * start + 8))

    return DataLoader(examples(), batch_sampler=Buckets())


@pytest.mark.parametrize("data", slow_but([Stream, weighted, in_buckets], Stream, weighted))
def test_examples_come_as_the_data_have_them(trained: Train, data: Callable[[], Any]) -> None:
    seen_examples: list[Tensor] = []

    class Seeing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen_examples.append(batch[0])
            return super().training_step(batch, batch_idx)

    branched = trained(Seeing(), data(), loss_examples=100, orders=2)

    assert branched.branches[0].losses != branched.branches[1].losses  # in another order
    assert branched.branches[0].steps_to(branched.goal) is not None
    assert branched.of_a_stream == (data is Stream)
    if data is not Stream:
        others = examples().tensors[0][1000:, 0]
        assert not torch.isin(torch.cat(seen_examples)[:, 0], others).any()


class Short(IterableDataset[Any]):
    """A stream that ends within two and a half batches, and has to begin anew."""

    def __iter__(self) -> Any:
        return itertools.islice(iter(examples()), 80)


class Asking(lightning.pytorch.LightningDataModule):
    """Asks for its trainer."""

    def setup(self, stage: str) -> None:
        self.ranks = self.trainer.world_size  # type: ignore[union-attr]

    def train_dataloader(self) -> Any:
        return DataLoader(examples(), batch_size=8)


class Lower(Regression):
    """Its loss is below zero, and has not diverged."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) - 50


class Penalty(Regression):
    """With a gradient penalty, and batches that are left out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        x, y = batch
        if batch_idx % 5 == 4:
            return None
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (self.net(x) - y).square().mean() + 0.01 * slope.square().sum(1).mean()


def of_the_other_package() -> Any:
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        __init__ = Regression.__init__
        training_step = Regression.training_step
        configure_optimizers = Regression.configure_optimizers

    other = Other.__new__(Other)
    pytorch_lightning.LightningModule.__init__(other)
    torch.manual_seed(0)
    other.net, other.make, other.seen = nn.Linear(16, 1), torch.optim.AdamW, []
    return other


@pytest.mark.parametrize(
    ("module", "data"),
    [
        (Regression, Short),
        (Regression, Asking),
        (Lower, examples),
        (Penalty, examples),
        (of_the_other_package, examples),
    ],
    ids=lambda made: made.__name__,
)
def test_odd_modules_and_data_are_branched(
    trained: Train, module: Callable[[], Any], data: Callable[[], Any]
) -> None:
    given = data()

    branched = trained(module(), given, loss_examples=80, max_device_batch_size=32)

    (branch,) = branched.branches
    assert not branch.diverged
    assert branched.falls
    assert branch.steps[-1] > 5
    assert branched.critical_batch_size().high > 0
    assert getattr(given, "trainer", None) is None


def test_a_run_whose_batch_size_changed_is_refused(run: Run) -> None:
    history, folder = run
    columns = {name: history[name].copy() for name in history}
    columns["batch_size"][columns["step"] > 60] *= 4
    columns["examples"] = np.cumsum(np.diff(columns["step"], prepend=0) * columns["batch_size"])

    with refused("run", requirement="one batch size"):
        plan_branches(BranchOptions(History.from_columns(columns), folder))


def test_a_run_whose_learning_rate_changed_unrecorded_is_refused(run: Run) -> None:
    history, folder = run
    columns = {name: history[name].copy() for name in history}
    columns["learning_rate"][:] = np.nan

    with refused("run", requirement="recorded its learning rate"):
        plan_branches(BranchOptions(History.from_columns(columns), folder))


def test_what_is_in_the_file_is_not_trained_again(trained: Train) -> None:
    said: list[str] = []

    first = trained(options={"progress": said.append})
    again = trained(options={"progress": said.append}, orders=2)

    assert again.branches[0] == first.branches[0]
    branches = [line for line in said if line.startswith("Branch ")]
    assert [line.partition(": loss")[0] for line in branches] == [
        "Branch 1 of 1: batch size 32, order 1",
        "Branch 2 of 2: batch size 32, order 2",
    ]
    with refused("output"):
        trained(learning_rate="linear")


def test_a_branch_that_diverges_is_tried_at_lower_learning_rates(trained: Train) -> None:
    """At 100 times the learning rate of the run Adam's steps are 1.5 in each weight."""
    plan = {"batch_sizes": ["100x"], "learning_rate": "linear", "max_device_batch_size": 800}

    (branch,) = trained(loss_examples=200, **plan).branches

    assert branch.learning_rate_factor < 100


@pytest.mark.parametrize(
    ("changed", "argument", "requirement"),
    [
        ({"batch_sizes": ["0x"]}, "batch_sizes", "numbers"),
        ({"batch_sizes": ["many"]}, "batch_sizes", "numbers"),
        ({"batch_sizes": ["1x"]}, "batch_sizes", "differs from the run's own, 8"),
        ({"learning_rate": "cubic"}, "learning_rate", "one of"),
        ({"orders": 0}, "orders", "positive"),
        ({"until": "epoch=0-step=20.ckpt"}, "until", "after `checkpoint`"),
        ({"checkpoint": "epoch=0-step=80.ckpt"}, "until", "later"),
        ({"checkpoint": "none.ckpt"}, "checkpoint", "a file"),
        ({"checkpoint": "no.ckpt"}, "checkpoint", "of Lightning"),
        ({"checkpoint": "weights.ckpt"}, "checkpoint", "the optimizer's state"),
        ({"checkpoint": "empty"}, "checkpoint", "within the run"),
    ],
)
def test_what_cannot_be_branched_is_refused_before_anything_is_trained(
    run: Run, tmp_path: Path, changed: dict[str, Any], argument: str, requirement: str
) -> None:
    history, saved = run
    for path in saved.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "no.ckpt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    whole = torch.load(saved / "epoch=0-step=40.ckpt", weights_only=False)
    torch.save({**whole, "optimizer_states": []}, tmp_path / "weights.ckpt")
    given = {"checkpoint": "epoch=0-step=40.ckpt", **changed}
    for name in ("checkpoint", "until"):
        if name in given:
            given[name] = tmp_path / given[name]

    with refused(argument, requirement=requirement):
        plan_branches(BranchOptions(history, **given))


def manual() -> Regression:
    module = Regression()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("module", "loaded", "argument", "requirement"),
    [
        (Regression, lambda: DataLoader(examples(), batch_size=None), "batch_size", "a number"),
        (lambda: Regression(features=8), examples, "checkpoint", "of this module"),
        (lambda: Regression(torch.optim.SGD), examples, "checkpoint", "module's optimizer"),
        (manual, examples, "module", "automatic optimization"),
    ],
    ids=["batches made already", "another module", "another optimizer", "manual optimization"],
)
def test_what_cannot_be_trained_is_refused(
    trained: Train,
    tmp_path: Path,
    module: Callable[[], Any],
    loaded: Callable[[], Any],
    argument: str,
    requirement: str,
) -> None:
    with refused(argument, requirement=requirement):
        trained(module(), loaded())
    if (file := tmp_path / "b.json").exists():
        assert BranchedRun.from_file(file).branches == ()
