# SPDX-License-Identifier: Apache-2.0
"""A fit whose rows share a draw: the monitor says so once, and the run has no noise scale."""

from pathlib import Path

import pytest
import torch
from fits import CLASSES, FEATURES, fit_here, heard
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from noisescale import NoiseScaleMonitor, read_run


class OneClass(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of one class each."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(CLASSES, (1,), generator=generator).expand(8)
        x = torch.nn.functional.one_hot(labels, FEATURES).float()
        return x + torch.randn(8, FEATURES, generator=generator), labels


def test_the_noise_scale_is_withheld_in_all_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)

    with heard() as messages:
        trainer = fit_here(
            monitor,
            train_loader=DataLoader(OneClass(), batch_size=None, shuffle=True),
            logger=CSVLogger(tmp_path, name="", version=""),
            log_every_n_steps=10,
        )
        trainer.save_checkpoint(tmp_path / "end.ckpt")

    (told,) = [message for message in messages if "alike" in message]
    assert told.startswith("NoiseScaleMonitor measures no more from here on. The rows of a batch")
    assert "Training goes on." in told
    assert trainer.global_step == 240
    assert not monitor.noise_scale.resolved
    assert torch.isnan(trainer.callback_metrics["noise_scale/simple"])
    assert monitor.history.withheld in told
    assert read_run(tmp_path).withheld == monitor.history.withheld
    assert read_run(tmp_path / "end.ckpt").withheld == monitor.history.withheld
