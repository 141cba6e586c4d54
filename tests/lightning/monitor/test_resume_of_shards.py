# SPDX-License-Identifier: Apache-2.0
"""FSDP2's strategy restores a checkpoint after its setup, when the meters are there already."""

from pathlib import Path
from typing import Any

import pytest
from fits import classifier, fit_sharded, loader, needs_measurable_shards
from lightning.pytorch.callbacks import ModelCheckpoint

from noisescale import NoiseScaleMonitor


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@needs_measurable_shards
def test_averages_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    def measured_steps(max_steps: int, **options: Any) -> list[Any]:
        saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        return fit_sharded(
            NoiseScaleMonitor(every_n_steps=1),
            saves,
            model=classifier(sharded=True),
            train_loader=loader(8, 400),
            max_steps=max_steps,
            enable_checkpointing=True,
            log_every_n_steps=1,
            results=lambda fitting, _: fitting.callbacks[0].history["measured_steps"].tolist(),
            **options,
        )

    assert measured_steps(4) == [[1, 2, 3, 4]] * 2
    assert measured_steps(6, ckpt_path=tmp_path / "step=4.ckpt") == [[1, 2, 3, 4, 5, 6]] * 2
