# SPDX-License-Identifier: Apache-2.0
"""Noise scales of parameter groups and of the preconditioned gradient, from the same pass."""

import math
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fits import classifier, fit
from lightning.pytorch.callbacks import ModelCheckpoint

from noisescale import NoiseScaleMonitor
from noisescale.methods.preconditioned import PreconditionedNoiseScale

GROUPS = {"first": r"^net\.0\.", "last": r"^net\.2\."}


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
        "preconditioned": monitor.extra_noise_scales.get("preconditioned"),
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


def test_resuming_continues_groups_and_the_preconditioned_exactly(tmp_path: Path) -> None:
    def monitor() -> NoiseScaleMonitor:
        return NoiseScaleMonitor(window=20, groups=GROUPS, extra=[PreconditionedNoiseScale])

    saved = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1)
    whole, _ = fit(monitor(), saved, model=adam(), max_epochs=2, results=seen,
                   enable_checkpointing=True, log_every_n_steps=3)  # fmt: skip
    (path,) = tmp_path.glob("epoch=0*.ckpt")
    resumed, _ = fit(monitor(), model=adam(), max_epochs=2, results=seen, ckpt_path=path,
                     log_every_n_steps=3)  # fmt: skip

    np.testing.assert_equal(astuple(resumed["preconditioned"]), astuple(whole["preconditioned"]))
    for name in GROUPS:
        column = f"group/{name}"
        np.testing.assert_equal(resumed["history"][column], whole["history"][column])
        ours, theirs = resumed["groups"][name], whole["groups"][name]
        np.testing.assert_equal(astuple(ours), astuple(theirs))


def test_the_preconditioned_noise_scale_has_names_of_its_own() -> None:
    result, _ = fit(NoiseScaleMonitor(extra=[PreconditionedNoiseScale]), model=adam(), results=seen)
    without, _ = fit(NoiseScaleMonitor(), model=adam(), results=seen)

    # The first step has no second moments yet, and the second sets the level.
    # (Steps weigh by their batch size: 4 in the last.)
    assert result["preconditioned"].steps == pytest.approx(68**2 / (4 * 16**2 + 4**2), rel=1e-3)
    assert result["preconditioned"].noise_trace > 100 * result["whole"].noise_trace
    assert result["whole"] == without["whole"]
    own = {key for key in result["metrics"] if "preconditioned" in key}
    assert own == {f"noise_scale/preconditioned{end}" for end in ("", "_low", "_high")}
    assert own == result["metrics"].keys() - without["metrics"].keys()
    assert without["preconditioned"] is None


def test_sgd_has_nothing_to_precondition_with() -> None:
    with pytest.raises(Exception, match="must be an optimizer of Adam's family, got SGD, which"):
        fit(NoiseScaleMonitor(extra=[PreconditionedNoiseScale]))


@pytest.mark.parametrize("groups", [{"first": r"^net\.9"}, {"first[0]": r"^net"}, lambda _: "a:b"])
def test_wrong_groups_are_no_reason_to_go_on_without_measuring(groups: Any) -> None:
    """On one device, where what cannot be measured by example is told by a warning."""
    with pytest.raises(ValueError, match="`groups` must have"):
        fit(NoiseScaleMonitor(groups=groups), ranks=1, strategy="auto")
