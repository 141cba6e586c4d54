# SPDX-License-Identifier: Apache-2.0
"""Monitor and scheduler under DDP: the same collectives on both ranks, in the same order."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fits import fit_here, fits_on_ranks, loader
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from recorded_collectives import Collective, RecordedCollectives

from noisescale import BatchSizeScheduler, NoiseScaleMonitor

STEPS, SAVED_AT = 24, 12


def run(*callbacks: Any, skipped: int = 0, **options: Any) -> list[Collective]:
    """What this rank calls."""
    recorded = RecordedCollectives()
    records = LambdaCallback(
        on_train_start=lambda *_: recorded.__enter__(),
        on_train_end=lambda *_: recorded.__exit__(None, None, None),
    )
    fitting = fit_here(
        *callbacks,
        BatchSizeScheduler("ratio", max_batch_size=64, decide_every_n_steps=2),
        records,
        ranks=2,
        train_loader=loader(4, 800),
        max_epochs=-1,
        max_steps=STEPS,
        log_every_n_steps=4,
        **options,
    )
    (monitor,) = [one for one in fitting.callbacks if isinstance(one, NoiseScaleMonitor)]
    assert fitting.global_step == STEPS
    assert monitor.noise_scale.steps > 5
    assert monitor.history["skipped_steps"][-1] == skipped
    return recorded.collectives


def own(calls: list[Collective]) -> list[Collective]:
    """Those of monitor and scheduler, which exchange numbers of 64 bits."""
    return [call for call in calls if set(call.dtypes) == {torch.float64}]


@pytest.mark.filterwarnings("ignore:.* on rank 1. ZeroDivisionError")
def test_ranks_call_the_same_in_a_whole_run_a_resumed_one_and_where_one_cannot_measure_a_step(
    tmp_path: Path,
) -> None:
    saves = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1
    )
    saved = tmp_path / f"step={SAVED_AT}.ckpt"
    batches = itertools.count(1)

    def examples(batch: Any) -> int:
        if next(batches) == 7 and dist.get_rank() == 1:
            raise ZeroDivisionError
        return len(batch[0])

    def monitor(**options: Any) -> NoiseScaleMonitor:
        return NoiseScaleMonitor(every_n_steps=1, **options)

    whole, resumed, failing = fits_on_ranks(
        lambda: run(monitor(), saves, enable_checkpointing=True),
        lambda: run(monitor(), ckpt_path=saved),
        lambda: run(monitor(batch_size_fn=examples), skipped=1),
    )

    for first, second in (whole, resumed, failing):
        assert first == second
    decisions = [call for call in own(resumed[0]) if call.shapes == ((4,),)]
    assert len(decisions) > 3
    assert own(whole[0])[-len(own(resumed[0])) :] == own(resumed[0])
    assert len(own(failing[0])) > STEPS
