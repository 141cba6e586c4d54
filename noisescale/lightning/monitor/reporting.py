# SPDX-License-Identifier: Apache-2.0
"""The report at the end of a fit: text on the console, and a page for the run and its loggers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noisescale.extras import how_to_install, is_installed
from noisescale.guard import Guard
from noisescale.history.metric_names import prefix_of
from noisescale.lightning import trainer_access
from noisescale.prediction.predict import predict

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from noisescale.history.history import History


def warn_if_text_alone() -> None:
    """Warn that there will be no page, if plotly is not installed."""
    if not is_installed("plotly"):
        page = how_to_install("plotly", "The page with figures")
        trainer_access.rank_zero_warn(
            f"`NoiseScaleMonitor(report=True)` will only print the report as text. {page}"
        )


def report_run(
    trainer: pl.Trainer, histories: Sequence[History], guard: Guard, monitor: str | None = None
) -> None:
    """Print the prediction from a run and save it as a page, on one rank.

    The page is `noise_scale.html` in the run's own folder, see `run_folder`. A monitor with a name
    writes `noise_scale_<name>.html`. Further optimizers write `..._optimizer_1.html` and so on.
    W&B and MLflow store a copy with the run. Without plotly there is no page. If nothing can be
    predicted, a warning says why. `guard` keeps the error of one report away from the others.
    """
    if not trainer.is_global_zero:
        return
    from rich.console import Console

    from noisescale.report.text import print_document, text_of

    folder = run_folder(trainer)
    for number, history in enumerate(histories):
        try:
            prediction = predict(history)
        except ValueError as reason:
            trainer_access.rank_zero_warn(f"NoiseScaleMonitor has nothing to report: {reason}")
            continue
        print_document(Console(highlight=False), text_of(prediction.document()))
        if not is_installed("plotly"):
            continue
        prefix = prefix_of(number, monitor)
        with guard("There is no page of the noise scale"):
            folder.mkdir(parents=True, exist_ok=True)
            page = _page(folder, prefix, keep_others=not trainer.loggers)
            print(f"Figures, tables and assumptions: {prediction.to_html(page)}")
            for logger in trainer.loggers:
                with guard(f"{type(logger).__name__} did not get the page of the noise scale"):
                    hand_to(logger, page, f"{prefix}report")


def folders_of_loggers(trainer: pl.Trainer) -> list[Path]:
    """Return the folders for the record of this run, as rank zero sees them.

    They are the own folders of all loggers that have one. If none has one, it is `run_folder`.
    Without a logger it is the folder of the checkpoints, if there is one.

    Raises:
        ValueError: If one of them is not a folder of this machine.
    """
    loggers = [x for x in trainer.loggers if not isinstance(x, trainer_access.DUMMY_LOGGERS)]
    own = [folder for logger in loggers if (folder := _own_folder(logger)) is not None]
    if not own:
        kept = getattr(trainer.checkpoint_callback, "dirpath", None)
        own = [str(run_folder(trainer))] if loggers else [str(kept)] if kept else []
    if elsewhere := [folder for folder in own if "://" in folder]:
        raise ValueError(f"{elsewhere[0]} is not a folder of this machine")
    return [Path(folder) for folder in dict.fromkeys(own)]


def _own_folder(logger: Any) -> str | None:
    """Return the folder of a logger for this run. W&B uploads what is in it."""
    if isinstance(logger, trainer_access.WANDB_LOGGERS):
        run = logger.experiment
        return None if run.disabled else str(run.dir)
    folder = getattr(logger, "log_dir", None)
    return None if folder is None else str(folder)


def run_folder(trainer: pl.Trainer) -> Path:
    """Return the folder for files of this run, as rank zero sees it.

    It is the folder of the first logger. For W&B and MLflow, `trainer.log_dir` is one folder for
    all runs: there it is the folder in which a ModelCheckpoint would put its checkpoints. Without
    a logger it is `default_root_dir`, which other runs may share.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if (own := getattr(logger, "log_dir", None)) is not None:
        return Path(own)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)


def hand_to(logger: Any, page: Path, key: str) -> None:
    """Give the page of a run to a logger that stores files. Other loggers are ignored."""
    if isinstance(logger, trainer_access.WANDB_LOGGERS):
        import wandb

        logger.log_metrics({key: wandb.Html(str(page), inject=False)})
    elif isinstance(logger, trainer_access.MLFLOW_LOGGERS):
        logger.experiment.log_artifact(logger.run_id, str(page))


def hand_over_records(trainer: pl.Trainer, records: Iterable[Path], guard: Guard) -> None:
    """Give the record of a run to W&B and MLflow, which keep files with their runs on a server."""
    for logger in trainer.loggers:
        for record in records:
            with guard(f"{type(logger).__name__} did not get {record.name}"):
                if isinstance(logger, trainer_access.MLFLOW_LOGGERS):
                    logger.experiment.log_artifact(logger.run_id, str(record))
                elif isinstance(logger, trainer_access.WANDB_LOGGERS):
                    save_in_wandb(logger.experiment, record)


def save_in_wandb(run: Any, record: Path) -> None:
    """Have W&B upload a file now: of a run that crashes it gets nothing later."""
    if not run.disabled:
        run.save(str(record), base_path=str(record.parent), policy="now")


def _page(folder: Path, prefix: str, *, keep_others: bool) -> Path:
    """Return the file of a page. If runs share the folder, it is a file that does not exist yet."""
    stem = prefix.rstrip("/").replace("/", "_")
    page, version = folder / f"{stem}.html", 1
    while keep_others and page.exists():
        page = folder / f"{stem}-v{version}.html"  # as a ModelCheckpoint numbers its files
        version += 1
    return page
