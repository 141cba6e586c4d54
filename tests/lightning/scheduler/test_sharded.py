# SPDX-License-Identifier: Apache-2.0
"""Batch sizes that change where each rank keeps a shard: a step takes more micro-batches."""

from pathlib import Path
from typing import Any

import pytest
from fits import FsdpAnywhere, classifier, fit_sharded, loader
from lightning.pytorch.callbacks import ModelCheckpoint

from noisescale import BatchSizeScheduler, NoiseScaleMonitor


def run(*callbacks: Any, **options: Any) -> list[Any]:
    scheduler = BatchSizeScheduler({0: 16, 2: 48}, max_batch_size=48, lr_scaling="none")

    def results(fitting: Any, module: Any) -> Any:
        sizes = fitting.callbacks[0].history["batch_size"].tolist()
        skipped = fitting.callback_metrics["noise_scale/skipped_steps"].item()
        return fitting.global_step, sizes, skipped

    return fit_sharded(
        NoiseScaleMonitor(every_n_steps=1),
        scheduler,
        *callbacks,
        train_loader=loader(8, 16 * 14),
        results=results,
        log_every_n_steps=1,
        **options,
    )


@pytest.mark.parametrize(
    "flat",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["FSDP2", "FSDP1"],
)
def test_a_step_takes_more_micro_batches_and_is_measured(flat: bool) -> None:
    options: dict[str, Any] = {"model": classifier(sharded=not flat)}
    if flat:
        options["strategy"] = FsdpAnywhere()

    for steps, sizes, skipped in run(**options):
        assert steps == 6
        assert sizes == [16, 16, 48, 48, 48, 48]
        assert skipped == 0


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.slow
def test_a_batch_size_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """FSDP2's strategy restores it after its setup."""
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)

    whole = run(saves, model=classifier(sharded=True), enable_checkpointing=True)
    resumed = run(model=classifier(sharded=True), ckpt_path=tmp_path / "step=3.ckpt")

    assert resumed == whole


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(AssertionError, match="tensor_parallel_size"):
        run(model=classifier(sharded=True), tensor_parallel=2)
