# SPDX-License-Identifier: Apache-2.0
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import yaml

import noisescale

HUB = Path(__file__).parents[4] / "examples" / "optunahub"
PACKAGE = HUB / "package" / "samplers" / "carbs"


def loaded() -> Any:
    """The package by OptunaHub's loader, or what its module has where OptunaHub is missing."""
    try:
        # The folder in examples/ may be found under this name too: it has no loader.
        from optunahub import load_local_module
    except ImportError:
        return SimpleNamespace(**runpy.run_path(str(PACKAGE / "__init__.py")))
    return load_local_module("samplers/carbs", registry_root=str(HUB / "package"))


def test_the_package_is_the_sampler() -> None:
    assert loaded().CarbsSampler is noisescale.CarbsSampler


def test_the_package_has_the_files_and_fields_of_the_registry() -> None:
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert names == {"LICENSE", "README.md", "__init__.py", "example.py", "requirements.txt"}
    _, front, body = (PACKAGE / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert set(fields) == {"author", "title", "description", "tags", "optuna_versions", "license"}
    assert "sampler" in fields["tags"]
    assert "## Abstract" in body
    assert "## Example" in body


@pytest.mark.slow
def test_its_example_prints_a_front(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = loaded()
    hub = SimpleNamespace(load_module={"samplers/carbs": package}.__getitem__)
    monkeypatch.setitem(sys.modules, "optunahub", hub)  # type: ignore[arg-type]
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    runpy.run_path(str(PACKAGE / "example.py"), run_name="__main__")

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    costs = [int(line[5:10]) for line in lines]
    assert costs == sorted(costs)
    assert all(cost & (cost - 1) == 0 for cost in costs)
