# SPDX-License-Identifier: Apache-2.0
"""Batches of groups of rows under Lightning: `group_fn`."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import classifier, fit_here, heard
from refused import refused
from torch import Tensor, nn
from torch.nn import functional as F

from noisescale import (
    BatchSizeScheduler,
    NoiseScaleMeter,
    NoiseScaleMonitor,
    RepeatedAugmentationSampler,
)

PROMPTS, COMPLETIONS, BATCHES = 6, 4, 5


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(PROMPTS * COMPLETIONS, 4, generator=generator),
            "prompt": [f"prompt {i}" for i in range(PROMPTS) for _ in range(COMPLETIONS)],
        }
        for _ in range(BATCHES)
    ]


def pairs_of(z: Tensor) -> Tensor:
    chosen, rejected = z.view(PROMPTS, COMPLETIONS // 2, 2).unbind(2)
    return -F.logsigmoid(chosen - rejected).mean()


class Module(type(classifier(lr=0.0))):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        return pairs_of(self.net(batch["x"]))


def fit(callback: L.Callback) -> list[str]:
    """What was said."""
    with heard() as told:
        batches_of_all = torch.utils.data.DataLoader(batches(), batch_size=None)
        fit_here(callback, model=Module(), train_loader=batches_of_all)
    return told


def monitor(group_fn: Callable[[Any], Any] | None, **options: Any) -> NoiseScaleMonitor:
    return NoiseScaleMonitor(window=10_000, every_n_steps=1, group_fn=group_fn, **options)


def prompts_of(batch: dict[str, Any]) -> Any:
    return batch["prompt"]


def test_the_monitor_measures_what_a_meter_is_told_of_groups() -> None:
    module = Module()
    meter = NoiseScaleMeter(module, every_n_steps=1, window=10_000)
    for batch in batches():
        module.zero_grad()
        meter.backward(module.training_step(batch, 0), 24, row_groups=batch["prompt"])
        meter.step()

    callback = monitor(prompts_of)
    fit(callback)

    expected = meter.sums.mean
    assert callback.meter.last_measured_step == BATCHES
    assert callback.meter.average_moments.grad_sq_norm == pytest.approx(expected.grad_sq_norm)
    assert callback.meter.average_moments.noise_trace == pytest.approx(expected.noise_trace)
    assert "group_fn=" in repr(callback)


def test_without_groups_rows_that_act_on_each_other_are_not_measured() -> None:
    callback = monitor(None)

    assert any("act on one another" in one for one in fit(callback))
    assert callback.noise_scale.steps == 0


def test_groups_are_counted_where_the_function_says_so() -> None:
    rows = monitor(prompts_of)
    prompts = monitor(prompts_of, batch_size_fn=lambda batch: PROMPTS, unit="prompts")
    for each in (rows, prompts):
        fit(each)

    in_rows, in_prompts = rows.meter.average_moments, prompts.meter.average_moments
    assert in_prompts.grad_sq_norm == pytest.approx(in_rows.grad_sq_norm)
    assert in_prompts.noise_trace == pytest.approx(in_rows.noise_trace / COMPLETIONS)


def test_groups_of_too_few_rows_are_told_and_training_goes_on() -> None:
    callback = monitor(lambda batch: [0, 1, 2])

    told = fit(callback)

    assert any("`row_groups` must" in one and " 24 " in one for one in told)
    assert callback.noise_scale.steps == 0


def test_a_scheduler_hands_the_function_to_the_monitor_that_it_makes() -> None:
    seen = []

    def group_fn(batch: dict[str, Any]) -> Any:
        seen.append(len(batch["prompt"]))
        return prompts_of(batch)

    fit(BatchSizeScheduler("ratio", group_fn=group_fn, max_batch_size=48))

    assert seen
    with refused("group_fn", requirement="be None"):
        BatchSizeScheduler(monitor=NoiseScaleMonitor(), group_fn=group_fn)


@pytest.mark.parametrize("small_batch", ["rank", "micro_batch"])
def test_groups_need_halves(small_batch: Any) -> None:
    with refused("group_fn", requirement="`small_batch="):
        NoiseScaleMonitor(small_batch=small_batch, group_fn=prompts_of)


def test_no_function_and_one_that_returns_no_groups_are_refused_by_name() -> None:
    with refused("group_fn", error=TypeError):
        NoiseScaleMonitor(group_fn=1)  # type: ignore[arg-type]
    with refused("group_fn"):
        fit(monitor(lambda batch: 3))


def test_copies_of_examples_that_a_sampler_repeats_are_groups() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    sampler = RepeatedAugmentationSampler(data, repeats=COMPLETIONS)

    class Copies(Module):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(batch[0] + torch.randn_like(batch[0])).square().mean()

    found = []
    for group_fn in (lambda batch: torch.arange(len(batch[0])) // COMPLETIONS, None):
        callback = monitor(group_fn)
        loader = torch.utils.data.DataLoader(data, batch_size=24, sampler=sampler)
        torch.manual_seed(1)
        fit_here(callback, model=Copies(), train_loader=loader)
        assert callback.meter.measured_steps == 4
        assert callback.levels is not None
        found.append(callback.levels)

    callback = NoiseScaleMonitor(every_n_steps=1, batch_size_fn=lambda batch: 24)
    loader = torch.utils.data.DataLoader(data, batch_size=24, sampler=sampler)
    fit_here(callback, model=Copies(), train_loader=loader)
    assert callback.levels is None  # what is counted is up to the function

    callback = monitor(None)
    torch.manual_seed(1)
    fit_here(callback, model=Copies(), train_loader=loader)
    assert found[0] == found[1]
    assert found[0].rows_per_group == pytest.approx(COMPLETIONS)
    assert callback.meter.batch_size == 24 / COMPLETIONS
    row = {name: column[-1] for name, column in callback.history.items()}
    assert row["groups"] == pytest.approx(24 / COMPLETIONS)
    assert row["within"] == pytest.approx(found[0].within.value)
