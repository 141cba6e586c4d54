# SPDX-License-Identifier: Apache-2.0
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale import History, NoiseScaleMonitor
from noisescale.lightning.branching.branching import plan_branches, train_branches
from noisescale.lightning.branching.checkpoints import Checkpoint
from noisescale.prediction.branches import BranchedRun

STEPS, BATCH_SIZE = 80, 8


class Regression(lightning.pytorch.LightningModule):
    """Linear, with noise in the targets; by the optimizer that is asked for."""

    def __init__(self, make: Callable[..., Any] = torch.optim.AdamW, features: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(features, 1)
        self.make = make
        self.seen: list[tuple[float, Any, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        if self.net.training:
            (group, *_) = self.trainer.optimizers[0].param_groups
            self.seen.append((group["lr"], group.get("betas"), len(x)))
            seen.append(self.seen[-1])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=0.02)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


seen: list[tuple[float, Any, int]] = []
"""Of the copies that are trained: learning rate, betas and examples of each pass."""


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 16, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(2000, 1, generator=generator)
    return TensorDataset(x, y)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[History, Path]:
    folder = tmp_path_factory.mktemp("run")
    monitor = NoiseScaleMonitor(small_batch="example")
    saved = ModelCheckpoint(folder, every_n_train_steps=20, save_top_k=-1)
    torch.manual_seed(1)
    lightning.pytorch.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[monitor, saved],
        log_every_n_steps=5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Regression(), DataLoader(examples(), batch_size=BATCH_SIZE, shuffle=True))
    return monitor.history, folder


def test_the_middle_of_the_run_to_its_end_is_branched(run: tuple[History, Path]) -> None:
    branching = plan_branches(*run, batch_sizes=["4x", 96])

    assert (branching.checkpoint.step, branching.end) == (40, 80)
    assert [path.name for path in branching.course] == [
        "epoch=0-step=60.ckpt",
        "epoch=0-step=80.ckpt",
    ]
    plans = [(plan.device_batch_size, plan.accumulation) for plan in branching.plans]
    assert plans == [(8, 4), (8, 12)]  # no device was seen to take more
    assert branching.rule == "sqrt"


def test_branches_go_on_from_the_checkpoint_to_the_loss_of_the_run(
    run: tuple[History, Path], tmp_path: Path
) -> None:
    history, folder = run
    branching = plan_branches(history, folder, batch_sizes=["1x", "4x"], max_device_batch_size=64)
    module = Regression()
    before = copy.deepcopy(module.state_dict())
    rng = torch.get_rng_state()
    seen.clear()

    branched = train_branches(
        branching, module, examples(), tmp_path / "b.json", loss_examples=500, accelerator="cpu"
    )

    # As brute force has the losses of the checkpoints, over the same examples.
    held = torch.arange(500).mul(1999).div(499).round().long()
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


def test_what_is_in_the_file_is_not_trained_again(
    run: tuple[History, Path], tmp_path: Path
) -> None:
    file = tmp_path / "b.json"
    trained: list[Any] = []

    def train(**changed: Any) -> BranchedRun:
        branching = plan_branches(*run, **{"batch_sizes": ["4x"], "orders": 1, **changed})
        return train_branches(
            branching,
            *(Regression(), examples(), file),
            loss_examples=200,
            on_branch=trained.append,
            accelerator="cpu",
        )

    first = train()
    again = train(orders=2)

    assert again.branches[0] == first.branches[0]
    assert [branch.order for branch in trained] == [0, 1]
    with pytest.raises(ValueError, match="`output` must be of the same branches, got"):
        train(rule="linear")


def test_a_branch_that_diverges_is_tried_at_lower_learning_rates(
    run: tuple[History, Path], tmp_path: Path
) -> None:
    """At 100 times the learning rate of the run Adam's steps are 1.5 in each weight."""
    branching = plan_branches(
        *run, batch_sizes=["100x"], orders=1, rule="linear", max_device_batch_size=800
    )

    branched = train_branches(
        branching,
        *(Regression(), examples(), tmp_path / "b.json"),
        loss_examples=200,
        accelerator="cpu",
    )

    (branch,) = branched.branches
    assert branch.learning_rate_factor < 100


def test_modules_of_both_packages_are_branched(run: tuple[History, Path], tmp_path: Path) -> None:
    class Other(pytorch_lightning.LightningModule):
        __init__ = Regression.__init__
        training_step = Regression.training_step
        configure_optimizers = Regression.configure_optimizers

    branching = plan_branches(*run, batch_sizes=["4x"], orders=1)

    other = Other.__new__(Other)
    pytorch_lightning.LightningModule.__init__(other)
    torch.manual_seed(0)
    other.net, other.make, other.seen = nn.Linear(16, 1), torch.optim.AdamW, []
    branched = train_branches(
        branching, other, examples(), tmp_path / "b.json", loss_examples=200, accelerator="cpu"
    )

    assert len(branched.branches) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_sizes": ["0x"]}, "`batch_sizes` must be numbers of examples, or times"),
        ({"batch_sizes": ["many"]}, "`batch_sizes` must be numbers of examples, or times"),
        ({"batch_sizes": ["1x"]}, "`batch_sizes` must have another than the run's own, 8"),
        ({"rule": "cubic"}, "`rule` must be one of auto, linear"),
        ({"orders": 0}, "`orders` must be at least 1, got 0"),
        ({"until": "epoch=0-step=20.ckpt"}, "`until` must be later than `checkpoint`"),
        ({"checkpoint": "epoch=0-step=80.ckpt"}, "`until` must be a later checkpoint"),
        ({"checkpoint": "none.ckpt"}, "`checkpoint` must be a file, got"),
        ({"checkpoint": "no.ckpt"}, "`checkpoint` must be a checkpoint of Lightning, got"),
        ({"checkpoint": "weights.ckpt"}, "`checkpoint` must hold the optimizer's state, got"),
        ({"checkpoint": "empty"}, "`checkpoint` must be a checkpoint within the run, or a folder"),
    ],
)
def test_what_cannot_be_branched_is_refused_before_anything_is_trained(
    run: tuple[History, Path], tmp_path: Path, changed: dict[str, Any], message: str
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

    with pytest.raises((ValueError, OSError), match=message):
        plan_branches(history, **given)


def test_checkpoints_of_another_module_are_refused(
    run: tuple[History, Path], tmp_path: Path
) -> None:
    branching = plan_branches(*run)

    with pytest.raises(ValueError, match="`checkpoint` must be of this module, got"):
        train_branches(
            branching, Regression(features=8), examples(), tmp_path / "b.json", accelerator="cpu"
        )
    assert not (tmp_path / "b.json").exists()


def test_another_optimizer_than_the_checkpoints_is_refused(
    run: tuple[History, Path], tmp_path: Path
) -> None:
    module = Regression(torch.optim.SGD)

    with pytest.raises(ValueError, match="`checkpoint` must be of this module's optimizer, got"):
        train_branches(
            plan_branches(*run), module, examples(), tmp_path / "b.json", accelerator="cpu"
        )


def test_manual_optimization_is_refused(run: tuple[History, Path], tmp_path: Path) -> None:
    module = Regression()
    module.automatic_optimization = False

    with pytest.raises(ValueError, match="must be trained by automatic optimization"):
        train_branches(plan_branches(*run), module, examples(), tmp_path / "b.json")
