# SPDX-License-Identifier: Apache-2.0
"""Lightning fits by DecentLaM: the weights, what is validated, saved and logged, and resuming."""

import copy
import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
import torch
from fits import classifier, data, fit, loader, loss_of, network
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from methods.decentlam.oracle_of_decentlam import ring
from resumable import Resumable
from torch import Tensor, _dynamo, nn
from torch.utils.data import DataLoader, DistributedSampler

from noisescale import BatchSizeScheduler, DecentLaM, DecentLaMReduction, NoiseScaleMonitor

_ = _dynamo  # Optimizers import it: here once, and not in each rank.


def weights(fitting: Any, module: Any) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


class Classifier(L.LightningModule):
    """Momentum SGD; keeps the weights that it validates."""

    def __init__(self, lr: float = 0.1, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.net = network()
        self.options = {"lr": lr} | (options or {"momentum": 0.8})
        self.optimizer = optimizer
        self.validated: list[list[Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.validated.append(weights(None, self))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.options)


class WithValidation(Classifier):
    def val_dataloader(self) -> Any:
        return loader()


class OwnWeights(L.Callback):
    """Keeps this rank's weights when training ends, before the mean takes their place."""

    def on_train_end(self, fitting: Any, module: Any) -> None:
        self.weights = weights(fitting, module)


def own_weights(fitting: Any, module: Any) -> list[Tensor]:
    (own,) = [each for each in fitting.callbacks if isinstance(each, OwnWeights)]
    return own.weights


def by_hand(ranks: int, steps: int, lr: float = 0.1, momentum: float = 0.8) -> list[list[Tensor]]:
    """The weights of all ranks on a ring, by the paper's own formulas."""
    nets = [network() for _ in range(ranks)]
    samplers = [DistributedSampler(data(), ranks, rank) for rank in range(ranks)]
    batches = [iter(DataLoader(data(), batch_size=8, sampler=sampler)) for sampler in samplers]
    mixing = torch.tensor(ring(ranks)).float()
    moments = [torch.zeros(ranks, *p.shape) for p in nets[0].parameters()]
    for _ in range(steps):
        for net, of_rank in zip(nets, batches, strict=True):
            net.zero_grad()
            loss_of(net, next(of_rank)).backward()
        with torch.no_grad():
            for m, *same in zip(moments, *(net.parameters() for net in nets), strict=True):
                x = torch.stack([p.detach() for p in same])
                gradients = torch.stack([p.grad for p in same])
                mixed = torch.einsum("ij,j...->i...", mixing, x - lr * gradients)
                m.mul_(momentum).add_((x - mixed) / lr)
                for p, now in zip(same, x - lr * m, strict=True):
                    p.copy_(now)
    return [[p.detach() for p in net.parameters()] for net in nets]


def mean_of(of_ranks: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(same).mean(0) for same in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize("package", [L, pytorch_lightning])
def test_each_rank_trains_on_its_own_and_all_end_with_the_mean(package: Any) -> None:
    class Ends(package.Callback):
        def on_train_end(self, fitting: Any, module: Any) -> None:
            self.own = weights(fitting, module)

    made = classifier(package)

    class Momentum(type(made)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.8)

    def results(fitting: Any, module: Any) -> Any:
        (ends,) = [each for each in fitting.callbacks if isinstance(each, Ends)]
        return ends.own, weights(fitting, module)

    found = fit(
        DecentLaMReduction("ring"),
        Ends(),
        ranks=4,
        package=package,
        model=Momentum(),
        results=results,
        max_steps=3,
    )

    wanted = by_hand(4, 3)
    for (own, last), of_rank in zip(found, wanted, strict=True):
        for p, q in zip(own, of_rank, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
        for p, q in zip(last, mean_of([own for own, _ in found]), strict=True):
            torch.testing.assert_close(p, q)
        assert all(map(torch.equal, last, found[0][1]))
    assert not torch.allclose(found[0][0][0], found[2][0][0], rtol=1e-4)


def test_one_process_trains_as_without_it() -> None:
    plain, own = (
        fit(*callbacks, ranks=1, strategy="auto", model=Classifier(), results=weights)[0]
        for callbacks in ([], [DecentLaMReduction()])
    )

    assert all(map(torch.equal, plain, own))


def test_the_mean_is_validated_and_saved_and_training_goes_on_from_each_ranks_own(
    tmp_path: Path,
) -> None:
    def run(*callbacks: Any, **options: Any) -> Any:
        return fit(
            DecentLaMReduction("ring"),
            OwnWeights(),
            *callbacks,
            ranks=3,
            results=lambda fitting, module: (own_weights(fitting, module), module.validated),
            max_steps=4,
            **options,
        )

    validated = run(
        ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1),
        ModelCheckpoint(tmp_path, filename="light", save_weights_only=True, every_n_train_steps=4),
        model=WithValidation(),
        val_check_interval=2,
        enable_checkpointing=True,
    )
    plain = run(model=Classifier())

    halfway, last = by_hand(3, 2), by_hand(3, 4)
    for rank, ((own, seen), (alone, _)) in enumerate(zip(validated, plain, strict=True)):
        assert all(map(torch.equal, own, alone))  # as if nothing had been swapped in
        for p, q in zip(own, last[rank], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
        assert len(seen) == 3  # the sanity check, and two
        assert all(map(torch.equal, seen[0], network().parameters()))
        for at, of_ranks in ((1, halfway), (2, last)):
            for p, q in zip(seen[at], mean_of(of_ranks), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    for name, of_ranks in (("step=2", halfway), ("step=4", last), ("light", last)):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        for p, q in zip(saved.values(), mean_of(of_ranks), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def rows(folder: Path, key: str) -> dict[int, float]:
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[key]) for row in csv.DictReader(file) if row[key]}


def test_the_consensus_distance_is_logged(tmp_path: Path) -> None:
    def results(fitting: Any, module: Any) -> Any:
        return own_weights(fitting, module), dict(fitting.callback_metrics)

    found = fit(
        DecentLaMReduction("ring"),
        OwnWeights(),
        ranks=4,
        model=Classifier(),
        results=results,
        max_steps=4,
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=2,
    )

    flat = torch.stack([torch.cat([p.flatten() for p in own]) for own, _ in found])
    wanted = ((flat - flat.mean(0)) ** 2).sum(1).mean() / flat.mean(0).square().sum()
    assert wanted > 1e-6
    logged = rows(tmp_path, "decentlam/consensus_distance")
    assert list(logged) == [1, 3]
    assert logged[3] == pytest.approx(float(wanted), rel=1e-3)
    for _, metrics in found:
        assert metrics["decentlam/consensus_distance"] == pytest.approx(float(wanted), rel=1e-3)


def test_the_distance_is_left_out_if_not_wanted() -> None:
    names = fit(
        DecentLaMReduction(log_distance=False),
        results=lambda fitting, _: list(fitting.callback_metrics),
        log_every_n_steps=1,
        max_steps=1,
    )[0]

    assert names == []


class InfiniteOnRank1(L.Callback):
    """One step in which the loss of rank 1 is infinite."""

    def on_before_backward(self, fitting: Any, module: Any, loss: Tensor) -> None:
        if fitting.global_step == 2 and fitting.global_rank == 1 and not hasattr(self, "done"):
            self.done = True
            loss.register_hook(lambda gradient: gradient * torch.inf)


def test_under_16_mixed_all_ranks_leave_a_step_out_and_gradients_can_be_clipped() -> None:
    def results(fitting: Any, module: Any) -> Any:
        scaler = fitting.strategy.precision_plugin.scaler
        return weights(fitting, module), scaler.get_scale(), fitting.optimizers[0].steps_done

    (first, *of_first), (second, *of_second) = fit(
        DecentLaMReduction("ring"),
        InfiniteOnRank1(),
        model=Classifier(),
        results=results,
        max_steps=6,
        gradient_clip_val=0.5,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))],
    )

    assert all(map(torch.equal, first, second))
    assert of_first == of_second == [128.0, 5]
    assert all(p.isfinite().all() for p in first)


def resumed(
    folder: Path, *, topology: str = "one-peer", ranks: int = 3, to_ranks: int = 3
) -> list[Any]:
    """Each rank's weights after 20 steps: in one go, and broken off after 8."""

    def run(steps: int, ranks: int, ckpt_path: Any = None) -> list[list[Tensor]]:
        checkpoint = ModelCheckpoint(folder, filename="at", every_n_train_steps=8, save_top_k=-1)
        return fit(
            DecentLaMReduction(topology),
            OwnWeights(),
            *([checkpoint] if steps == 8 else []),
            ranks=ranks,
            model=Classifier(),
            train_loader=Resumable(),
            results=own_weights,
            max_steps=steps,
            max_epochs=-1,
            enable_checkpointing=steps == 8,
            ckpt_path=ckpt_path,
            use_distributed_sampler=False,
        )

    whole = run(20, ranks)
    run(8, ranks)
    return [whole, lambda: run(20, to_ranks, folder / "at.ckpt")]


def test_resuming_is_exact(tmp_path: Path) -> None:
    whole, resume = resumed(tmp_path)

    assert (tmp_path / "at.ckpt.ranks" / "2-of-3.pt").exists()
    for one, other in zip(whole, resume(), strict=True):
        assert all(map(torch.equal, one, other))


def test_without_the_files_of_ranks_a_warning_says_so_and_ranks_go_on(tmp_path: Path) -> None:
    whole, resume = resumed(tmp_path)
    (tmp_path / "at.ckpt.ranks" / "1-of-3.pt").unlink()

    with pytest.raises(Exception, match="The weights and the optimizer's moments of each rank are"):
        resume()  # warnings are errors here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = resume()

    assert all(p.isfinite().all() for own in found for p in own)
    assert not torch.equal(found[0][0], whole[0][0])


@pytest.mark.filterwarnings("ignore:The weights and the optimizer's moments")
@pytest.mark.parametrize(("ranks", "to_ranks"), [(2, 3), (3, 2), (3, 1), (1, 2)])
def test_other_ranks_go_on_from_the_mean(ranks: int, to_ranks: int, tmp_path: Path) -> None:
    def state(fitting: Any, module: Any) -> Any:
        found = copy.deepcopy(fitting.optimizers[0].state_dict()["state"])
        lr = module.options["lr"]
        u = [each.get("u", lr * each.get("momentum_buffer", 0)) for each in found.values()]
        return u, weights(fitting, module)

    options: dict[str, Any] = {"max_epochs": -1, "train_loader": loader(4), "model": Classifier()}
    saved = fit(
        DecentLaMReduction("ring"),
        ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=3),
        ranks=ranks,
        strategy="ddp_fork" if ranks > 1 else "auto",
        max_steps=3,
        enable_checkpointing=True,
        results=state,
        **options,
    )
    seen: list[Any] = []

    class AtStart(L.Callback):
        def on_train_start(self, fitting: Any, module: Any) -> None:
            seen.append(state(fitting, module))

    found = fit(
        DecentLaMReduction("ring"),
        AtStart(),
        ranks=to_ranks,
        max_steps=4,
        ckpt_path=tmp_path / "at.ckpt",
        strategy="ddp_fork" if to_ranks > 1 else "auto",
        results=lambda *_: seen[0],
        **options,
    )

    for at, _ in enumerate(("u", "weights")):
        for values in found:
            for p, q in zip(values[at], mean_of([each[at] for each in saved]), strict=True):
                torch.testing.assert_close(p, q)


def test_an_error_while_the_mean_is_swapped_in_gives_each_rank_its_own_back() -> None:
    callback = DecentLaMReduction("ring")

    class Fails(L.Callback):
        def on_validation_batch_start(self, fitting: Any, module: Any, *_: Any) -> None:
            if fitting.global_step:
                swapped = [each.is_swapped for each in fitting.optimizers]
                callback.on_exception(fitting, module, KeyError())  # workers do not call it
                self.seen = swapped, weights(fitting, module)

    def results(fitting: Any, module: Any) -> Any:
        return next(each.seen for each in fitting.callbacks if isinstance(each, Fails))

    found = fit(
        callback,
        Fails(),
        ranks=3,
        model=WithValidation(),
        results=results,
        max_steps=2,
        val_check_interval=2,
        limit_val_batches=1,
    )

    for (swapped, own), wanted in zip(found, by_hand(3, 2), strict=True):
        assert swapped == [True]
        for p, q in zip(own, wanted, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_a_monitor_beside_it_measures_nothing_and_says_why() -> None:
    with pytest.raises(Exception, match="is DecentLaMReduction: ranks compute gradients at differ"):
        fit(DecentLaMReduction(), NoiseScaleMonitor())


def test_a_scheduler_that_follows_the_noise_scale_leaves_the_batch_size() -> None:
    with pytest.raises(Exception, match=r"under DDP alone\. .* leaves the batch size"):
        fit(DecentLaMReduction(), BatchSizeScheduler("tradeoff", max_batch_size=32))


def test_a_scheduler_without_a_monitor_goes_with_it() -> None:
    seen: list[int] = []

    class Accumulation(L.Callback):
        def on_train_batch_end(self, fitting: Any, *_: Any) -> None:
            seen.append(int(fitting.accumulate_grad_batches))

    policy = lambda estimate, plan, progress: 32.0  # noqa: E731  # from step 0 on
    (first, accumulated), (second, _) = fit(
        BatchSizeScheduler(policy, max_batch_size=32, lr_scaling="linear"),
        DecentLaMReduction("ring"),
        Accumulation(),
        model=Classifier(),
        results=lambda fitting, module: (weights(fitting, module), max(seen)),
        max_steps=20,
        max_epochs=-1,
    )

    assert all(map(torch.equal, first, second))
    assert accumulated == 2  # 2 x 8 x 2 devices


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(Exception, match=r"`optimizer` must be a torch\.optim\.SGD, got AdamW"):
        fit(DecentLaMReduction(), model=Classifier(optimizer=torch.optim.AdamW, weight_decay=0.1))


def test_a_module_that_wraps_its_optimizer_itself_is_told_so() -> None:
    class Wrapping(Classifier):
        def configure_optimizers(self) -> Any:
            return DecentLaM(torch.optim.SGD(self.parameters(), lr=0.1))

    with pytest.raises(ValueError, match="must return plain optimizers, got a DecentLaM"):
        fit(DecentLaMReduction(), ranks=1, strategy="auto", model=Wrapping())


def test_a_schedule_moves_the_learning_rate_of_the_inner_optimizer() -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def results(fitting: Any, module: Any) -> float:
        return fitting.optimizers[0].param_groups[0]["lr"]

    assert fit(DecentLaMReduction(), model=Scheduled(), results=results, max_steps=3) == [0.125] * 2


def test_a_model_with_several_optimizers_has_a_distance_for_each() -> None:
    class Two(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.nets = nn.ModuleList([network(), network()])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for net, optimizer in zip(self.nets, self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss_of(net, batch))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in self.nets]

    first, second = fit(
        DecentLaMReduction("ring"),
        model=Two(),
        results=lambda fitting, module: (weights(fitting, module), dict(fitting.callback_metrics)),
        max_steps=6,
        log_every_n_steps=1,
        strategy="ddp_fork_find_unused_parameters_true",
    )

    assert all(map(torch.equal, first[0], second[0]))
    assert set(first[1]) == {f"decentlam/consensus_distance/{index}" for index in (0, 1)}


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    class Shared(Classifier):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.net[2:].parameters(), lr=0.1),
                super().configure_optimizers(),
            ]

    with pytest.raises(
        Exception, match=r"must give each parameter to one optimizer, got one of sh"
    ):
        fit(DecentLaMReduction(), model=Shared())
