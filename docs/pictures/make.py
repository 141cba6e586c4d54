# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of the docs, from a run that is trained for them.

    python docs/pictures/make.py [--keep FOLDER]

It trains examples/digits_ddp.py, runs the commands on it, and photographs the report and
TensorBoard in Chromium (playwright; the path of a browser that is installed: `--browser`).
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
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent.parent
PICTURES = Path(__file__).parent
BIN = Path(sys.executable).parent
WIDTH = 92

TRAIN = """
import sys

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import optim
from torch.utils.data import DataLoader

from digits_ddp import DigitClassifier, digits
from noisescale import NoiseScaleMonitor


class Model(DigitClassifier):
    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=self.lr)


def make(batch_size=64, lr=0.8):
    seed_everything(0)
    model = Model()
    model.lr = lr
    images = digits(batch_size)[0].dataset
    return model, DataLoader(images, batch_size, shuffle=True, drop_last=True)


if __name__ == "__main__":
    name, batch_size, lr, steps = sys.argv[1], *map(float, sys.argv[2:])
    model, train = make(int(batch_size), lr)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=int(steps),
        max_epochs=-1,
        log_every_n_steps=2,
        logger=TensorBoardLogger(".", name="", version=name),
        callbacks=[NoiseScaleMonitor()],
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, train, digits(64)[1])
"""
"""Two runs at learning rates that suit their batch sizes, for a second opinion."""

SWEEP = """batch_size,steps
16,720
32,405
64,242
128,168
256,131
"""

SCHEDULED = [sys.executable, "examples/digits_ddp.py", "--schedule", "--batch-size", "2"]


SWEPT = """
from torch import nn, optim

from digits_ddp import DigitClassifier, digits


class Model(DigitClassifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.3)


def make():
    return Model(), digits(16)
"""


ALONE = """() => {
  const parts = ["h1", ".lead", "main > .scroll", "figure:has(#noise-scale)"];
  const main = document.querySelector("main");
  main.replaceChildren(...parts.map(part => document.querySelector(part)));
  main.style.padding = "12px 20px";
  document.querySelector("figure").style.marginTop = "24px";
}"""
"""Leave the verdict, the batch sizes, and the noise scale along the run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="a folder with the runs, made if it is not there")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.keep or Path(made)
        logs = folder / "lightning_logs"
        if not logs.exists():
            run([sys.executable, ROOT / "examples/digits_ddp.py", "--logs", logs], ROOT)
            (folder / "run").symlink_to(logs / "digits/version_0")
        terminal("predict", "noisescale predict run --html report.html", folder)
        terminal("watch", "noisescale watch run --once", folder)
        if not (folder / "train.py").exists():
            (folder / "sweep.csv").write_text(SWEEP)
            (folder / "train.py").write_text(TRAIN)
            run([sys.executable, "train.py", "run_at_64", "64", "0.8", "300"], folder)
            run([sys.executable, "train.py", "run_at_1024", "1024", "1.0", "200"], folder)
        second = "--second-run run_at_1024 --goal 'accuracy>=0.93'"
        terminal("second_run", f"noisescale predict run_at_64 {second}", folder)
        terminal("fit", "noisescale fit sweep.csv", folder)
        swept = folder / "swept"
        swept.mkdir(exist_ok=True)
        if not (swept / "sweep.csv").exists():
            run([sys.executable, ROOT / "examples/optimizer_sweep.py"], swept)
        goal = "--goal 'val_loss<=0.15' --by steps"
        terminal("compare", f"noisescale compare sweep.csv {goal} --html report.html", swept)
        options = "--goal 'val_loss<=0.25' --batch-sizes 16,64,256 --trials 5"
        (folder / "digits.py").write_text(SWEPT)
        title = f"noisescale sweep digits.py:make {options}"
        terminal("sweep", f"{title} --workers 2", folder, title=title)
        terminal("profile", "noisescale profile train.py:make --accelerator cpu", folder)
        terminal("measure", "noisescale measure train.py:make --accelerator cpu", folder)
        scheduled = folder / "scheduled"  # apart from the logs that TensorBoard shows
        scheduled.mkdir(exist_ok=True)
        if not (scheduled / "examples").exists():
            (scheduled / "examples").symlink_to(ROOT / "examples")
        run(SCHEDULED, scheduled)
        with browser(arguments.browser) as page:
            page.goto((folder / "report.html").as_uri())
            page.wait_for_timeout(2000)
            in_both_themes(page, "figure:has(#savings)", "report")
            page.set_viewport_size({"width": 760, "height": 800})  # so that phones can show it
            in_both_themes(page, "main", "readme", ALONE)
            page.set_viewport_size({"width": 1200, "height": 800})
            page.goto((swept / "report.html").as_uri())
            page.wait_for_timeout(2000)
            in_both_themes(page, "figure:has(#steps)", "compare")
            both = folder / "both"
            for name, trained in (("fixed", logs), ("scheduled", scheduled / "lightning_logs")):
                shutil.copytree(trained / "digits/version_0", both / name, dirs_exist_ok=True)
            with tensorboard(both) as address:
                page.set_viewport_size({"width": 1200, "height": 900})  # with the table
                page.goto(f"{address}/#noise_scale")
                for theme, suffix in (("light", ""), ("dark", "_dark")):
                    page.emulate_media(color_scheme=theme)
                    page.reload()
                    drawn = page.frame_locator("iframe").locator(".main-svg").first
                    drawn.wait_for(timeout=120_000)
                    page.wait_for_timeout(2000)
                    page.screenshot(path=PICTURES / f"tab{suffix}.png")
                page.emulate_media(color_scheme="light")
            page.set_viewport_size({"width": 1200, "height": 800})
            page.goto("about:blank")  # another part of the same address would not load anew
            with tensorboard(logs) as address:
                page.goto(f"{address}/#custom_scalars")
                page.wait_for_timeout(8000)
                page.screenshot(path=PICTURES / "custom_scalars.png")


def in_both_themes(page: Page, element: str, name: str, script: str = "") -> None:
    """Photograph a part of a page on a light and on a dark page, after running a script in it."""
    for theme, suffix in (("light", ""), ("dark", "_dark")):
        page.emulate_media(color_scheme=theme)
        page.reload()
        page.wait_for_timeout(2000)
        if script:
            page.evaluate(script)
        page.locator(element).screenshot(path=PICTURES / f"{name}{suffix}.png")
    page.emulate_media(color_scheme="light")


def terminal(name: str, command: str, folder: Path, *, title: str = "") -> None:
    """Save what a command of the shell prints, as a picture of a terminal."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT / "examples")}
    environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"FORCE_COLOR": "1"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True
    )
    console = Console(record=True, width=WIDTH, file=StringIO())
    host = rf" *\b{re.escape(socket.gethostname())}\b"
    printed = re.sub(host, lambda at: "laptop".rjust(len(at[0])), done.stdout.decode())
    console.print(Text.from_ansi(printed))
    picture = console.export_svg(title=title or command)
    # The fonts of the reader's system: nothing is loaded from elsewhere.
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)
    (PICTURES / f"terminal_{name}.svg").write_text(picture.replace("Fira Code, ", ""))


def run(words: Sequence[object], folder: Path) -> None:
    examples = {"PYTHONPATH": str(ROOT / "examples")}
    subprocess.run(list(map(str, words)), cwd=folder, env=os.environ | examples, check=True)


@contextmanager
def browser(path: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium.new_page(viewport={"width": 1200, "height": 800})
        chromium.close()


@contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """TensorBoard's address while it shows these logs."""
    address = "http://localhost:6107"
    command = [BIN / "tensorboard", "--logdir", logs.name, "--port", "6107"]
    server = subprocess.Popen(command, cwd=logs.parent, stderr=subprocess.DEVNULL)
    try:
        for _ in range(60):
            time.sleep(1)
            try:
                urllib.request.urlopen(address)
                break
            except OSError:
                continue
        yield address
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
