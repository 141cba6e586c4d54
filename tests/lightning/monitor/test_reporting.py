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
from fits import CLASSES, FEATURES, classifier, fit, fit_here, loader
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tiers import slow
from torch import nn

from noisescale import History, NoiseScaleMonitor
from noisescale.guard import Guard
from noisescale.lightning import trainer_access
from noisescale.lightning.monitor import reporting
from noisescale.lightning.monitor.reporting import report_run
from noisescale.prediction.closing import closing_lines


def test_a_fit_ends_with_the_answers_and_a_page_beside_the_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On one rank alone, of two that train in processes of their own."""
    fit(
        NoiseScaleMonitor(report=True, unit="rows"),
        train_loader=loader(10, 800),
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=4,
    )

    printed = capfd.readouterr().out.replace("\n", "")
    assert printed.count("batch size 20 on 2 devices") == 1
    assert "rows" in printed
    assert printed.count(f"{tmp_path}/noise_scale.html") == 1
    assert "2 devices" in (tmp_path / "noise_scale.html").read_text()


def test_without_a_report_a_fit_ends_with_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(trainer_access, "rank_zero_info", said.append)
    monitor = NoiseScaleMonitor(every_n_steps=1)

    fit_here(monitor, train_loader=loader(10, 200), logger=CSVLogger(tmp_path, "", ""))

    assert said[-1] == f"NoiseScaleMonitor: {closing_lines([monitor.history], tmp_path)}"


def test_a_fit_without_a_logger_ends_with_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(trainer_access, "rank_zero_info", said.append)
    monitor = NoiseScaleMonitor(every_n_steps=1)

    fit_here(monitor, train_loader=loader(10, 200))

    line = closing_lines([monitor.history], None, host="NoiseScaleMonitor")
    assert said[-1] == f"NoiseScaleMonitor: {line}"
    assert "Next: print(noisescale.predict(x)" in line


def test_a_fit_that_is_not_measured_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(trainer_access, "rank_zero_info", said.append)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    with pytest.warns(UserWarning, match="nothing to measure"):
        fit_here(NoiseScaleMonitor(), model=classifier(net=net), train_loader=loader(10, 200))

    assert said[-1].startswith("NoiseScaleMonitor: Not measured. The rows of a batch must not")
    assert "accumulate_grad_batches=2" in said[-1]


def test_one_optimizer_that_tells_nothing_leaves_the_others_their_pages(tmp_path: Path) -> None:
    """Without a logger, in a folder that is not there yet."""
    trainer = rank_zero(tmp_path / "new")

    with pytest.warns(UserWarning, match="nothing to report"):
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


def logger_of(
    kind: str, folder: Path, run: str, monkeypatch: pytest.MonkeyPatch, package: Any = L
) -> tuple[Any, list[Any]]:
    """Lightning's, as it is once its experiment has been made, and what it is handed.

    That is by `experiment.log(data)` with `wandb.Html(data, inject=...)`, or by
    `experiment.log_artifact(run_id, local_path)`.
    """
    logged: list[Any] = []

    def log_artifact(run_id: str, local_path: str, artifact_path: Any = None) -> None:
        logged.append((run_id, Path(local_path)))

    html = SimpleNamespace(Html=lambda data, inject=True: ("html", Path(data), inject))
    monkeypatch.setitem(sys.modules, "wandb", html)
    cls = getattr(package.loggers, kind)
    experiment = SimpleNamespace(id=run, log=logged.append, log_artifact=log_artifact)
    monkeypatch.setattr(cls, "experiment", property(lambda self: self._experiment))
    logger = object.__new__(cls)
    vars(logger).update(_experiment=experiment, _mlflow_client=experiment)
    if kind == "WandbLogger":
        of_wandb = {"_project": "digits", "_save_dir": str(folder), "_prefix": ""}
        vars(logger).update(of_wandb, _wandb_init={})
    else:
        vars(logger).update(_run_id=run, _experiment_id="7", _tracking_uri=f"file:{folder}")
    return logger, logged


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("WandbLogger", L),
        ("MLFlowLogger", pytorch_lightning),
        slow("WandbLogger", pytorch_lightning),
        slow("MLFlowLogger", L),
    ],
)
def test_runs_of_one_project_keep_a_report_each_and_hand_it_to_their_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: Any
) -> None:
    of_all = "digits" if kind == "WandbLogger" else "7"
    for run, optimizers in (("first", 2), ("second", 1)):
        logger, logged = logger_of(kind, tmp_path, run, monkeypatch, package)

        report_run(rank_zero(tmp_path, logger), [told()] * optimizers, Guard())

        own = tmp_path / of_all / run
        pages = [own / "noise_scale.html", own / "noise_scale_optimizer_1.html"][:optimizers]
        assert all("plotly" in page.read_text() for page in pages)
        if kind == "WandbLogger":
            keys = ["noise_scale/report", "noise_scale/optimizer_1/report"]
            assert logged == [{k: ("html", p, False)} for k, p in zip(keys, pages, strict=False)]
        else:
            assert logged == [(run, page) for page in pages]


def test_every_logger_that_keeps_files_is_handed_the_page_of_the_first_ones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CSVLogger(tmp_path, name="csv", version=3)
    wandb, to_wandb = logger_of("WandbLogger", tmp_path, "a", monkeypatch)
    mlflow, to_mlflow = logger_of("MLFlowLogger", tmp_path, "b", monkeypatch)

    report_run(rank_zero(tmp_path, first, wandb, mlflow), [told()], Guard(), "wide")

    page = tmp_path / "csv/version_3/noise_scale_wide.html"
    assert to_wandb == [{"noise_scale/wide/report": ("html", page, False)}]
    assert to_mlflow == [("b", page)]
    assert list(tmp_path.rglob("*.html")) == [page]


def test_a_tracking_server_keeps_no_files_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the page is under the Trainer's own folder, as its checkpoints are."""
    mlflow, logged = logger_of("MLFlowLogger", tmp_path, "b", monkeypatch)
    mlflow._tracking_uri = "https://example.org"

    report_run(rank_zero(tmp_path, mlflow), [told()], Guard())

    assert logged == [("b", tmp_path / "7/b/noise_scale.html")]


@pytest.mark.parametrize(
    ("loggers", "pages"),
    [
        ([], ["noise_scale-v1.html", "noise_scale-v2.html", "noise_scale.html"]),
        ([TensorBoardLogger], ["noise_scale.html"]),
    ],
    ids=["no logger", "the run's own folder"],
)
def test_no_run_overwrites_anothers_report_and_a_second_fit_brings_its_own_up_to_date(
    loggers: list[Any], pages: list[str], tmp_path: Path
) -> None:
    for _ in range(3):
        own = [logger(tmp_path, "", "") for logger in loggers]
        report_run(rank_zero(tmp_path, *own), [told()], Guard())

    assert sorted(page.name for page in tmp_path.glob("*.html")) == pages


def test_a_fit_that_measured_nothing_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nothing to report: `run` must"):
        fit_here(NoiseScaleMonitor(report=True), logger=CSVLogger(tmp_path, "", ""), max_steps=0)

    assert not (tmp_path / "noise_scale.html").exists()


def test_without_being_asked_nothing_is_printed_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit_here(
        NoiseScaleMonitor(every_n_steps=1),
        train_loader=loader(10, 800),
        logger=CSVLogger(tmp_path, "", ""),
        log_every_n_steps=4,
    )

    assert not re.search("batch size|Report", capsys.readouterr().out)
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
    batches = loader(8, 800)

    with pytest.warns(UserWarning, match="no page .*(FileExists|NotADirectory)"):
        fitting = fit_here(monitor, in_the_way, logger=logger, train_loader=batches)

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

    with pytest.warns(UserWarning, match="CSVLogger.*no answer"):
        report_run(trainer, [told()], Guard())

    assert given == [tmp_path / "noise_scale.html"]
