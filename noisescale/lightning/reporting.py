# SPDX-License-Identifier: Apache-2.0
"""The report at the end of a fit: tables on the console, a page beside the logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noisescale.lightning import host
from noisescale.prediction import predict

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from noisescale.history import History


def report_run(trainer: pl.Trainer, histories: Sequence[History]) -> None:
    """Print and save what the run predicts. Call it on all ranks.

    The page is `noise_scale.html` in the trainer's log folder, of further optimizers
    `noise_scale_optimizer_1.html` and so on. A run that says nothing is told by a warning.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast: on every rank
    if not trainer.is_global_zero:
        return
    from noisescale.report.text import print_report

    for number, history in enumerate(histories):
        try:
            prediction = predict(history)
        except ValueError as reason:
            host.rank_zero_warn(f"NoiseScaleMonitor has nothing to report: {reason}")
            continue
        print_report(prediction)
        folder.mkdir(parents=True, exist_ok=True)
        page = f"noise_scale_optimizer_{number}.html" if number else "noise_scale.html"
        print(f"Report: {prediction.to_html(folder / page)}")
