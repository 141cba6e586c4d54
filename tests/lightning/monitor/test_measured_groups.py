# SPDX-License-Identifier: Apache-2.0
"""Noise scales of parameter groups and of what is measured beside, from the same pass."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fits import classifier, fit, fit_here, fits_on_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from refused import refused
from tiers import slow
from torch import Tensor
from torch.nn import Parameter

from noisescale import NoiseScaleMonitor
from noisescale.collectors.gradient_norms import ExtraEntry
from noisescale.collectors.squared_norms import Norm, norms_of
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.meter.extra import ExtraMeasurement
from noisescale.meter.options import MeterOptions
from noisescale.methods.inner_product import NoiseAlongGradient

GROUPS = {"first": r"^net\.0\.", "last": r"^net\.2\."}


class Doubled(ExtraEntry):
    """Gradients times a factor for each element, which is 2. Ranks share them out."""

    def compute(self, gradients: Iterable[tuple[Parameter, Tensor, slice]]) -> list[Norm]:
        return norms_of([g * torch.full_like(p, 2.0)[rows] for p, g, rows in gradients])


class NoiseScaleOfDoubled(ExtraMeasurement):
    """The noise scale of twice the gradient: of four times the noise and the signal."""

    name = "doubled"
    title = "Noise scale of doubled gradients"
    _saved = ("_estimator",)

    def __init__(self, options: MeterOptions, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(options, optimizer)
        self._estimator = options.new_estimator()

    def entry(self, parameters: Sequence[Parameter]) -> Doubled:
        return Doubled()

    def update(
        self, moments: GradientMoments, whole: GradientMoments, weight: float, step: int
    ) -> None:
        self._estimator.update(moments, weight, step)

    def estimate(self, noise_scale_at: Callable[[float], NoiseScale], step: int) -> NoiseScale:
        return self._estimator.estimate(step)


def adam() -> Any:
    module = classifier()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module.configure_optimizers = lambda: optimizer
    return module


def alone(monitor: NoiseScaleMonitor, *callbacks: Any, **options: Any) -> Any:
    """7 steps an epoch in one process."""
    options = {"model": adam(), "accumulate_grad_batches": 2, "log_every_n_steps": 1, **options}
    return fit_here(monitor, *callbacks, **options)


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_the_moments_of_groups_sum_to_those_of_the_whole(ranks: int) -> None:
    monitor = NoiseScaleMonitor(window=100, groups=GROUPS)
    if ranks == 1:
        alone(monitor)
        (saved,) = monitor.state_dict()["optimizers"]
    else:
        result, _ = fit(monitor, log_every_n_steps=1)
        (saved,) = result["state"]["optimizers"]

    def moments(estimator: dict[str, Any]) -> np.ndarray:
        _, _, level, _, noise, signal = np.transpose(estimator["recent"]["steps"])
        return level * [noise, signal]

    estimates = saved["meter"]["estimates"]
    first, last = map(moments, estimates["groups"].values())
    assert list(estimates["groups"]) == ["first", "last"]
    assert first + last == pytest.approx(moments(estimates["whole"]))
    assert not np.allclose(first, last)


def test_groups_are_logged_and_kept_where_they_are_resolved() -> None:
    monitor = NoiseScaleMonitor(window=100, groups=GROUPS)
    fitting = alone(monitor)

    assert list(monitor.group_noise_scales) == ["first", "last"]
    for name, scale in monitor.group_noise_scales.items():
        metric = fitting.callback_metrics[f"noise_scale/group/{name}"].item()
        assert metric == pytest.approx(scale.value, nan_ok=True)
        column = monitor.history[f"group/{name}"]
        assert len(column) == len(monitor.history["step"]) == 7
        np.testing.assert_equal(column[-1], scale.value if scale.resolved else math.nan)


def test_groups_take_no_collective_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        collectives.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    def calls(groups: Any) -> list[int]:
        collectives.clear()
        fit_here(NoiseScaleMonitor(groups=groups), ranks=2)
        return list(collectives)

    monkeypatch.setattr(dist, "all_reduce", counted)
    found = fits_on_ranks(partial(calls, GROUPS), partial(calls, None))
    (with_groups, _), (without, _) = found

    assert len(with_groups) == len(without)
    assert sum(with_groups) == sum(without) + 7 * 4  # steps x (two groups, small and big)


def test_resuming_continues_groups_and_what_is_measured_beside_exactly(tmp_path: Path) -> None:
    beside = [NoiseScaleOfDoubled, NoiseAlongGradient]
    options = {"max_epochs": 2, "log_every_n_steps": 3}
    whole, resumed = (
        NoiseScaleMonitor(window=20, groups=GROUPS, extra=beside, every_n_steps=1) for _ in range(2)
    )

    saved = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1)
    alone(whole, saved, enable_checkpointing=True, **options)
    (path,) = tmp_path.glob("epoch=0*.ckpt")
    alone(resumed, ckpt_path=path, **options)

    for extra in beside:
        assert whole.meter.extra_noise_scales[extra.name].steps > 8  # more than those of an epoch
    for name in GROUPS:
        column = f"group/{name}"
        np.testing.assert_equal(resumed.history[column], whole.history[column])
    for kind in ("extra_noise_scales", "group_noise_scales"):
        ours, theirs = getattr(resumed.meter, kind), getattr(whole.meter, kind)
        np.testing.assert_equal(*[{n: astuple(s) for n, s in k.items()} for k in (ours, theirs)])


def test_what_is_measured_beside_has_names_of_its_own_if_it_has_a_title() -> None:
    beside, without = (
        NoiseScaleMonitor(extra=extra, every_n_steps=1)
        for extra in ([NoiseScaleOfDoubled, NoiseAlongGradient], [])
    )
    metrics, plain = (alone(monitor).callback_metrics for monitor in (beside, without))

    doubled, whole = beside.meter.extra_noise_scales["doubled"], beside.noise_scale
    assert doubled.steps == whole.steps
    assert doubled.noise_trace == pytest.approx(4 * whole.noise_trace, rel=1e-5)
    assert doubled.grad_sq_norm == pytest.approx(4 * whole.grad_sq_norm, rel=1e-5)
    assert repr(whole) == repr(without.noise_scale)
    own = metrics.keys() - plain.keys()
    assert own == {f"noise_scale/doubled{end}" for end in ("", "_low", "_high")}
    assert list(beside.meter.extra_noise_scales) == ["doubled", "along_gradient"]
    assert without.meter.extra_noise_scales == {}


def test_sgd_without_momentum_has_no_direction() -> None:
    with pytest.raises(Exception, match="momentum"):
        alone(NoiseScaleMonitor(extra=[NoiseAlongGradient]), model=classifier())


@pytest.mark.parametrize("groups", [{"first": r"^net\.9"}, {"first[0]": r"^net"}, lambda _: "a:b"])
def test_wrong_groups_are_no_reason_to_go_on_without_measuring(groups: Any) -> None:
    """On one device, where what cannot be measured by example is told by a warning."""
    with refused("groups"):
        fit_here(NoiseScaleMonitor(groups=groups))
