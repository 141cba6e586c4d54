# SPDX-License-Identifier: Apache-2.0
"""Lightning fits by Adasum: the weights, what is logged and measured, and the files of ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
import torch
from fits import FEATURES, classifier, fit, loader, loss_of, network, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from methods.across_ranks.fitted import adam, batches_of, module_by, rows, weights
from methods.across_ranks.small_net import equal
from ranks import as_torchrun, on_ranks
from refused import refused
from tiers import slow, slow_after
from torch import Tensor, nn

from noisescale import AdasumOptimizer, AdasumReduction, NoiseScaleMonitor, adasum
from noisescale.guard import Guard
from noisescale.history.optimizers import OptimizerKind
from noisescale.lightning.trainer_access import MisconfigurationException
from noisescale.methods.across_ranks.rank_states import (
    _moments,
    mean_of_states_,
    states_of_former_ranks,
)


def by_hand(ranks: int, steps: int, each: int = 1) -> list[Tensor]:
    """The weights after SGD on the reference's combination of gradients, or of means of `each`."""
    net, batches = network(), batches_of(ranks)
    for _ in range(steps):
        gradients = []
        for of_rank in batches:
            net.zero_grad()
            loss_of(net, next(of_rank)).backward()
            gradients.append([p.grad.clone() for p in net.parameters()])
        with torch.no_grad():
            for p, *same in zip(net.parameters(), *gradients, strict=True):
                p -= 0.1 * adasum(list(torch.stack(same).unflatten(0, (-1, each)).mean(1)))
    return weights(None, net)


def manual_step(module: Any, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss_of(module.net, batch))
    optimizer.step()


@pytest.mark.parametrize(
    ("ranks", "each", "package", "manual"),
    slow_after(
        2,
        [
            (3, 1, L, False),
            (2, 1, L, True),
            (4, 2, L, False),
            (2, 1, pytorch_lightning, False),
        ],
    ),
)
def test_ranks_are_combined_by_adasum_and_not_by_the_mean(
    ranks: int, each: int, package: Any, manual: bool
) -> None:
    members = {"automatic_optimization": False, "training_step": manual_step} if manual else {}
    model = module_by(type(classifier(package)).configure_optimizers, package=package, **members)

    found = fit(
        AdasumReduction(ranks_per_node=each),
        ranks=ranks,
        package=package,
        model=model,
        results=weights,
        max_steps=3,
    )

    for got in found:
        assert equal(got, found[0])
        torch.testing.assert_close(got, by_hand(ranks, 3, each), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("first", "accumulation"), [("monitor", 1), slow("adasum", 2)])
def test_the_noise_scale_is_the_same_as_under_averaging(first: str, accumulation: int) -> None:
    def noise_scale(*callbacks: Any) -> Any:
        return fit(
            *callbacks,
            model=classifier(lr=0.0),  # standing still, so that both see the same gradients
            results=lambda *_: (monitor.noise_scale, monitor.history.optimizer.kind),
            accumulate_grad_batches=accumulation,
            train_loader=loader(4),
        )

    monitor = NoiseScaleMonitor(every_n_steps=1)
    both = [monitor, AdasumReduction()]
    averaged = noise_scale(monitor)
    here = noise_scale(*(both if first == "monitor" else both[::-1]))

    for (one, by_sgd), (other, not_averaged) in zip(averaged, here, strict=True):
        # What the theory says of B_crit was tried on averaged gradients alone.
        assert (by_sgd, not_averaged) == (OptimizerKind.SGD, OptimizerKind.OTHER)
        assert other.steps == one.steps > 5
        for name in ("value", "low", "high", "grad_sq_norm", "noise_trace"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-4)


def test_the_monitor_leaves_the_weights_bit_by_bit() -> None:
    plain, measured = (
        fit(*callbacks, AdasumReduction(), model=module_by(adam), results=weights, max_steps=4)[0]
        for callbacks in ([], [NoiseScaleMonitor(every_n_steps=1)])
    )

    assert equal(plain, measured)


@pytest.mark.parametrize(
    ("local_steps", "log_layers", "steps"),
    slow_after(2, [(1, True, [1, 3, 5]), (3, False, [5]), (3, True, [5])]),
)
def test_the_statistics_of_a_reduction_are_logged(
    local_steps: int, log_layers: bool, steps: list[int], tmp_path: Path
) -> None:
    def results(fitting: Any, module: Any) -> Any:
        statistics = fitting.optimizers[0].statistics
        return [each.tolist() for each in statistics], dict(fitting.callback_metrics)

    (coefficient, cosine, orthogonality), metrics = fit(
        AdasumReduction(local_steps, log_layers=log_layers),
        results=results,
        max_steps=6,
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=2,
    )[0]

    assert list(rows(tmp_path, "adasum/cosine")) == steps
    assert rows(tmp_path, "adasum/coefficient")[5] == pytest.approx(sum(coefficient) / 4)
    wanted = (
        {"": orthogonality}
        if not log_layers
        else {"": orthogonality, "/net.0": orthogonality[:2], "/net.2": orthogonality[2:]}
    )
    found = {"adasum/coefficient": coefficient, "adasum/cosine": cosine} | {
        f"adasum/orthogonality{layer}": of_layer for layer, of_layer in wanted.items()
    }
    assert {name: value.item() for name, value in metrics.items()} == {
        name: pytest.approx(sum(of_all) / len(of_all)) for name, of_all in found.items()
    }
    assert 0.5 <= metrics["adasum/orthogonality"] <= 1.5


def test_forward_passes_begin_with_the_buffers_of_rank_0_as_under_ddp() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    seen: list[Tensor] = []
    net[1].register_forward_pre_hook(lambda *_: seen.append(net[1].running_mean.clone()))

    first, second = fit(
        AdasumReduction(), model=classifier(net=net), results=lambda *_: seen, max_steps=4
    )

    assert len(first) == 4
    assert not torch.equal(first[1], first[3])
    assert equal(first, second)


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:This rank's state")
def test_files_of_ranks_go_with_their_checkpoint(tmp_path: Path) -> None:
    """One is removed, one is named by rank 0, one has no states, of one they cannot be written."""

    def training_step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        module.log("rank", float(module.global_rank + batch_idx))
        return loss_of(module.net, batch)

    def saving(folder: str, every: int, mode: str, **options: Any) -> ModelCheckpoint:
        # Lightning tells callbacks apart by `every` and `mode`.
        return ModelCheckpoint(tmp_path / folder, every_n_train_steps=every, mode=mode, **options)

    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "step=4.ckpt.ranks").write_text("in the way")

    steps = fit(
        AdasumReduction(),
        saving("last", 2, "min", save_top_k=1, filename="{step}"),
        saving("named", 2, "max", filename="{rank:.0f}"),
        saving("light", 4, "min", save_weights_only=True, filename="{step}"),
        saving("blocked", 4, "max", filename="{step}"),
        model=module_by(adam, training_step=training_step),
        max_steps=5,
        enable_checkpointing=True,
        results=lambda fitting, _: fitting.global_step,
    )

    assert steps == [5, 5]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/**/*")) == [
        "blocked/step=4.ckpt",
        "blocked/step=4.ckpt.ranks",
        "last/step=4.ckpt",
        "last/step=4.ckpt.ranks",
        "last/step=4.ckpt.ranks/1-of-2.pt",
        "light/step=4.ckpt",
        "named/rank=3.ckpt",
        "named/rank=3.ckpt.ranks",
        "named/rank=3.ckpt.ranks/1-of-2.pt",
    ]


def test_after_each_fit_a_checkpoint_has_the_files_of_ranks_written_once(tmp_path: Path) -> None:
    def one_rank() -> list[int]:
        written = []

        class Counted(AdasumReduction):
            def _own_state(self) -> dict[str, Any]:
                written.append(fitting.current_epoch)
                return super()._own_state()

        fitting = trainer(2, callbacks=[Counted()], strategy="ddp", max_steps=1)
        for name in ("first.ckpt", "second.ckpt"):
            fitting.fit(module_by(adam), loader())
            fitting.save_checkpoint(tmp_path / name)
        return written

    first, second = on_ranks(2, as_torchrun(one_rank))

    assert (len(first), len(second)) == (0, 2)
    assert sorted(path.parent.name for path in tmp_path.rglob("1-of-2.pt")) == [
        "first.ckpt.ranks",
        "second.ckpt.ranks",
    ]


def test_files_of_another_step_do_not_enter_the_mean(tmp_path: Path) -> None:
    path, files = tmp_path / "at.ckpt", TorchCheckpointIO()
    fitting: Any = SimpleNamespace(global_rank=0, world_size=1, global_step=8, ckpt_path=path)
    fitting.strategy = SimpleNamespace(checkpoint_io=files)
    for rank, step in ((1, 8), (2, 6)):
        files.save_checkpoint({"global_step": step}, f"{path}.ranks/{rank}-of-3.pt")

    assert states_of_former_ranks(fitting, 3, Guard(Warning)) == [{"global_step": 8}]


def test_a_moment_that_only_some_ranks_have_is_no_error() -> None:
    def optimizer(used: int) -> AdasumOptimizer:
        net = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        made = AdasumOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        for p in [*net[0].parameters(), *(net[1].parameters() if used > 1 else [])]:
            p.grad = torch.full_like(p, float(used))
        made.step()
        return made

    base = optimizer(1)

    mean_of_states_(base, [optimizer(2).state_dict()], counts_own=True)

    assert [value.item() for _, _, value in _moments(base)] == [1.5, 1.5]


def test_a_static_graph_ranks_that_do_not_make_up_nodes_and_wrong_numbers_are_refused() -> None:
    """And strategies without whole weights."""
    sharded: Any = SimpleNamespace(world_size=2, strategy=SimpleNamespace(model=nn.Linear(1, 1)))

    with pytest.raises(Exception, match=r"`static_graph` .* AdasumReduction"):
        fit(AdasumReduction(), strategy=DDPStrategy(start_method="fork", static_graph=True))
    with pytest.raises(Exception, match=r"`ranks_per_node` .* 3, got 2"):
        fit(AdasumReduction(ranks_per_node=2), ranks=3)
    with pytest.raises(MisconfigurationException, match='`strategy="ddp"`'):
        AdasumReduction().on_fit_start(sharded, classifier())
    with refused("local_steps", got="0"):
        AdasumReduction(0)
    with refused("ranks_per_node", got="0"):
        AdasumReduction(ranks_per_node=0)
