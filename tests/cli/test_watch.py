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
from tiers import slow_after

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
    import fits
    import lightning.pytorch as L
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from noisescale import NoiseScaleMonitor

    class UntilTold(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            time.sleep(0.01)
            trainer.should_stop = (folder / "stop").exists()

    warnings.simplefilter("ignore")
    of_csv = CSVLogger(folder / "csv", flush_logs_every_n_steps=10)
    fits.trainer(
        1,
        strategy="auto",
        max_epochs=-1,
        logger=[TensorBoardLogger(folder / "tensorboard"), of_csv],
        log_every_n_steps=10,
        callbacks=[NoiseScaleMonitor(), UntilTold()],
    ).fit(fits.classifier(), fits.loader(16, 4096))


def steps(shown: str) -> list[int]:
    return [int(step.replace(",", "")) for step in re.findall(r"Step +([\d,]+) \(", shown)]


@pytest.mark.slow
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


def test_a_run_is_waited_for_shown_and_when_deleted_one_line_under_its_last_state(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    terminal = Terminal("watch", tmp_path / "run", "--every", "0.2")
    assert terminal.shows(lambda shown: "Waiting for a run" in shown)
    log_run(tmp_path / "run")
    assert terminal.shows(lambda shown: "1,000 (64,000 examples)" in shown)

    for file in (tmp_path / "run").iterdir():
        file.unlink()
    (tmp_path / "run").rmdir()
    code = terminal.ended()

    assert code == 2
    before, _, last = terminal.shown.replace("\r", "").strip().rpartition("noisescale: ")
    assert "must exist" in " ".join(last.split())
    assert "1,000 (64,000 examples)" in before[before.rindex("Step  ") :]


@pytest.mark.parametrize(
    ("sent", "code"), slow_after(1, [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
)
def test_signals_that_end_it_leave_the_cursor_visible(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    log_run(tmp_path)
    terminal = Terminal("watch", tmp_path)
    assert terminal.shows(lambda shown: "Press Ctrl-C to end." in shown)

    os.kill(terminal.pid, sent)

    assert terminal.ended() == code
    assert terminal.drawn.rindex(SHOWN) > terminal.drawn.rindex(HIDDEN)


@pytest.mark.parametrize("option", ["", "--once", "--once --every 2"])
def test_without_a_terminal_it_prints_once_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    log_run(Path("logs/version_0"))
    log_run(Path("logs/version_1"), noise_scale=96.0)

    output = run("watch", "logs", *option.split())

    lines = output.splitlines()
    assert "\x1b" not in output
    assert lines[0].strip() == "logs/version_1"
    assert "Ctrl-C" not in output
    assert any(re.fullmatch(r"Noise scale now +96.0 examples \(95 % .*", line) for line in lines)


def test_monitors_and_optimizers_are_chosen_and_no_run_is_no_error(tmp_path: Path) -> None:
    assert "Waiting for a run" in run("watch", tmp_path, "--once")
    log_run(tmp_path)
    log_run(tmp_path, optimizer=1, monitor="wide", noise_scale=50.0)

    assert "192 examples (95 %" in run("watch", tmp_path)
    assert "50.0 examples (95 %" in run("watch", tmp_path, "--monitor", "wide", "--optimizer", 1)
