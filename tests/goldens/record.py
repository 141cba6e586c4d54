# SPDX-License-Identifier: Apache-2.0
"""Train the runs, sweeps, searches and branches that `inputs/` holds. It takes some minutes.

    python -m goldens.record [NAME ...]          # in the folder `tests`

Trainings are not the same to the last bit on every machine. So what they leave is stored, and
`make.py` makes everything else from it. Run this only for an input that is new: every file that
`make.py` makes changes with its input.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from goldens.make import BRANCH, INPUTS, SWEEP, TUNE
from goldens.targets import Classifier, digits
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from noisescale import AdasumReduction, BatchSizeScheduler, NoiseScaleMonitor
from noisescale.hugging_face import NoiseScaleCallback

HERE = Path(__file__).parent


def fit(
    folder: Path,
    module: LightningModule,
    loaders: tuple[Any, ...],
    *,
    steps: int,
    log: type[TensorBoardLogger] | type[CSVLogger] = TensorBoardLogger,
    every: int = 5,
    callbacks: tuple[Any, ...] = (),
    monitor: NoiseScaleMonitor | None = None,
    ckpt_path: str | None = None,
    **settings: Any,
) -> Trainer:
    """Train, and leave the log in `folder` itself."""
    seed_everything(1, verbose=False)
    own = monitor or NoiseScaleMonitor()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        log_every_n_steps=every,
        logger=log(folder.parent, name=folder.name, version=""),
        callbacks=[own, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        num_sanity_val_steps=0,
        **settings,
    )
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


Record = Callable[[Path], Any]


def trained(batch_size: int, steps: int, module: Record = Classifier, **settings: Any) -> Record:
    """What trains on digits, and leaves its log in a folder."""
    return lambda folder: fit(folder, module(), digits(batch_size), steps=steps, **settings)


def resumed(first: int, saved: int, last: int) -> Record:
    """Killed at step `first`, resumed from step `saved`, and trained up to step `last`."""

    def train(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as made:
            keep = ModelCheckpoint(made, every_n_train_steps=saved, save_top_k=-1)
            fit(folder, Classifier(), digits(32), steps=first, callbacks=(keep,))
            file = str(next(Path(made).glob(f"*step={saved}.ckpt")))
            fit(folder, Classifier(), digits(32), steps=last, ckpt_path=file)

    return train


class Pictures(Callback):
    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step % 50 == 0:
            board = trainer.logger.experiment  # type: ignore[union-attr]
            noise = torch.rand(3, 24, 24)
            board.add_image("noise", noise, trainer.global_step)
            board.add_histogram("weights", noise, trainer.global_step)


def transformers(folder: Path) -> None:
    import transformers_fits as of

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder)
    rows = [{"x": x, "labels": y} for x, y in digits(32)[0].dataset]
    with tempfile.TemporaryDirectory() as made:
        settings = of.TrainingArguments(
            made,
            max_steps=400,
            per_device_train_batch_size=16,
            logging_steps=5,
            report_to=["tensorboard"],
            save_strategy="no",
            use_cpu=True,
            gradient_accumulation_steps=2,
            disable_tqdm=True,
            learning_rate=0.01,
        )
        model, callbacks = of.Classifier(Classifier().net), [NoiseScaleCallback()]
        of.Trainer(model, settings, train_dataset=rows, callbacks=callbacks).train()


# Forked ranks leave through `os._exit`, so the log is complete when `fit` returns.
TWO_RANKS: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}

RUNS: dict[str, Record] = {
    "plain": trained(32, 600),
    "momentum": trained(64, 400, lambda: Classifier(0.05, momentum=0.9)),
    "adamw_decayed": trained(64, 500, lambda: Classifier(0.003, "AdamW", decay=500)),
    "two_ranks": trained(32, 500, **TWO_RANKS),
    "accumulated": trained(16, 300, accumulate_grad_batches=4, every=3),
    "grown": trained(
        *(8, 900), callbacks=(BatchSizeScheduler(policy="tradeoff", max_batch_size=512),), every=10
    ),
    "near_full_batch": trained(700, 200, lambda: Classifier(0.4)),
    "resumed": resumed(300, 300, 500),
    "resumed_earlier": resumed(400, 200, 450),
    "resumed_and_shorter": resumed(400, 150, 250),
    "grouped": trained(
        32, 300, monitor=NoiseScaleMonitor(groups={"first": ["net.0.*"], "last": ["net.2.*"]})
    ),
    "skipping": trained(32, 300, lambda: Classifier(broken=(50, 51, 120))),
    # The stored run compared single examples, which earlier versions did.
    "each_step": trained(16, 300, monitor=NoiseScaleMonitor(every_n_steps=1)),
    "two_monitors": trained(32, 200, callbacks=(NoiseScaleMonitor(name="other", window=50),)),
    "adasum": trained(
        32, 200, lambda: Classifier(0.1), callbacks=(AdasumReduction(),), **TWO_RANKS
    ),
    "with_pictures": trained(32, 300, callbacks=(Pictures(),)),
    "transformers": transformers,
}


def states(folder: Path) -> None:
    """Checkpoints' parts of ours, as `torch.save` leaves them."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        keep = ModelCheckpoint(made, every_n_train_steps=150, save_top_k=-1)
        monitor = NoiseScaleMonitor(groups={"first": ["net.0.*"]})
        scheduler = BatchSizeScheduler(policy="tradeoff", max_batch_size=512)
        callbacks = (scheduler, keep)
        run = Path(made) / "run"
        fit(run, Classifier(), digits(8), steps=150, monitor=monitor, callbacks=callbacks)
        saved = torch.load(next(Path(made).glob("*.ckpt")), weights_only=True)
        kept = {
            name: state
            for name, state in saved["callbacks"].items()
            if "Noise" in name or "Scheduler" in name
        }
        torch.save(kept, folder / "callbacks.pt")


def _command(*arguments: str, cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", "noisescale", *arguments], cwd=cwd, check=True)


TARGET = "targets.py:make"


def _working(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(HERE / "targets.py", folder)
    return folder


def sweep(folder: Path) -> None:
    _command("sweep", TARGET, *SWEEP, cwd=_working(folder))


def tune(folder: Path) -> None:
    _command("tune", TARGET, *TUNE, cwd=_working(folder))


def branch(folder: Path) -> None:
    folder = _working(folder)
    keep = ModelCheckpoint(folder / "saved", every_n_train_steps=100, save_top_k=-1)
    fit(folder / "run", Classifier(), digits(16), steps=200, callbacks=(keep,))
    _command("branch", "run", "saved", "targets.py:alone", *BRANCH, cwd=folder)


def profile(folder: Path) -> None:
    _command(
        *("profile", "targets.py:alone", "--device-batch-sizes", "8,32,128,512"),
        *("--accumulation", "1,2", "--accelerator", "cpu"),
        cwd=_working(folder),
    )


def trials(folder: Path) -> None:
    """Runs of two optimizers at three batch sizes and learning rates, for `compare`."""
    for optimizer, rates in {"SGD": (0.05, 0.2, 0.8), "AdamW": (0.001, 0.004, 0.016)}.items():
        for batch_size in (16, 64, 256):
            for rate in rates:
                name = f"{batch_size}-{rate:g}"
                module = Classifier(rate, optimizer)
                fit(
                    folder / optimizer.lower() / name, module, digits(batch_size),
                    steps=3000 // batch_size ** 0.5 // 10 * 10 // 1, log=CSVLogger, every=20,
                    val_check_interval=5, check_val_every_n_epoch=None,
                )  # fmt: skip


OTHERS: tuple[Any, ...] = (states, sweep, tune, branch, profile, trials)


EVENTS = ("plain", "two_monitors", "with_pictures", "transformers")
"""Inputs of which TensorBoard's event files are kept: the others' records say all."""


def without_names(folder: Path) -> None:
    """Leave out what is of the machine alone: its name, and what workers printed."""
    host = socket.gethostname()
    for file in folder.rglob("events*") if folder.name not in EVENTS else ():
        file.unlink()
    for file in [*folder.rglob("events*"), *folder.rglob("*.journal")]:
        content = file.read_bytes().replace(f'"{host}"'.encode(), b'"host"')
        content = content.replace(f'\\"{host}\\"'.encode(), b'\\"host\\"')
        file.unlink()
        file.with_name(re.sub(rf"\.{host}\.\d+\.(\d+)$", r".host.\1", file.name)).write_bytes(
            content
        )
    for copy in folder.glob("targets.py"):
        copy.unlink()
    for made in [*folder.rglob("workers"), *folder.rglob("trials"), *folder.rglob("__pycache__")]:
        shutil.rmtree(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = RUNS | {each.__name__: each for each in OTHERS}
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*known, []])
    names = parser.parse_args().names or list(known)
    warnings.simplefilter("ignore")
    for name in names:
        folder = INPUTS / name
        shutil.rmtree(folder, ignore_errors=True)
        known[name](folder)
        without_names(folder)
        print(name, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()), flush=True)


if __name__ == "__main__":
    main()
