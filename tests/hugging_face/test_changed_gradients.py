# SPDX-License-Identifier: Apache-2.0
"""Trainers that write to gradients, and passes that begin within a pass."""

import warnings
from typing import Any

import pytest
from tiers import slow


def trained(hf: Any, kind: Any, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = hf.fit(
            hf.NoiseScaleCallback(every_n_steps=1), kind=kind, learning_rate=0.0, **options
        )
    return found, [str(w.message) for w in caught if "steps are not measured" in str(w.message)]


@pytest.mark.parametrize("accumulation", [slow(1), 2])
def test_gradients_changed_before_the_step_are_measured_as_the_pass_made_them(
    accumulation: int, hf: Any
) -> None:
    untouched, _ = trained(hf, hf.Trainer, gradient_accumulation_steps=accumulation)

    found, told = trained(hf, hf.ScalingTrainer, gradient_accumulation_steps=accumulation)

    assert found.noise_scale == untouched.noise_scale
    assert found.state["meter"]["counts"]["measured_steps"] == 7
    assert told == []


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), slow(1, 2), slow(2, 1)])
def test_passes_that_begin_within_a_pass_are_refused_by_name_on_all_ranks(
    ranks: int, accumulation: int, hf: Any
) -> None:
    def one() -> tuple[float, list[str]]:
        found, told = trained(hf, hf.CachingTrainer, gradient_accumulation_steps=accumulation)
        return found.noise_scale.steps, told

    (steps, told), *others = hf.each(ranks, one)

    assert steps == 0
    assert others == [(0, [])] * (ranks - 1)
    assert "GradCache" in told[0]
    assert len(told) == 1
