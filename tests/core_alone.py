# SPDX-License-Identifier: Apache-2.0
"""What works where no extra is installed.

    python -P tests/core_alone.py

`test_core_alone.py` runs it, and so does the workflow after `pip install .`; -P keeps the folders
of tests from being taken for packages.
"""

import importlib.util
import os
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

OPTIONAL = ("accelerate", "lightning", "optuna", "plotly", "ray", "sklearn", "submitit")
OPTIONAL += ("tensorboard", "transformers")


def main(folder: Path) -> None:
    there = [package for package in OPTIONAL if importlib.util.find_spec(package) is not None]
    assert not there, f"{there} must not be installed"

    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import noisescale
    from noisescale import BatchSizeScheduler, NoiseScaleMeter, NoiseScaleMonitor, predict
    from noisescale.extras import MissingExtraError
    from noisescale.history.reading import read_run

    pl.seed_everything(0, verbose=False)
    x = torch.randn(512, 8)
    data = TensorDataset(x, (x[:, :3] + torch.randn(512, 3)).argmax(1))

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def fitted(*callbacks: pl.Callback) -> pl.Trainer:
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=4,
            accumulate_grad_batches=2,
            callbacks=list(callbacks),
            logger=pl.loggers.CSVLogger(folder, name="", version=""),
            log_every_n_steps=8,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Classifier(), DataLoader(data, batch_size=4, shuffle=True))
        return trainer

    monitor = NoiseScaleMonitor(report=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(monitor)
    said = [str(warning.message) for warning in caught if "noisescale[" in str(warning.message)]
    assert said == [
        "`NoiseScaleMonitor(report=True)` will only print the report as text. The page with"
        ' figures needs plotly, which is not installed. Run: pip install "noisescale[report]"'
    ], said
    assert monitor.noise_scale.steps > 20
    assert not list(folder.glob("*.html"))

    prediction = predict(read_run(folder))
    assert "Critical batch size" in prediction.to_text()
    for draw in (prediction.figure, lambda: prediction.to_html(folder / "report.html")):
        with suppress(MissingExtraError):
            draw()
            raise AssertionError("drawn without plotly")

    trainer = fitted(BatchSizeScheduler(policy=lambda *_: 32))
    assert trainer.accumulate_grad_batches == 2
    assert trainer.callback_metrics["batch_size/given"] == 32

    model = nn.Linear(8, 3)
    meter = NoiseScaleMeter(model)
    for start in range(0, 512, 8):
        meter.backward(model(x[start : start + 8]).square().mean(), local_batch_size=8)
        meter.step()
        model.zero_grad()
    assert meter.noise_scale.steps > 3
    print(f"noisescale {noisescale.__version__} works without extras")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(Path(folder)))
