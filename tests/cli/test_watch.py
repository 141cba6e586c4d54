# SPDX-License-Identifier: Apache-2.0
"""`noisescale watch`, beside trainings in other processes and in a terminal of its own."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from logged_runs import log_run
from program import run
from scripts import SERVER

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""What a terminal takes to hide the cursor, and to show it."""


class Terminal:
    """A command in a terminal of 100 columns."""

    def __init__(self, *arguments: object) -> None:
        self.drawn = self.shown = ""
        words = [sys.executable, "-c", "from noisescale.cli.app import main; main()"]
        self.pid, self._screen = pty.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
            os.execv(sys.executable, [*words, *map(str, arguments)])
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def shows(self, expected: Callable[[str], bool], seconds: float = 60.0) -> bool:
        """Wait until what was drawn is as expected; False after a while, or at the end."""
        end = time.monotonic() + seconds
        while not expected(self.shown) and time.monotonic() < end:
            if not self._read():
                break
        return expected(self.shown)

    def type(self, keys: bytes) -> None:
        os.write(self._screen, keys)

    def ended(self, seconds: float = 20.0) -> int:
        """The exit code."""
        end = time.monotonic() + seconds
        while self._read() and time.monotonic() < end:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        try:
            ready, _, _ = select.select([self._screen], [], [], 0.2)
            drawn = os.read(self._screen, 65536) if ready else b" "
        except OSError:  # Linux: the other side was closed
            return False
        self.drawn += drawn.decode(errors="ignore")
        self.shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.drawn)
        return bool(drawn)


@contextmanager
def training(folder: Path) -> Iterator[None]:
    process = SERVER.Process(target=train, args=(folder,))
    process.start()
    try:
        yield
    finally:
        (folder / "stop").touch()
        try:
            process.join(60)
            assert process.exitcode == 0
        finally:
            process.kill()


def train(folder: Path) -> None:
    """Train with both loggers until the file `stop` is there."""
    import torch
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
    from torch.utils.data import DataLoader, TensorDataset

    from noisescale import NoiseScaleMonitor

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 3)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            time.sleep(0.01)
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class UntilTold(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            trainer.should_stop = (folder / "stop").exists()

    warnings.simplefilter("ignore")
    of_csv = CSVLogger(folder / "csv", flush_logs_every_n_steps=10)
    torch.manual_seed(0)
    x = torch.randn(4096, 8)
    y = (x[:, :3] + torch.randn(4096, 3)).argmax(1)
    Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=[TensorBoardLogger(folder / "tensorboard"), of_csv],
        log_every_n_steps=10,
        callbacks=[NoiseScaleMonitor(), UntilTold()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(Model(), DataLoader(TensorDataset(x, y), batch_size=16))


def steps(shown: str) -> list[int]:
    return [int(step.replace(",", "")) for step in re.findall(r"Step +([\d,]+) \(", shown)]


def test_a_run_is_watched_while_another_process_trains_it(tmp_path: Path) -> None:
    terminals = []
    for logger in ("tensorboard", "csv"):
        (tmp_path / logger).mkdir()
        terminals.append(Terminal("watch", tmp_path / logger, "--every", "0.3"))
    waits = [each.shows(lambda shown: "Waiting for a run" in shown) for each in terminals]

    with training(tmp_path):
        grows = [each.shows(lambda shown: len(set(steps(shown))) >= 4) for each in terminals]
        for each in terminals:
            each.type(b"\x03")
        codes = [each.ended() for each in terminals]

    assert (waits, grows, codes) == ([True] * 2, [True] * 2, [0, 0]), terminals[0].shown
    for shown in (each.shown for each in terminals):
        assert steps(shown) == sorted(steps(shown))
        last = shown[shown.rindex("version_0") :]
        for name in ("Step ", "Batch size", "Noise scale", "Step time", "Critical batch size"):
            assert name in last
        assert "The last row came" in last
        assert "Ctrl-C" not in last  # once it has ended
        assert "Aborted" not in shown


def test_a_run_that_is_deleted_is_one_line_under_its_last_state(tmp_path: Path) -> None:
    log_run(tmp_path / "run")
    terminal = Terminal("watch", tmp_path / "run", "--every", "0.2")
    assert terminal.shows(lambda shown: "1,000 (64,000 examples)" in shown)

    for file in (tmp_path / "run").iterdir():
        file.unlink()
    (tmp_path / "run").rmdir()
    code = terminal.ended()

    assert code == 2
    *before, last = terminal.shown.replace("\r", "").strip().rsplit("noisescale: ", 1)
    assert "must exist while it is watched" in " ".join(last.split())
    assert "1,000 (64,000 examples)" in before[0][before[0].rindex("Step  ") :]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_that_end_it_leave_the_cursor_visible(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    log_run(tmp_path)
    terminal = Terminal("watch", tmp_path)
    assert terminal.shows(lambda shown: "Press Ctrl-C to end." in shown)

    os.kill(terminal.pid, sent)

    assert terminal.ended() == code
    assert terminal.drawn.rindex(SHOWN) > terminal.drawn.rindex(HIDDEN)


@pytest.mark.parametrize("option", [[], ["--once"], ["--once", "--every", "2"]])
def test_without_a_terminal_it_prints_once_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log_run(Path("logs/version_0"))
    log_run(Path("logs/version_1"), noise_scale=96.0)

    output = run("watch", "logs", *option)

    lines = output.splitlines()
    assert "\x1b" not in output
    assert [line.strip() for line in lines[:2]] == [
        "logs/version_1",
        "The newest of 2 runs in logs",
    ]
    assert "Ctrl-C" not in output
    assert any(re.fullmatch(r"Noise scale now +96.0 examples \(95 % .*", line) for line in lines)


def test_a_run_without_a_row_is_waited_for_with_success(tmp_path: Path) -> None:
    assert "Waiting for a run" in run("watch", tmp_path, "--once")


def test_monitors_and_optimizers_are_chosen(tmp_path: Path) -> None:
    log_run(tmp_path)
    log_run(tmp_path, optimizer=1, monitor="wide", noise_scale=50.0)

    assert "192 examples (95 %" in run("watch", tmp_path)
    assert "50.0 examples (95 %" in run("watch", tmp_path, "--monitor", "wide", "--optimizer", 1)
