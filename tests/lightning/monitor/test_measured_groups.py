# SPDX-License-Identifier: Apache-2.0
"""Noise scales of parameter groups and of what is measured beside, from the same pass."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fits import classifier, fit
from lightning.pytorch.callbacks import ModelCheckpoint
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


def seen(fitting: Any, module: Any) -> dict[str, Any]:
    (monitor,) = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
    return {
        "whole": monitor.noise_scale,
        "groups": monitor.group_noise_scales,
        "beside": monitor.extra_noise_scales,
        "metrics": {k: v.item() for k, v in fitting.callback_metrics.items()},
        "history": {name: column.tolist() for name, column in monitor.history.items()},
        "state": monitor.state_dict(),
    }


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), (1, {"strategy": "auto", "accumulate_grad_batches": 2})],
)
def test_the_moments_of_groups_sum_to_those_of_the_whole(
    ranks: int, options: dict[str, Any]
) -> None:
    result, *_ = fit(
        NoiseScaleMonitor(window=100, groups=GROUPS),
        ranks=ranks,
        results=seen,
        log_every_n_steps=1,
        **options,
    )

    def moments(estimator: dict[str, Any]) -> np.ndarray:
        _, _, level, noise, signal = np.transpose(estimator["recent"]["steps"])
        return level * [noise, signal]

    (saved,) = result["state"]["optimizers"]
    estimates = saved["meter"]["estimates"]
    first, last = map(moments, estimates["groups"].values())
    assert list(result["groups"]) == ["first", "last"]
    assert first + last == pytest.approx(moments(estimates["whole"]))
    assert result["groups"]["first"].value != pytest.approx(result["groups"]["last"].value)


def test_groups_are_logged_and_kept_where_they_are_resolved() -> None:
    result, _ = fit(NoiseScaleMonitor(window=100, groups=GROUPS), results=seen, log_every_n_steps=1)

    for name, scale in result["groups"].items():
        metric = result["metrics"][f"noise_scale/group/{name}"]
        assert metric == pytest.approx(scale.value, nan_ok=True)
        column = result["history"][f"group/{name}"]
        assert len(column) == len(result["history"]["step"]) == 7
        np.testing.assert_equal(column[-1], scale.value if scale.resolved else math.nan)


def test_groups_take_no_collective_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        collectives.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    with_groups, _ = fit(NoiseScaleMonitor(groups=GROUPS), results=lambda *_: list(collectives))
    without, _ = fit(NoiseScaleMonitor(), results=lambda *_: list(collectives))

    assert len(with_groups) == len(without)
    assert sum(with_groups) == sum(without) + 7 * 4  # steps x (two groups, small and big)


def test_resuming_continues_groups_and_what_is_measured_beside_exactly(tmp_path: Path) -> None:
    beside = [NoiseScaleOfDoubled, NoiseAlongGradient]

    def monitor() -> NoiseScaleMonitor:
        return NoiseScaleMonitor(window=20, groups=GROUPS, extra=beside)

    saved = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1)
    whole, _ = fit(monitor(), saved, model=adam(), max_epochs=2, results=seen,
                   enable_checkpointing=True, log_every_n_steps=3)  # fmt: skip
    (path,) = tmp_path.glob("epoch=0*.ckpt")
    resumed, _ = fit(monitor(), model=adam(), max_epochs=2, results=seen, ckpt_path=path,
                     log_every_n_steps=3)  # fmt: skip

    for extra in beside:
        assert whole["beside"][extra.name].steps > 8  # more than those of an epoch
        ours, theirs = resumed["beside"][extra.name], whole["beside"][extra.name]
        np.testing.assert_equal(astuple(ours), astuple(theirs))
    for name in GROUPS:
        column = f"group/{name}"
        np.testing.assert_equal(resumed["history"][column], whole["history"][column])
        ours, theirs = resumed["groups"][name], whole["groups"][name]
        np.testing.assert_equal(astuple(ours), astuple(theirs))


def test_what_is_measured_beside_has_names_of_its_own_if_it_has_a_title() -> None:
    extra = [NoiseScaleOfDoubled, NoiseAlongGradient]
    result, _ = fit(NoiseScaleMonitor(extra=extra), model=adam(), results=seen)
    without, _ = fit(NoiseScaleMonitor(), model=adam(), results=seen)

    doubled, whole = result["beside"]["doubled"], result["whole"]
    assert doubled.steps == whole.steps
    assert doubled.noise_trace == pytest.approx(4 * whole.noise_trace, rel=1e-5)
    assert doubled.grad_sq_norm == pytest.approx(4 * whole.grad_sq_norm, rel=1e-5)
    assert result["whole"] == without["whole"]
    own = result["metrics"].keys() - without["metrics"].keys()
    assert own == {f"noise_scale/doubled{end}" for end in ("", "_low", "_high")}
    assert list(result["beside"]) == ["doubled", "along_gradient"]
    assert without["beside"] == {}


def test_sgd_without_momentum_has_no_direction() -> None:
    with pytest.raises(Exception, match="must be one with momentum in all parameter groups, got"):
        fit(NoiseScaleMonitor(extra=[NoiseAlongGradient]))


@pytest.mark.parametrize("groups", [{"first": r"^net\.9"}, {"first[0]": r"^net"}, lambda _: "a:b"])
def test_wrong_groups_are_no_reason_to_go_on_without_measuring(groups: Any) -> None:
    """On one device, where what cannot be measured by example is told by a warning."""
    with pytest.raises(ValueError, match="`groups` must have"):
        fit(NoiseScaleMonitor(groups=groups), ranks=1, strategy="auto")
