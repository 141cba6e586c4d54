# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: imports go down, and each room needs no more than it says."""

import ast
import re
import sys
from collections.abc import Collection
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from scripts import ROOT
from size_of_package import running_code

import noisescale

PACKAGE = Path(noisescale.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(x.parent.name for x in PACKAGE.glob("*/__init__.py"))

FLOORS = [
    "_version printable",
    "state refusal guard",
    "checks extras collectives",
    "bounded csv_lines",
    "estimation batches",
    "report",
    "tradeoff plan",
    "history step_time",
    "collectors prediction",
    "meter rules",
    "scheduling",
    "lightning hugging_face tensorboard_plugin",
    "user_code",
    "profiling frozen",
    "cli",
    "methods lab",
    "faces",
]
"""From the ground up. A room imports rooms of lower floors alone."""

FACES = {"__init__.py", "__main__.py", "cli/app.py"}
"""The modules that name every room. Nothing else imports `methods` or `lab`."""

ARITHMETIC = {"estimation", "tradeoff", "history", "step_time", "prediction"}
"""Rooms that need numpy and scipy alone, TensorBoard for event files, pandas for a DataFrame.

PyYAML for the hyperparameters that Lightning writes with it."""


def room_of(name: str) -> str:
    """Of a module `noisescale.room...`, or of a name that the package itself has."""
    if name.startswith("noisescale.cli.app"):
        return "faces"
    room = name.split(".")[1] if "." in name else "faces"
    return room if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists() else "faces"


def room_with(module: Path) -> str:
    name = module.relative_to(PACKAGE)
    return "faces" if name.as_posix() in FACES else name.with_suffix("").parts[0]


@cache
def imports_of(module: Path, *, types: bool = True) -> set[str]:
    """Absolute names, those of packages as "noisescale.history" where a module is imported.

    Without `types`, what is imported for annotations alone is left out.
    """
    found = set()
    tree = ast.parse(module.read_text())
    for node in ast.walk(tree) if types else running_code(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names_one(imported: str, modules: Collection[str]) -> str | None:
    """The module of the package that is imported, or that the imported name is in."""
    return next((x for x in (imported, imported.rpartition(".")[0]) if x in modules), None)


def arrows() -> set[tuple[str, str, str]]:
    """From a room to another, and which module draws the arrow."""
    return {
        (here, room_of(name), module.relative_to(PACKAGE).as_posix())
        for module in MODULES
        for here in [room_with(module)]
        for name in imports_of(module)
        if name.split(".")[0] == "noisescale" and room_of(name) != here
    }


def test_every_room_has_a_floor_and_no_arrow_goes_up() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}

    assert sorted(" ".join(FLOORS).split()) == sorted({room_with(module) for module in MODULES})
    assert [arrow for arrow in arrows() if floor_of[arrow[1]] >= floor_of[arrow[0]]] == []


def test_no_modules_import_each_other() -> None:
    """Also through others, or within a function; for annotations alone they may."""
    names = {".".join(m.relative_to(PACKAGE.parent).with_suffix("").parts): m for m in MODULES}
    names = {name.removesuffix(".__init__"): module for name, module in names.items()}
    arrows_from = {
        name: {names_one(found, names) for found in imports_of(module, types=False)} - {name, None}
        for name, module in names.items()
    }

    TopologicalSorter(arrows_from).prepare()  # a CycleError names a circle


def test_the_core_can_be_read_without_lightning_methods_and_many_trainings() -> None:
    rooms = {here for here, there, _ in arrows() if there == "lightning"}
    modules = {module for _, there, module in arrows() if there in {"methods", "lab"}}

    assert rooms == {"user_code", "profiling", "frozen", "methods", "lab", "faces"}
    assert modules == {"__init__.py", "cli/app.py"}


def test_arithmetic_needs_numpy_and_scipy_alone() -> None:
    needed = {
        (name.split(".")[0], module.relative_to(PACKAGE).as_posix())
        for module in MODULES
        if module.relative_to(PACKAGE).parts[0] in ARITHMETIC
        for name in imports_of(module)
    }
    needed -= {("torch", "history/checkpoints.py")}  # where it is asked for, as those below
    names = {name for name, _ in needed}

    where_asked_for = {"tensorboard", "pandas", "yaml", "plotly", "rich"}
    assert names - sys.stdlib_module_names - where_asked_for <= {"noisescale", "numpy", "scipy"}
    assert names >= {"numpy", "scipy"}


def test_contributing_shows_the_rooms_as_they_are() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    shown: set[str] = set()
    room = ""

    for indent, name in re.findall(r"^( {2,4})(\w+)/ ", page, re.MULTILINE):
        room = name if len(indent) == 2 else room
        shown.add(name if len(indent) == 2 else f"{room}/{name}")

    there = {x.parent.relative_to(PACKAGE).as_posix() for x in PACKAGE.rglob("*.py")} - {"."}
    assert shown <= there
    assert shown >= set(ROOMS)
    for divided in ("collectors", "lightning", "lab"):
        parts = {name for name in there if re.fullmatch(rf"{divided}/\w+", name)}
        assert shown >= parts, divided


def test_contributing_names_files_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()

    named = re.findall(r"`((?:tests|benchmarks|noisescale|docs|\.ci)/[\w./]*)`", page)
    inside = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./]*)", page)

    assert len(named) > 10
    assert len(inside) > 10
    assert [x for x in named if not (ROOT / x).exists()] == []
    assert [x for x in inside if not (PACKAGE / x).exists()] == []
