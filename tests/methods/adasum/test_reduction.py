# SPDX-License-Identifier: Apache-2.0
"""Lightning fits by Adasum: the weights, what is logged and measured, and resuming."""

import copy
import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
import torch
from fits import FEATURES, classifier, data, fit, loader, loss_of, network, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from ranks import as_torchrun, on_ranks
from resumable import Resumable
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from noisescale import (
    AdasumOptimizer,
    AdasumReduction,
    BatchSizeScheduler,
    NoiseScaleMonitor,
    adasum,
)
from noisescale.guard import Guard
from noisescale.history.optimizers import OptimizerKind
from noisescale.lightning.trainer_access import MisconfigurationException
from noisescale.methods.across_ranks.mean_states import _moments, mean_of_states_
from noisescale.methods.across_ranks.rank_states import states_of_former_ranks


def weights(fitting: Any, module: Any) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def with_adam(net: nn.Module | None = None, lr: float = 0.01) -> Any:
    made = classifier(net=net)

    class WithAdam(type(made)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=lr)

    return WithAdam()


def by_hand(ranks: int, steps: int, lr: float = 0.1) -> list[Tensor]:
    """The weights after steps of SGD on the reference tree's combination of gradients."""
    net = network()
    samplers = [DistributedSampler(data(), ranks, rank) for rank in range(ranks)]
    batches = [iter(DataLoader(data(), batch_size=8, sampler=sampler)) for sampler in samplers]
    for _ in range(steps):
        gradients = []
        for of_rank in batches:
            net.zero_grad()
            loss_of(net, next(of_rank)).backward()
            gradients.append([p.grad.clone() for p in net.parameters()])
        with torch.no_grad():
            for p, *same in zip(net.parameters(), *gradients, strict=True):
                p -= lr * adasum(same)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("package", [L, pytorch_lightning])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_combined_by_adasum_and_not_by_the_mean(package: Any, ranks: int) -> None:
    found = fit(AdasumReduction(), ranks=ranks, package=package, results=weights, max_steps=4)

    for got in found:
        assert all(map(torch.equal, got, found[0]))
        for p, wanted in zip(got, by_hand(ranks, 4), strict=True):
            torch.testing.assert_close(p, wanted, rtol=1e-4, atol=1e-6)


def test_one_process_trains_as_without_it() -> None:
    plain, own = (
        fit(*callbacks, ranks=1, strategy="auto", results=weights)[0]
        for callbacks in ([], [AdasumReduction()])
    )

    assert all(map(torch.equal, plain, own))


def test_the_mean_within_a_node_is_combined_across_nodes() -> None:
    found = fit(AdasumReduction(ranks_per_node=2), ranks=4, results=weights, max_steps=1)

    net = network()
    gradients = []
    for rank in range(4):
        sampler = DistributedSampler(data(), 4, rank)
        net.zero_grad()
        loss_of(net, next(iter(DataLoader(data(), batch_size=8, sampler=sampler)))).backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    for got in found:
        for p, before, a, b, c, d in zip(got, network().parameters(), *gradients, strict=True):
            wanted = before.detach() - 0.1 * adasum([(a + b) / 2, (c + d) / 2])
            torch.testing.assert_close(p, wanted)


@pytest.mark.parametrize("first", ["monitor", "adasum"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_noise_scale_is_the_same_as_under_averaging(first: str, accumulation: int) -> None:
    def noise_scale(*callbacks: Any) -> Any:
        def results(fitting: Any, module: Any) -> Any:
            (monitor,) = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
            return monitor.noise_scale, monitor.history.optimizer.kind

        return fit(
            *callbacks,
            model=classifier(lr=0.0),  # standing still, so that both see the same gradients
            results=results,
            accumulate_grad_batches=accumulation,
            train_loader=loader(4),
        )

    both = [NoiseScaleMonitor(every_n_steps=1), AdasumReduction()]
    averaged, here = (
        noise_scale(both[0]),
        noise_scale(*(both if first == "monitor" else both[::-1])),
    )

    for (one, by_sgd), (other, not_averaged) in zip(averaged, here, strict=True):
        # What the theory says of B_crit was tried on averaged gradients alone.
        assert (by_sgd, not_averaged) == (OptimizerKind.SGD, OptimizerKind.OTHER)
        assert other.steps == one.steps > 5
        for name in ("value", "low", "high", "grad_sq_norm", "noise_trace"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-4)


def test_the_monitor_leaves_the_weights_bit_by_bit() -> None:
    plain, measured = (
        fit(*callbacks, AdasumReduction(), model=with_adam(), results=weights)[0]
        for callbacks in ([], [NoiseScaleMonitor(every_n_steps=1)])
    )

    assert all(map(torch.equal, plain, measured))


def rows(folder: Path, key: str) -> dict[int, float]:
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[key]) for row in csv.DictReader(file) if row[key]}


@pytest.mark.parametrize(("local_steps", "steps"), [(1, [1, 3, 5]), (3, [5])])
def test_the_statistics_of_a_reduction_are_logged(
    local_steps: int, steps: list[int], tmp_path: Path
) -> None:
    def results(fitting: Any, module: Any) -> Any:
        statistics = fitting.optimizers[0].statistics
        return [each.tolist() for each in statistics], dict(fitting.callback_metrics)

    statistics, metrics = fit(
        AdasumReduction(local_steps),
        results=results,
        max_steps=6,
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=2,
    )[0]

    coefficient, cosine, orthogonality = statistics
    assert list(rows(tmp_path, "adasum/cosine")) == steps
    assert rows(tmp_path, "adasum/coefficient")[5] == pytest.approx(sum(coefficient) / 4)
    assert metrics["adasum/cosine"].item() == pytest.approx(sum(cosine) / 4)
    layers = rows(tmp_path, "adasum/orthogonality/net.0")[5], metrics["adasum/orthogonality/net.2"]
    assert layers[0] == pytest.approx(sum(orthogonality[:2]) / 2)
    assert layers[1].item() == pytest.approx(sum(orthogonality[2:]) / 2)
    assert 0.5 <= metrics["adasum/orthogonality"] <= 1.5


def test_layers_are_left_out_if_not_wanted() -> None:
    names = fit(
        AdasumReduction(log_layers=False),
        results=lambda fitting, _: [k for k in fitting.callback_metrics if k.startswith("adasum")],
        log_every_n_steps=1,
        max_steps=1,
    )[0]

    assert sorted(names) == ["adasum/coefficient", "adasum/cosine", "adasum/orthogonality"]


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
    assert all(map(torch.equal, first, second))


def test_manual_optimization_is_not_averaged_either() -> None:
    made = classifier()

    class Manual(type(made)):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            optimizer.step()

    found = fit(AdasumReduction(), model=Manual(), results=weights, max_steps=4)

    for got in found:
        for p, wanted in zip(got, by_hand(2, 4), strict=True):
            torch.testing.assert_close(p, wanted, rtol=1e-4, atol=1e-6)


def test_a_static_graph_is_refused() -> None:
    strategy = DDPStrategy(start_method="fork", static_graph=True)

    with pytest.raises(
        Exception, match="`static_graph` must be one that AdasumReduction works under, got True"
    ):
        fit(AdasumReduction(), strategy=strategy)


class InfiniteOnRank1(L.Callback):
    """One step in which the loss of rank 1 is infinite."""

    def on_before_backward(self, fitting: Any, module: Any, loss: Tensor) -> None:
        if fitting.global_step == 2 and fitting.global_rank == 1 and not hasattr(self, "done"):
            self.done = True
            loss.register_hook(lambda gradient: gradient * torch.inf)


def test_under_16_mixed_all_ranks_leave_a_step_out_and_gradients_can_be_clipped() -> None:
    def results(fitting: Any, module: Any) -> Any:
        (monitor,) = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
        scaler = fitting.strategy.precision_plugin.scaler
        return weights(fitting, module), scaler.get_scale(), monitor.noise_scale.steps

    (first, *of_first), (second, *of_second) = fit(
        AdasumReduction(),
        InfiniteOnRank1(),
        NoiseScaleMonitor(every_n_steps=1),
        results=results,
        max_steps=6,
        gradient_clip_val=0.5,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))],
    )

    assert all(map(torch.equal, first, second))
    assert of_first == of_second
    assert of_first == [128.0, pytest.approx(4)]  # of 5, the first sets the level
    assert all(p.isfinite().all() for p in first)


def resumed(folder: Path, *, local_steps: int = 1, ranks: int = 2, to_ranks: int = 2) -> list[Any]:
    """Weights after 20 steps: in one go, and broken off after 8."""

    def run(steps: int, ranks: int, ckpt_path: Any = None) -> list[list[Tensor]]:
        checkpoint = ModelCheckpoint(folder, filename="at", every_n_train_steps=8, save_top_k=-1)
        return fit(
            AdasumReduction(local_steps),
            *([checkpoint] if steps == 8 else []),
            ranks=ranks,
            model=with_adam(),
            train_loader=Resumable(),
            results=weights,
            max_steps=steps,
            max_epochs=-1,
            enable_checkpointing=steps == 8,
            ckpt_path=ckpt_path,
            use_distributed_sampler=False,
        )

    whole = run(20, ranks)
    run(8, ranks)
    return [whole, lambda: run(20, to_ranks, folder / "at.ckpt")]


@pytest.mark.parametrize("local_steps", [1, 3])
def test_resuming_is_exact(local_steps: int, tmp_path: Path) -> None:
    whole, resume = resumed(tmp_path, local_steps=local_steps)

    assert (tmp_path / "at.ckpt.ranks" / "1-of-2.pt").exists()
    for one, other in zip(whole, resume(), strict=True):
        assert all(map(torch.equal, one, other))


def test_without_the_files_of_ranks_a_warning_says_so_and_ranks_go_on(tmp_path: Path) -> None:
    whole, resume = resumed(tmp_path)
    (tmp_path / "at.ckpt.ranks" / "1-of-2.pt").unlink()

    with pytest.raises(Exception, match="moments of each rank are not all there: 2 ranks saved"):
        resume()  # warnings are errors here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = resume()

    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], whole[0][0])


@pytest.mark.filterwarnings("ignore:The optimizer's moments of each rank")
@pytest.mark.parametrize(("ranks", "to_ranks"), [(2, 3), (3, 2), (2, 1)])
def test_other_ranks_go_on_from_the_mean_of_the_moments(
    ranks: int, to_ranks: int, tmp_path: Path
) -> None:
    def moments(fitting: Any, module: Any) -> Any:
        return copy.deepcopy(fitting.optimizers[0].state_dict()["state"])

    options: dict[str, Any] = {
        "model": with_adam(),
        "max_epochs": -1,
        "train_loader": loader(4),
        "results": moments,
    }
    checkpoint = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=3)
    saved = fit(
        AdasumReduction(),
        checkpoint,
        ranks=ranks,
        max_steps=3,
        enable_checkpointing=True,
        **options,
    )
    seen: list[Any] = []

    class AtStart(L.Callback):
        def on_train_start(self, fitting: Any, module: Any) -> None:
            seen.append(moments(fitting, module))

    found = fit(
        AdasumReduction(),
        AtStart(),
        ranks=to_ranks,
        max_steps=4,
        ckpt_path=tmp_path / "at.ckpt",
        strategy="ddp_fork" if to_ranks > 1 else "auto",
        **(options | {"results": lambda *_: seen[0]}),
    )

    for state in found:
        for index, of_parameter in state.items():
            assert of_parameter["step"] == 3
            for name in ("exp_avg", "exp_avg_sq"):
                mean = torch.stack([each[index][name] for each in saved]).mean(0)
                torch.testing.assert_close(of_parameter[name], mean)


def test_files_of_ranks_go_with_their_checkpoint(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, monitor=None)

    fit(AdasumReduction(), checkpoint, max_steps=4, enable_checkpointing=True, results=weights)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch=0-step=4.ckpt",
        "epoch=0-step=4.ckpt.ranks",
    ]


def test_a_name_with_a_metric_of_each_rank_is_that_of_rank_0(tmp_path: Path) -> None:
    made = classifier()

    class Logging(type(made)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("rank", float(self.global_rank + batch_idx))
            return super().training_step(batch, batch_idx)

    checkpoint = ModelCheckpoint(tmp_path, filename="{rank:.0f}", every_n_train_steps=2)

    fit(
        AdasumReduction(),
        checkpoint,
        model=Logging(),
        max_steps=4,
        enable_checkpointing=True,
        results=weights,
    )

    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["rank=3.ckpt", "rank=3.ckpt.ranks", "rank=3.ckpt.ranks/1-of-2.pt"]


def test_a_checkpoint_after_the_fit_has_the_files_of_ranks_too(tmp_path: Path) -> None:
    def one_rank() -> None:
        fitting = trainer(2, callbacks=[AdasumReduction()], strategy="ddp", max_steps=1)
        for name in ("first.ckpt", "second.ckpt"):
            fitting.fit(with_adam(), loader())
            fitting.save_checkpoint(tmp_path / name)

    on_ranks(2, as_torchrun(one_rank))

    assert sorted(path.parent.name for path in tmp_path.rglob("1-of-2.pt")) == [
        "first.ckpt.ranks",
        "second.ckpt.ranks",
    ]


def test_files_of_another_step_do_not_enter_the_mean(tmp_path: Path) -> None:
    class Fitting:
        global_rank, world_size, global_step = 0, 1, 8
        ckpt_path = str(tmp_path / "at.ckpt")

        class strategy:  # noqa: N801
            checkpoint_io = TorchCheckpointIO()

    for rank, step in ((1, 8), (2, 6)):
        path = f"{Fitting.ckpt_path}.ranks/{rank}-of-3.pt"
        Fitting.strategy.checkpoint_io.save_checkpoint({"global_step": step}, path)

    found = states_of_former_ranks(Fitting(), 3, Guard(Warning))  # type: ignore[arg-type]

    assert found == [{"global_step": 8}]


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


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:This rank's state")
def test_a_file_that_cannot_be_written_is_told_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "epoch=0-step=2.ckpt.ranks").write_text("in the way")
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2)

    def results(fitting: Any, module: Any) -> int:
        return fitting.global_step

    steps = fit(
        AdasumReduction(), checkpoint, results=results, max_steps=3, enable_checkpointing=True
    )

    assert steps == [3, 3]
    assert (tmp_path / "epoch=0-step=2.ckpt").exists()


def test_a_second_fit_has_each_rank_write_its_state_once(tmp_path: Path) -> None:
    written: list[int] = []

    class Counted(AdasumReduction):
        def _own_state(self) -> dict[str, Any]:
            written.append(1)
            return super()._own_state()

    class Twice(L.Callback):
        def on_train_start(self, fitting: Any, module: Any) -> None:
            fitting.strategy.optimizers = [each.optimizer for each in fitting.optimizers]
            callback.on_fit_start(fitting, module)
            fitting.save_checkpoint(tmp_path / "at.ckpt")

    callback = Counted()

    assert fit(callback, Twice(), results=lambda *_: len(written), max_steps=2) == [0, 1]


def test_weights_alone_have_no_files_of_ranks(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_weights_only=True)

    fit(AdasumReduction(), checkpoint, max_steps=2, enable_checkpointing=True, results=weights)

    assert [path.suffix for path in tmp_path.iterdir()] == [".ckpt"]


def test_a_monitor_beside_local_steps_is_refused() -> None:
    with pytest.raises(Exception, match="ranks compute gradients at different weights"):
        fit(AdasumReduction(local_steps=2), NoiseScaleMonitor())


def test_a_batch_size_that_follows_the_noise_scale_goes_with_it() -> None:
    seen: list[int] = []

    class Accumulation(L.Callback):
        def on_train_batch_end(self, fitting: Any, *_: Any) -> None:
            seen.append(int(fitting.accumulate_grad_batches))

    def results(fitting: Any, module: Any) -> Any:
        return weights(fitting, module), max(seen)

    policy = lambda estimate, plan, progress: 32.0  # noqa: E731  # from step 0 on
    (first, accumulated), (second, _) = fit(
        BatchSizeScheduler(policy, max_batch_size=32, lr_scaling="linear"),
        AdasumReduction(),
        Accumulation(),
        results=results,
        max_steps=40,
        max_epochs=-1,
    )

    assert all(map(torch.equal, first, second))
    assert accumulated == 2  # 2 x 8 x 2 devices


def test_ranks_that_do_not_make_up_nodes_are_refused() -> None:
    with pytest.raises(
        Exception, match="`ranks_per_node` must divide the number of ranks, 3, got 2"
    ):
        fit(AdasumReduction(ranks_per_node=2), ranks=3)


def test_a_module_that_wraps_its_optimizer_itself_is_told_so() -> None:
    made = classifier()

    class Wrapping(type(made)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return AdasumOptimizer(torch.optim.SGD(self.parameters(), lr=0.1))

    with pytest.raises(ValueError, match="must return plain optimizers"):
        fit(AdasumReduction(), ranks=1, strategy="auto", model=Wrapping())


def test_strategies_without_whole_weights_are_refused() -> None:
    class Strategy:
        model = nn.Linear(1, 1)

    class Fitting:
        world_size = 2
        strategy = Strategy()

    with pytest.raises(MisconfigurationException, match='Use `strategy="ddp"`'):
        AdasumReduction().on_fit_start(Fitting(), classifier())


@pytest.mark.parametrize("argument", ["local_steps", "ranks_per_node"])
def test_wrong_numbers(argument: str) -> None:
    with pytest.raises(ValueError, match=f"`{argument}` must be a positive whole number, got 0"):
        AdasumReduction(**{argument: 0})


def test_a_schedule_moves_the_learning_rate_of_the_inner_optimizer() -> None:
    made = classifier()

    class Scheduled(type(made)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def results(fitting: Any, module: Any) -> float:
        return fitting.optimizers[0].param_groups[0]["lr"]

    assert fit(AdasumReduction(), model=Scheduled(), results=results, max_steps=3) == [0.125] * 2
