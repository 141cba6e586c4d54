# SPDX-License-Identifier: Apache-2.0
"""Lightning fits by DecentLaM: the weights, and what is validated, saved and logged."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
import torch
from fits import fit, loader, loss_of, network
from lightning.pytorch.callbacks import ModelCheckpoint
from methods.across_ranks.fitted import (
    OwnWeights,
    batches_of,
    mean_of,
    module_by,
    momentum,
    rows,
    weights,
)
from methods.across_ranks.small_net import equal
from methods.decentlam.oracle_of_decentlam import ring
from tiers import slow
from torch import Tensor, nn

from noisescale import BatchSizeScheduler, DecentLaMReduction


def by_hand(ranks: int, steps: int, lr: float = 0.1, momentum: float = 0.8) -> list[list[Tensor]]:
    """The weights of all ranks on a ring, by the paper's own formulas."""
    nets, batches = [network() for _ in range(ranks)], batches_of(ranks)
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
    return [weights(None, net) for net in nets]


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("package", [L, slow(pytorch_lightning)])
def test_each_rank_trains_on_its_own_and_all_end_with_the_mean_and_log_their_distance(
    package: Any, tmp_path: Path
) -> None:
    class Ends(package.Callback):
        def on_train_end(self, fitting: Any, module: Any) -> None:
            self.own = weights(fitting, module)

    ends = Ends()
    found = fit(
        DecentLaMReduction("ring"),
        ends,
        ranks=4,
        package=package,
        model=module_by(momentum, package=package),
        results=lambda fitting, module: (
            ends.own,
            weights(fitting, module),
            dict(fitting.callback_metrics),
        ),
        max_steps=4,
        logger=package.loggers.CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=2,
    )

    of_ranks = [own for own, *_ in found]
    flat = torch.stack([torch.cat([p.flatten() for p in own]) for own in of_ranks])
    distance = float(((flat - flat.mean(0)) ** 2).sum(1).mean() / flat.mean(0).square().sum())
    assert distance > 1e-6
    assert_close(of_ranks, by_hand(4, 4))
    for _, last, metrics in found:
        torch.testing.assert_close(last, mean_of(of_ranks))
        assert equal(last, found[0][1])
        assert metrics["decentlam/consensus_distance"] == pytest.approx(distance, rel=1e-3)
    logged = rows(tmp_path, "decentlam/consensus_distance")
    assert list(logged) == [1, 3]
    assert logged[3] == pytest.approx(distance, rel=1e-3)


def test_the_distance_is_left_out_if_not_wanted() -> None:
    names = fit(
        DecentLaMReduction(log_distance=False),
        results=lambda fitting, _: list(fitting.callback_metrics),
        log_every_n_steps=1,
        max_steps=1,
    )[0]

    assert names == []


def module_that_validates() -> Any:
    """It keeps the weights that it validates."""

    def validation_step(module: Any, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            validated.append(weights(None, module))

    validated: list[list[Tensor]] = []
    return module_by(
        momentum,
        validation_step=validation_step,
        val_dataloader=lambda _: loader(),
        validated=validated,
    )


class FailsWhileSwapped(L.Callback):
    """Keeps this rank's weights as an error in a validation leaves them."""

    def __init__(self, reduction: DecentLaMReduction) -> None:
        self.reduction = reduction

    def on_validation_batch_start(self, fitting: Any, module: Any, *_: Any) -> None:
        if fitting.global_step == 2:
            self.swapped = [each.is_swapped for each in fitting.optimizers]
            self.reduction.on_exception(fitting, module, KeyError())  # workers do not call it
            self.restored = weights(fitting, module)


def test_the_mean_is_validated_and_saved_and_training_goes_on_from_each_ranks_own(
    tmp_path: Path,
) -> None:
    def run(*callbacks: Any, model: Any, **options: Any) -> Any:
        own = OwnWeights()
        return fit(
            DecentLaMReduction("ring"),
            own,
            *callbacks,
            ranks=3,
            model=model,
            results=lambda _, module: (own.weights, getattr(module, "validated", None)),
            max_steps=4,
            **options,
        )

    validated = run(
        ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1),
        ModelCheckpoint(tmp_path, filename="light", save_weights_only=True, every_n_train_steps=4),
        model=module_that_validates(),
        val_check_interval=2,
        enable_checkpointing=True,
    )
    plain = run(model=module_by(momentum))

    halfway, last = by_hand(3, 2), by_hand(3, 4)
    assert_close([own for own, _ in validated], last)
    for (own, seen), (alone, _) in zip(validated, plain, strict=True):
        assert equal(own, alone)  # as if nothing had been swapped in
        assert equal(seen[0], weights(None, network()))  # the sanity check
        assert_close(seen[1:], [mean_of(halfway), mean_of(last)])
    for name, of_ranks in (("step=2", halfway), ("step=4", last), ("light", last)):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert_close(list(saved.values()), mean_of(of_ranks))


def test_an_error_while_the_mean_is_swapped_in_gives_each_rank_its_own_back() -> None:
    reduction = DecentLaMReduction("ring")
    looks = FailsWhileSwapped(reduction)

    found = fit(
        reduction,
        looks,
        ranks=3,
        model=module_that_validates(),
        results=lambda *_: (looks.swapped, looks.restored),
        max_steps=2,
        val_check_interval=2,
        limit_val_batches=1,
    )

    assert [swapped for swapped, _ in found] == [[True]] * 3
    assert_close([restored for _, restored in found], by_hand(3, 2))


def test_other_optimizers_a_parameter_of_two_and_following_the_noise_scale_are_refused() -> None:
    def shared(module: Any) -> Any:
        return [torch.optim.SGD(module.net[2:].parameters(), lr=0.1), momentum(module)]

    manual = module_by(shared, automatic_optimization=False)
    with pytest.raises(Exception, match=r"`optimizer` .* Adam\b"):
        fit(
            DecentLaMReduction(),
            model=module_by(lambda module: torch.optim.Adam(module.parameters())),
        )
    with pytest.raises(Exception, match=r"`configure_optimizers` .* in several"):
        fit(DecentLaMReduction(), model=manual)
    with pytest.raises(Exception, match=r"under DDP alone\. .* leaves the batch size"):
        fit(DecentLaMReduction(), BatchSizeScheduler("tradeoff", max_batch_size=32))


def test_a_model_with_several_optimizers_has_a_distance_for_each() -> None:
    def training_step(module: Any, batch: Any, batch_idx: int) -> None:
        for net, optimizer in zip(module.net, module.optimizers(), strict=True):
            module.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            module.manual_backward(loss_of(net, batch))
            optimizer.step()
            module.untoggle_optimizer(optimizer)

    two = module_by(
        lambda module: [momentum(net) for net in module.net],
        net=nn.ModuleList([network(), network()]),
        automatic_optimization=False,
        training_step=training_step,
    )

    first, second = fit(
        DecentLaMReduction("ring"),
        model=two,
        results=lambda fitting, module: (weights(fitting, module), dict(fitting.callback_metrics)),
        max_steps=6,
        log_every_n_steps=1,
        strategy="ddp_fork_find_unused_parameters_true",
    )

    assert equal(first[0], second[0])
    assert set(first[1]) == {f"decentlam/consensus_distance/{index}" for index in (0, 1)}
