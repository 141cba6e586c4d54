# SPDX-License-Identifier: Apache-2.0
"""`NoiseScaleMonitor(report=True)`: what a fit ends with."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
from fits import classifier, fit, loader, trainer
from lightning.pytorch.loggers import CSVLogger

from noisescale import History, NoiseScaleMonitor
from noisescale.lightning.reporting import report_run


def fit_in_this_process(folder: Path, **options: Any) -> None:
    L.Trainer(
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[NoiseScaleMonitor(report=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accumulate_grad_batches=2,
        **options,
    ).fit(classifier(), loader(8, 160))


def test_a_fit_ends_with_tables_and_a_page_beside_the_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On one rank alone, of two that train in processes of their own."""
    fit(
        NoiseScaleMonitor(report=True, unit="rows"),
        train_loader=loader(10, 2000),
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=4,
    )

    printed = capfd.readouterr().out
    assert printed.count("On the run's own 2 devices") == 1
    assert "rows" in printed
    assert f"Report: {tmp_path}/noise_scale.html" in printed.replace("\n", "")
    page = (tmp_path / "noise_scale.html").read_text()
    assert "plotly.js v" in page
    assert "the run's own 2 devices".replace("'", "&#x27;") in page


def test_one_optimizer_that_tells_nothing_leaves_the_others_their_pages(tmp_path: Path) -> None:
    """Without a logger, in a folder that is not there yet."""
    told = History()
    for step in range(10, 101, 10):
        told.append(step=step, examples=32 * step, batch_size=32, noise_scale=20, low=15, high=30)
    trainer: Any = SimpleNamespace(
        log_dir=None, default_root_dir=tmp_path / "new", is_global_zero=True
    )

    with pytest.warns(UserWarning, match="NoiseScaleMonitor has nothing to report"):
        report_run(trainer, [told, History(), told])

    pages = ["noise_scale.html", "noise_scale_optimizer_2.html"]
    assert sorted(page.name for page in (tmp_path / "new").iterdir()) == pages


def test_a_fit_that_measured_nothing_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="NoiseScaleMonitor has nothing to report: `history` must"):
        fit_in_this_process(tmp_path, max_steps=0)

    assert not (tmp_path / "noise_scale.html").exists()


def test_without_being_asked_nothing_is_printed_or_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(NoiseScaleMonitor(), logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=2)

    assert not re.search("batch size|Report", capfd.readouterr().out)
    assert not (tmp_path / "noise_scale.html").exists()


def test_a_report_that_cannot_be_written_does_not_end_the_fit(tmp_path: Path) -> None:
    """Its folder is a file by the end of the fit."""

    class FileInPlaceOfTheFolder(L.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            shutil.rmtree(tmp_path / "logs")
            (tmp_path / "logs").write_text("")

    class Logger(CSVLogger):
        log_dir = property(lambda self: str(tmp_path / "logs"))

        def save(self) -> None:
            pass

    logger = Logger(tmp_path, name="", version="")
    monitor, in_the_way = NoiseScaleMonitor(report=True), FileInPlaceOfTheFolder()
    options: dict[str, Any] = {"strategy": "auto", "accumulate_grad_batches": 2}
    fitting = trainer(1, logger=logger, callbacks=[monitor, in_the_way], **options)

    with pytest.warns(
        UserWarning, match="no report of the noise scale: (FileExists|NotADirectory)"
    ):
        fitting.fit(classifier(), loader(8, 800))

    assert fitting.state.finished
