# SPDX-License-Identifier: Apache-2.0
"""What a run with a BatchSizeScheduler goes on from: whole, in part, or of an earlier layout."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from named_batches import Names, fitted, names
from tiers import slow
from torch.optim import lr_scheduler

from noisescale import BatchSizeScheduler

EPOCHS = 4
STEPS_PER_EPOCH = 6
GROWS = {0: 4, 2: 8}  # steps of 4 and 4, then 8 of the 24 examples of an epoch: 4, 3, 3, 3 steps


def cosine(optimizer: Any, _: Any) -> Any:
    made = lr_scheduler.CosineAnnealingLR(optimizer, STEPS_PER_EPOCH * EPOCHS)
    return {"scheduler": made, "interval": "step"}


def scheduler(**options: Any) -> BatchSizeScheduler:
    return BatchSizeScheduler(
        **{"policy": GROWS, "max_batch_size": 8, "lr_scaling": "none", **options}
    )


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """Where a checkpoint of half a run goes."""
    return tmp_path / "half.ckpt"


def rates(
    callback: BatchSizeScheduler,
    *,
    epochs: int = EPOCHS,
    sized: bool = True,
    goes_on: Path | None = None,
    save: Path | None = None,
) -> list[float]:
    module = Names(24, cosine)
    data = names(24, 2, sized=sized)
    options: dict[str, Any] = {"max_epochs": epochs, "accumulate_grad_batches": 2}
    fitting = fitted(callback, module=module, data=data, ckpt_path=goes_on, **options)
    if save is not None:
        fitting.save_checkpoint(save)
    return module.rates


@pytest.mark.parametrize(
    ("progress", "sized"), [("steps", True), ("examples", False), ("run", True), slow("run", False)]
)
@pytest.mark.filterwarnings("ignore:The learning-rate schedule counts optimizer steps")
def test_without_another_word_a_run_goes_on_by_what_it_went_by(
    half: Path, progress: Any, sized: bool
) -> None:
    whole = rates(scheduler(progress=progress), sized=sized)
    rates(scheduler(progress=progress), epochs=2, sized=sized, save=half)

    resumed = rates(scheduler(), sized=sized, goes_on=half)

    assert resumed == whole[-6:]


@pytest.mark.parametrize("progress", ["run", "examples"])
@pytest.mark.filterwarnings("ignore:The learning-rate schedule counts optimizer steps")
def test_a_run_whose_schedule_fell_behind_catches_up_where_that_is_asked_for(
    half: Path, progress: Any
) -> None:
    on_track = rates(scheduler())
    rates(scheduler(progress="steps"), epochs=2, save=half)

    resumed = rates(scheduler(progress=progress), goes_on=half)

    assert resumed[1:] == pytest.approx(on_track[-5:], rel=1e-9)  # after a first step


def rates_of_cosine(*steps: int) -> Any:
    return pytest.approx([0.05 * (1 + math.cos(math.pi * step / 24)) for step in steps], rel=1e-9)


@pytest.mark.parametrize("policy", [{0: 4, 2: 8, 9: 4}, {0: 4, 13: 2}])
def test_from_examples_to_steps_a_run_goes_on_from_where_its_schedule_is(
    half: Path, policy: dict[int, int]
) -> None:
    """An epoch may then have more steps than at the first batch size."""
    rates(scheduler(), epochs=2, save=half)

    with pytest.warns(UserWarning, match="ended before the run|counts optimizer steps"):
        resumed = rates(scheduler(progress="steps", policy=policy), goes_on=half)

    assert resumed == rates_of_cosine(*range(12, 12 + len(resumed)))


@pytest.mark.parametrize(
    ("edit", "lacks"),
    [
        (lambda state: state.pop("window"), "`window`"),
        (lambda state: state.update(controller=None), "dictionary, got NoneType"),
        (lambda state: state["controller"].pop("steps"), "`steps`"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(
    half: Path, edit: Callable[[Any], Any], lacks: str
) -> None:
    rates(scheduler(), epochs=2, save=half)
    checkpoint = torch.load(half, weights_only=True)
    edit(checkpoint["callbacks"]["BatchSizeScheduler"])
    torch.save(checkpoint, half)

    with pytest.raises(ValueError, match=f"The state of BatchSize.* {lacks}"):
        rates(scheduler(), goes_on=half)


def test_a_checkpoint_from_before_the_scheduler_was_added_is_gone_on_from(half: Path) -> None:
    """Its schedule has been stepped by every step until then, and goes on from there."""
    rates(scheduler(policy=lambda *_: 4.0), epochs=2, save=half)
    checkpoint = torch.load(half, weights_only=True)
    del checkpoint["callbacks"]["BatchSizeScheduler"]
    torch.save(checkpoint, half)

    resumed = rates(scheduler(policy={0: 8}), goes_on=half)

    assert resumed == rates_of_cosine(*range(12, 24, 2))


def test_an_error_of_a_users_policy_stays_what_it_is() -> None:
    def wrong(noise_scale: Any, plan: Any, progress: Any) -> float:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rates(scheduler(policy=wrong))
