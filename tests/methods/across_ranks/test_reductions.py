# SPDX-License-Identifier: Apache-2.0
"""What fits by AdasumReduction and by DecentLaMReduction have in common, and resuming above all."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
from fits import fit, loader
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from methods.across_ranks.fitted import OwnWeights, adam, mean_of, module_by, momentum, weights
from methods.across_ranks.small_net import equal
from resumable import Resumable
from tiers import slow, slow_but
from torch import Tensor

from noisescale import (
    AdasumOptimizer,
    AdasumReduction,
    BatchSizeScheduler,
    DecentLaM,
    DecentLaMReduction,
    NoiseScaleMonitor,
)


class Way(NamedTuple):
    reduction: Callable[[], Any]
    configure: Callable[[Any], Any]
    wrap: Callable[[Any], Any]


WAYS = {
    "adasum": Way(AdasumReduction, adam, AdasumOptimizer),
    "local steps": Way(partial(AdasumReduction, local_steps=3), adam, AdasumOptimizer),
    "decentlam": Way(partial(DecentLaMReduction, "one-peer"), momentum, DecentLaM),
}


@pytest.fixture(params=["adasum", "decentlam"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_one_process_trains_as_without_it(name: str) -> None:
    def trained(*callbacks: Any) -> list[Tensor]:
        model = module_by(WAYS[name].configure)
        return fit(*callbacks, ranks=1, model=model, results=weights)[0]

    assert equal(trained(), trained(WAYS[name].reduction()))


class InfiniteOnRank1(L.Callback):
    """One step in which the loss of rank 1 is infinite."""

    def on_before_backward(self, fitting: Any, module: Any, loss: Tensor) -> None:
        if fitting.global_step == 2 and fitting.global_rank == 1 and not hasattr(self, "done"):
            self.done = True
            loss.register_hook(lambda gradient: gradient * torch.inf)


def test_under_16_mixed_all_ranks_leave_a_step_out_and_gradients_can_be_clipped(name: str) -> None:
    monitors = [NoiseScaleMonitor(every_n_steps=1)] if name == "adasum" else []

    def results(fitting: Any, module: Any) -> Any:
        scale = fitting.strategy.precision_plugin.scaler.get_scale()
        steps = [each.noise_scale.steps for each in fitting.callbacks if each in monitors]
        return weights(fitting, module), scale, steps or [fitting.optimizers[0].steps_done]

    (first, *of_first), (second, *of_second) = fit(
        WAYS[name].reduction(),
        InfiniteOnRank1(),
        *monitors,
        model=module_by(momentum),
        results=results,
        max_steps=6,
        gradient_clip_val=0.5,
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))],
    )

    assert equal(first, second)
    assert of_first == of_second
    # Of 6 steps one is left out; of a monitor's the first sets the level.
    assert of_first == [128.0, [pytest.approx(4 if monitors else 5)]]
    assert all(p.isfinite().all() for p in first)


def broken_off(folder: Path, name: str) -> tuple[list[list[Tensor]], Callable[[], Any]]:
    """Each rank's weights after 10 steps in one go, and how to go on after 4."""

    def run(steps: int, ckpt_path: Any = None) -> list[list[Tensor]]:
        checkpoint = ModelCheckpoint(folder, filename="at", every_n_train_steps=4, save_top_k=-1)
        own = OwnWeights()
        return fit(
            WAYS[name].reduction(),
            own,
            *([checkpoint] if steps == 4 else []),
            ranks=3 if name == "decentlam" else 2,
            model=module_by(WAYS[name].configure),
            train_loader=Resumable(),
            results=lambda *_: own.weights,
            max_steps=steps,
            max_epochs=-1,
            enable_checkpointing=steps == 4,
            ckpt_path=ckpt_path,
            use_distributed_sampler=False,
        )

    whole = run(10)
    run(4)
    return whole, lambda: run(10, folder / "at.ckpt")


@pytest.mark.parametrize("name", slow_but(WAYS, "adasum", "decentlam"))
def test_resuming_is_exact_and_without_the_files_of_ranks_a_warning_says_so(
    name: str, tmp_path: Path
) -> None:
    whole, resume = broken_off(tmp_path, name)
    ranks = len(whole)

    assert all(map(equal, whole, resume()))
    for rank in range(1, ranks):
        (tmp_path / "at.ckpt.ranks" / f"{rank}-of-{ranks}.pt").unlink()
    with pytest.raises(Exception, match=f"moments of each rank are not all there: {ranks} ranks"):
        resume()  # warnings are errors here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = resume()
    assert all(p.isfinite().all() for own in found for p in own)
    assert name == "decentlam" or equal(found[0], found[1])
    assert not torch.equal(found[0][0], whole[0][0])


def moments(fitting: Any, module: Any) -> list[Tensor]:
    """And the weights."""
    (optimizer,), found = fitting.optimizers, []
    for state in optimizer.state_dict()["state"].values():
        if (buffer := state.get("momentum_buffer")) is not None:  # in one process
            state = {"u": optimizer.param_groups[0]["lr"] * buffer}
        found += [state[key].clone() for key in sorted(state) if state[key] is not None]
    return found + weights(fitting, module)


@pytest.mark.filterwarnings("ignore:The weights and the optimizer's moments")
@pytest.mark.filterwarnings("ignore:The optimizer's moments")
@pytest.mark.parametrize(("ranks", "to_ranks"), [(2, 3), slow(3, 2), slow(3, 1), slow(1, 2)])
def test_other_ranks_go_on_from_the_mean(
    name: str, ranks: int, to_ranks: int, tmp_path: Path
) -> None:
    seen: list[Any] = []

    class AtStart(L.Callback):
        def on_train_start(self, fitting: Any, module: Any) -> None:
            seen.append(moments(fitting, module))

    def run(ranks: int, *callbacks: Any, **options: Any) -> Any:
        return fit(
            WAYS[name].reduction(),
            *callbacks,
            ranks=ranks,
            model=module_by(WAYS[name].configure),
            train_loader=loader(4),
            max_epochs=-1,
            **options,
        )

    checkpoint = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=3)
    saved = run(ranks, checkpoint, max_steps=3, enable_checkpointing=True, results=moments)
    path = tmp_path / "at.ckpt"
    found = run(to_ranks, AtStart(), max_steps=4, ckpt_path=path, results=lambda *_: seen[0])

    assert len(found) == to_ranks
    for of_rank in found:
        torch.testing.assert_close(of_rank, mean_of(saved))


def test_a_batch_size_that_is_scheduled_goes_with_it(name: str) -> None:
    (first, batches), (second, _) = fit(
        BatchSizeScheduler(lambda *_: 32.0, max_batch_size=32, lr_scaling="linear"),
        WAYS[name].reduction(),
        model=module_by(momentum),
        results=lambda fitting, module: (
            weights(fitting, module),
            fitting.fit_loop.epoch_loop.total_batch_idx + 1,
        ),
        max_steps=8,
        max_epochs=-1,
    )

    assert equal(first, second)
    assert batches == 14  # in two epochs of seven: 2, 2, 2 and 1 a step


def test_wrapping_an_optimizer_twice_and_a_monitor_beside_other_weights_are_refused(
    name: str,
) -> None:
    wrapping = module_by(lambda module: WAYS[name].wrap(momentum(module)))
    reduction = WAYS["local steps" if name == "adasum" else name].reduction()

    with pytest.raises(ValueError, match=r"`configure_optimizers` .* plain optimizers"):
        fit(WAYS[name].reduction(), ranks=1, model=wrapping)
    with pytest.raises(Exception, match="gradients at different weights"):
        fit(reduction, NoiseScaleMonitor())
