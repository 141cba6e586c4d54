# SPDX-License-Identifier: Apache-2.0
"""What a run with a BatchSizeScheduler goes on from: whole, in part, or of an earlier layout."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import trainer
from named_batches import Names, names
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


def rates(
    callback: BatchSizeScheduler,
    *,
    epochs: int = EPOCHS,
    sized: bool = True,
    goes_on: Path | None = None,
    save: Path | None = None,
) -> list[float]:
    module = Names(24, cosine)
    fitting = trainer(
        1, strategy="auto", callbacks=[callback], max_epochs=epochs, accumulate_grad_batches=2
    )
    fitting.fit(module, names(24, 2, sized=sized), ckpt_path=goes_on)
    if save is not None:
        fitting.save_checkpoint(save)
    return module.rates


def edited(path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """The checkpoint with the scheduler's state changed."""
    checkpoint = torch.load(path, weights_only=True)
    edit(checkpoint["callbacks"]["BatchSizeScheduler"])
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
@pytest.mark.parametrize("progress", ["steps", "examples", "run"])
@pytest.mark.filterwarnings("ignore:The learning-rate schedule counts optimizer steps")
def test_without_another_word_a_run_goes_on_by_what_it_went_by(
    tmp_path: Path, progress: Any, sized: bool
) -> None:
    whole = rates(scheduler(progress=progress), sized=sized)
    half = tmp_path / "half.ckpt"
    rates(scheduler(progress=progress), epochs=2, sized=sized, save=half)

    resumed = rates(scheduler(), sized=sized, goes_on=half)

    assert resumed == whole[-6:]


@pytest.mark.parametrize("progress", ["run", "examples"])
@pytest.mark.filterwarnings("ignore:The learning-rate schedule counts optimizer steps")
def test_a_run_whose_schedule_fell_behind_catches_up_where_that_is_asked_for(
    tmp_path: Path, progress: Any
) -> None:
    on_track = rates(scheduler())
    half = tmp_path / "half.ckpt"
    rates(scheduler(progress="steps"), epochs=2, save=half)

    resumed = rates(scheduler(progress=progress), goes_on=half)

    assert resumed[1:] == pytest.approx(on_track[-5:], rel=1e-9)  # after a first step


def test_from_examples_to_steps_a_run_goes_on_from_where_its_schedule_is(tmp_path: Path) -> None:
    half = tmp_path / "half.ckpt"
    rates(scheduler(), epochs=2, save=half)

    with pytest.warns(UserWarning, match="ended before the run|counts optimizer steps"):
        resumed = rates(
            scheduler(progress="steps", policy={0: 4, 2: 8, 9: 4}), epochs=EPOCHS, goes_on=half
        )

    expected = [0.05 * (1 + math.cos(math.pi * step / 24)) for step in range(12, 12 + len(resumed))]
    assert resumed == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda state: state.pop("window"),
            "The state of BatchSizeScheduler must have `window`, got only `controller`, ",
        ),
        (
            lambda state: state.update(controller=None),
            "The state of BatchSizeScheduler, `controller`, must be a dictionary, got NoneType.",
        ),
        (
            lambda state: state["controller"].pop("steps"),
            "The state of BatchSizeScheduler, `controller`, must have `steps`, got only `plan`, ",
        ),
        (
            lambda state: state["controller"].pop("factors"),
            "The state of BatchSizeController must have `factors`, got only `plan`, ",
        ),
        (
            lambda state: state["controller"]["clock"].pop("taken"),
            "The state of BatchSizeController, `clock`, must have `taken`, got only `time`, ",
        ),
    ],
)
def test_what_a_checkpoint_lacks_is_named_with_the_remedy(
    tmp_path: Path, edit: Callable[[Any], Any], message: str
) -> None:
    half = tmp_path / "half.ckpt"
    rates(scheduler(), epochs=2, save=half)
    remedy = "Resume from a complete checkpoint of BatchSize"

    with pytest.raises(ValueError, match=f"^{re.escape(message)}.*{remedy}"):
        rates(scheduler(), goes_on=edited(half, edit))


def test_a_checkpoint_from_before_the_scheduler_was_added_is_gone_on_from(tmp_path: Path) -> None:
    """Its schedule has been stepped by every step until then, and goes on from there."""
    half = tmp_path / "half.ckpt"
    rates(scheduler(policy=lambda *_: 4.0), epochs=2, save=half)
    checkpoint = torch.load(half, weights_only=True)
    del checkpoint["callbacks"]["BatchSizeScheduler"]
    torch.save(checkpoint, half)

    resumed = rates(scheduler(policy={0: 8}), goes_on=half)

    expected = [0.05 * (1 + math.cos(math.pi * step / 24)) for step in range(12, 24, 2)]
    assert resumed == pytest.approx(expected, rel=1e-9)


def test_an_error_of_a_users_policy_stays_what_it_is() -> None:
    def wrong(noise_scale: Any, plan: Any, progress: Any) -> float:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rates(scheduler(policy=wrong))
