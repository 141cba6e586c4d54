# SPDX-License-Identifier: Apache-2.0
"""How large the package is: its lines, what people use, long argument lists, the way to a page.

python tests/size_of_package.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "noisescale"
ENTRIES = (
    "noisescale.lightning.monitor.noise_scale_monitor",
    "noisescale.lightning.scheduler.batch_size_scheduler",
    "noisescale.meter.noise_scale_meter",
    "noisescale.prediction.predict",
    "noisescale.tensorboard_plugin.plugin",
)
"""The modules of NoiseScaleMonitor, BatchSizeScheduler, NoiseScaleMeter, `predict` and the tab."""

MOST_PARAMETERS = 10
"""Of a function, self among them, that is not listed."""


def lines_of(folder: Path) -> int:
    """Lines of all Python files in a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def lines_loaded() -> int:
    """Lines of all modules that the entries import, at once or while they run."""
    found: set[Path] = set()
    left = [path for name in ENTRIES if (path := path_of(name)) is not None]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += imported_by(path)
    return sum(len(path.read_text().splitlines()) for path in found)


def path_of(name: str) -> Path | None:
    """The file of a module of the package; None if there is none."""
    path = ROOT.joinpath(*name.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if name.startswith("noisescale") and file.exists()), None)


def imported_by(path: Path) -> Iterator[Path]:
    """The files that a file imports, but for types."""
    for node in running_code(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        for name in names:
            parents = name.split(".")
            for length in range(1, len(parents) + 1):  # packages run their own code, too
                if (file := path_of(".".join(parents[:length]))) is not None:
                    yield file


def running_code(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that are not below `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from running_code(node)


def long_functions() -> list[str]:
    """Functions with more than `MOST_PARAMETERS` parameters."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                taken = node.args
                number = len([*taken.posonlyargs, *taken.args, *taken.kwonlyargs])
                if number > MOST_PARAMETERS:
                    found.append(f"{path.relative_to(PACKAGE)}: {node.name} ({number})")
    return found


class Way(NamedTuple):
    """A way through the files of the package."""

    stays: int
    """Calls in one file, one after another, are a stay."""
    rooms: int
    """Files that were entered."""

    @property
    def returns(self) -> int:
        """Stays in a file that had been left."""
        return self.stays - self.rooms


def way_of(work: Callable[[], object]) -> Way:
    """The way of some work: the files of all functions, in the order of their first calls."""
    files: dict[CodeType, str] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}") and code.co_name[0] != "<":
            files.setdefault(code, code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    stays = [file for file, _ in groupby(files.values())]
    return Way(len(stays), len(set(stays)))


def way_to_page() -> Way:
    """The way from the folder of a run to the page with its prediction."""
    from logged_runs import record

    from noisescale import predict

    steps = np.arange(10.0, 1001, 10)
    same = {"batch_size": 64, "low": 150, "noise_scale": 192, "high": 250, "devices": 2}

    with TemporaryDirectory() as name:
        folder = Path(name)
        record(folder / "run", step=steps, examples=64 * steps, seconds_per_step=0.1, **same)
        return way_of(lambda: predict(folder / "run").to_html(folder / "page.html"))


if __name__ == "__main__":
    print(f"package: {lines_of(PACKAGE):,} lines")
    print(f"loaded by what most people use: {lines_loaded():,} lines")
    print(f"tests: {lines_of(ROOT / 'tests'):,} lines")
    way = way_to_page()
    print(f"to a page: {way.stays} stays, {way.rooms} rooms, {way.returns} returns")
    print(f"functions with more than {MOST_PARAMETERS} parameters: {len(long_functions())}")
    print(*long_functions(), sep="\n")
