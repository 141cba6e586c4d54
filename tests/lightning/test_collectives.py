# SPDX-License-Identifier: Apache-2.0
"""Monitor and scheduler under DDP: the same collectives on both ranks, in the same order."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from fits import fit, loader
from lightning.pytorch.callbacks import ModelCheckpoint
from recorded_collectives import Collective, RecordedCollectives

from noisescale import BatchSizeScheduler, NoiseScaleMonitor

STEPS, SAVED_AT = 24, 12


class Records(L.Callback):
    """The collectives of a training."""

    def __init__(self) -> None:
        self.recorded = RecordedCollectives()

    def on_train_start(self, *_: Any) -> None:
        self.recorded.__enter__()

    def on_train_end(self, *_: Any) -> None:
        self.recorded.__exit__(None, None, None)


class FailsOnce:
    """Counts examples, but on rank 1 not those of one batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> int:
        self.calls += 1
        if self.calls == 7 and dist.get_rank() == 1:
            raise ZeroDivisionError
        return len(batch[0])


def run(*callbacks: Any, skipped: int = 0, **options: Any) -> list[list[Collective]]:
    """What each rank calls."""

    def recorded(trainer: Any, module: Any) -> list[Collective]:
        (records,) = [one for one in trainer.callbacks if isinstance(one, Records)]
        (monitor,) = [one for one in trainer.callbacks if isinstance(one, NoiseScaleMonitor)]
        assert trainer.global_step == STEPS
        assert monitor.noise_scale.steps > 5
        assert monitor.history["skipped_steps"][-1] == skipped
        return records.recorded.collectives

    scheduler = BatchSizeScheduler("ratio", max_batch_size=64, decide_every_n_steps=2)
    return fit(
        *callbacks,
        scheduler,
        Records(),
        train_loader=loader(4, 800),
        max_epochs=-1,
        max_steps=STEPS,
        log_every_n_steps=4,
        results=recorded,
        **options,
    )


def own(calls: list[Collective]) -> list[Collective]:
    """Those of monitor and scheduler, which exchange numbers of 64 bits."""
    return [call for call in calls if set(call.dtypes) == {torch.float64}]


def test_ranks_call_the_same_in_a_whole_run_and_in_a_resumed_one(tmp_path: Path) -> None:
    saves = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1
    )

    whole = run(NoiseScaleMonitor(every_n_steps=1), saves, enable_checkpointing=True)
    resumed = run(NoiseScaleMonitor(every_n_steps=1), ckpt_path=tmp_path / f"step={SAVED_AT}.ckpt")

    for first, second in (whole, resumed):
        assert first == second
    decisions = [call for call in own(resumed[0]) if call.shapes == ((4,),)]
    assert len(decisions) > 3
    assert own(whole[0])[-len(own(resumed[0])) :] == own(resumed[0])


@pytest.mark.filterwarnings("ignore:.* on rank 1. ZeroDivisionError")
def test_ranks_call_the_same_where_one_cannot_measure_a_step() -> None:
    first, second = run(NoiseScaleMonitor(every_n_steps=1, batch_size_fn=FailsOnce()), skipped=1)

    assert first == second
    assert len(own(first)) > STEPS
