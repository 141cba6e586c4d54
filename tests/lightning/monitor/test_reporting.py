# SPDX-License-Identifier: Apache-2.0
"""`NoiseScaleMonitor(report=True)`: what a fit ends with."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
from fits import classifier, fit, loader, trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from noisescale import History, NoiseScaleMonitor
from noisescale.guard import Guard
from noisescale.lightning.monitor import reporting
from noisescale.lightning.monitor.reporting import report_run


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


def test_a_fit_ends_with_the_answers_and_a_page_beside_the_logs(
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
    assert printed.count("You train at batch size 20 on 2 devices") == 1
    assert "rows" in printed
    assert f"Figures, tables and assumptions: {tmp_path}/noise_scale.html" in printed.replace(
        "\n", ""
    )
    page = (tmp_path / "noise_scale.html").read_text()
    assert "DecompressionStream" in page
    assert "the run's own 2 devices".replace("'", "&#x27;") in page


def test_one_optimizer_that_tells_nothing_leaves_the_others_their_pages(tmp_path: Path) -> None:
    """Without a logger, in a folder that is not there yet."""
    trainer = rank_zero(tmp_path / "new")

    with pytest.warns(UserWarning, match="NoiseScaleMonitor has nothing to report"):
        report_run(trainer, [told(), History(), told()], Guard())

    pages = ["noise_scale.html", "noise_scale_optimizer_2.html"]
    assert sorted(page.name for page in (tmp_path / "new").iterdir()) == pages


def rank_zero(folder: Path, *loggers: Any) -> Any:
    return SimpleNamespace(default_root_dir=folder, is_global_zero=True, loggers=list(loggers))


def told() -> History:
    history = History()
    for step in range(10, 101, 10):
        history.append(
            step=step, examples=32 * step, batch_size=32, noise_scale=20, low=15, high=30
        )
    return history


def without_starting_it(logger: type, **attributes: Any) -> Any:
    """A logger of Lightning's as it is once its experiment has been made, which needs a package."""
    made = object.__new__(logger)
    vars(made).update(attributes)
    return made


def wandb_logger(
    folder: Path, run: str, monkeypatch: pytest.MonkeyPatch, package: Any = L
) -> tuple[Any, list[Any]]:
    """W&B's, in which `experiment.log(data)` and `wandb.Html(data, inject=...)` are recorded."""
    logged: list[Any] = []
    html = SimpleNamespace(Html=lambda data, inject=True: ("html", Path(data), inject))
    monkeypatch.setitem(sys.modules, "wandb", html)
    experiment = SimpleNamespace(id=run, log=logged.append)
    cls = package.loggers.WandbLogger
    monkeypatch.setattr(cls, "experiment", property(lambda self: self._experiment))
    logger = without_starting_it(
        cls, _experiment=experiment, _project="digits", _save_dir=str(folder), _prefix="",
        _wandb_init={},
    )  # fmt: skip
    return logger, logged


def mlflow_logger(
    folder: Path, run: str, monkeypatch: pytest.MonkeyPatch, package: Any = L
) -> tuple[Any, list[Any]]:
    """MLflow's, in which `experiment.log_artifact(run_id, local_path)` is recorded."""
    logged: list[Any] = []
    client = SimpleNamespace(
        log_artifact=lambda run_id, local_path, artifact_path=None: logged.append(
            (run_id, Path(local_path))
        )
    )
    cls = package.loggers.MLFlowLogger
    monkeypatch.setattr(cls, "experiment", property(lambda self: self._mlflow_client))
    logger = without_starting_it(
        cls, _mlflow_client=client, _run_id=run, _experiment_id="7", _tracking_uri=f"file:{folder}"
    )
    return logger, logged


@pytest.mark.parametrize("package", [L, pytorch_lightning])
@pytest.mark.parametrize(("make", "of_all"), [(wandb_logger, "digits"), (mlflow_logger, "7")])
def test_runs_of_one_project_keep_a_report_each_and_hand_it_to_their_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, of_all: str, package: Any
) -> None:
    for run in ("first", "second"):
        logger, logged = make(tmp_path, run, monkeypatch, package)

        report_run(rank_zero(tmp_path, logger), [told(), told()], Guard())

        own = tmp_path / of_all / run
        pages = [own / "noise_scale.html", own / "noise_scale_optimizer_1.html"]
        assert all("plotly" in page.read_text() for page in pages)
        if make is wandb_logger:
            keys = ["noise_scale/report", "noise_scale/optimizer_1/report"]
            assert logged == [{k: ("html", p, False)} for k, p in zip(keys, pages, strict=True)]
        else:
            assert logged == [(run, page) for page in pages]


def test_every_logger_that_keeps_files_is_handed_the_page_of_the_first_ones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CSVLogger(tmp_path, name="csv", version=3)
    wandb, to_wandb = wandb_logger(tmp_path, "a", monkeypatch)
    mlflow, to_mlflow = mlflow_logger(tmp_path, "b", monkeypatch)

    report_run(rank_zero(tmp_path, first, wandb, mlflow), [told()], Guard(), "wide")

    page = tmp_path / "csv/version_3/noise_scale_wide.html"
    assert to_wandb == [{"noise_scale/wide/report": ("html", page, False)}]
    assert to_mlflow == [("b", page)]
    assert list(tmp_path.rglob("*.html")) == [page]


def test_a_tracking_server_keeps_no_files_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the page is under the Trainer's own folder, as its checkpoints are."""
    mlflow, logged = mlflow_logger(tmp_path, "b", monkeypatch)
    mlflow._tracking_uri = "https://example.org"

    report_run(rank_zero(tmp_path, mlflow), [told()], Guard())

    assert logged == [("b", tmp_path / "7/b/noise_scale.html")]


def test_without_a_logger_no_run_overwrites_anothers_report(tmp_path: Path) -> None:
    for _ in range(3):
        report_run(rank_zero(tmp_path), [told()], Guard())

    names = ["noise_scale-v1.html", "noise_scale-v2.html", "noise_scale.html"]
    assert sorted(page.name for page in tmp_path.iterdir()) == names


def test_in_the_folder_of_a_run_a_second_fit_brings_the_report_up_to_date(tmp_path: Path) -> None:
    for _ in range(2):
        report_run(rank_zero(tmp_path, TensorBoardLogger(tmp_path, "", "")), [told()], Guard())

    assert [page.name for page in tmp_path.glob("*.html")] == ["noise_scale.html"]


def test_a_fit_that_measured_nothing_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="NoiseScaleMonitor has nothing to report: `run` must"):
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

    with pytest.warns(UserWarning, match="no page of the noise scale: (FileExists|NotADirectory)"):
        fitting.fit(classifier(), loader(8, 800))

    assert fitting.state.finished


def test_a_logger_that_refuses_the_page_leaves_it_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path] = []

    def hand_to(logger: Any, page: Path, key: str) -> None:
        if isinstance(logger, CSVLogger):
            raise ConnectionError("no answer")
        given.append(page)

    monkeypatch.setattr(reporting, "hand_to", hand_to)
    trainer = rank_zero(tmp_path, CSVLogger(tmp_path, "", ""), TensorBoardLogger(tmp_path, "", ""))

    with pytest.warns(UserWarning, match="CSVLogger did not get the page.*no answer"):
        report_run(trainer, [told()], Guard())

    assert given == [tmp_path / "noise_scale.html"]
