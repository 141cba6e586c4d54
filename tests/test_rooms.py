# SPDX-License-Identifier: Apache-2.0
"""The rooms of the package: imports go down, and each room needs no more than it says."""

import ast
import re
import sys
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import noisescale

PACKAGE = Path(noisescale.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

CONTRIBUTING = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()

FLOORS = [
    set(line.split())
    for line in re.findall(r"^    ((?:\w+  )*\w+)$", CONTRIBUTING.split("## The rooms")[1], re.M)
]
"""From the ground up. A room imports rooms of lower floors alone."""

ARITHMETIC = {"estimation", "tradeoff", "history", "step_time", "prediction", "time_to_result"}
"""Rooms that need numpy and scipy alone, TensorBoard for event files, pandas for a DataFrame.

PyYAML for the hyperparameters that Lightning writes with it."""


def room_of(name: str) -> str:
    """Of a module `noisescale.room...`, or of a name that the package itself has."""
    room = name.split(".")[1] if "." in name else "__init__"
    return room if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists() else "__init__"


def imports_of(module: Path) -> set[str]:
    """Absolute names, those of packages as "noisescale.history" where a module is imported."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
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
        for here in [module.relative_to(PACKAGE).with_suffix("").parts[0]]
        for name in imports_of(module)
        if name.split(".")[0] == "noisescale" and room_of(name) != here
    }


def test_every_room_has_a_floor() -> None:
    rooms = {module.relative_to(PACKAGE).with_suffix("").parts[0] for module in MODULES}

    assert sorted(room for floor in FLOORS for room in floor) == sorted(rooms)


def test_no_arrow_goes_up() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    up = {
        (here, there, module)
        for here, there, module in arrows()
        if floor_of[there] >= floor_of[here]
    }

    assert up == set()


def test_no_modules_import_each_other() -> None:
    """Also through others, within a function or for annotations alone."""
    names = {".".join(m.relative_to(PACKAGE.parent).with_suffix("").parts): m for m in MODULES}
    names = {name.removesuffix(".__init__"): module for name, module in names.items()}
    sorter = TopologicalSorter(
        {
            name: {there for found in imports_of(module) if (there := names_one(found, names))}
            - {name}
            for name, module in names.items()
        }
    )

    sorter.prepare()  # a CycleError names a circle


def test_nothing_imports_lightning_or_methods_of_the_literature_but_the_faces() -> None:
    users = {(here, there) for here, there, _ in arrows() if there in {"lightning", "large_batch"}}

    assert users == {
        ("cli", "lightning"),
        ("__init__", "lightning"),
        ("__init__", "large_batch"),
        ("lightning", "large_batch"),  # callbacks that are the methods' faces there
    }


def test_arithmetic_needs_numpy_and_scipy_alone() -> None:
    needed = {
        name.split(".")[0]
        for module in MODULES
        if module.relative_to(PACKAGE).parts[0] in ARITHMETIC
        for name in imports_of(module)
    }

    where_asked_for = {"tensorboard", "pandas", "yaml"}
    assert needed - sys.stdlib_module_names - where_asked_for <= {"noisescale", "numpy", "scipy"}
    assert needed >= {"numpy", "scipy"}
