# SPDX-License-Identifier: Apache-2.0
"""What the built wheel holds, and that it works where the sources are out of reach.

`make wheel-test` runs this file alone, in the unpacked sdist `build/wheel`, with the wheel
installed. `make release-test` runs the whole suite there.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from pkgutil import walk_packages

import pytest
from goldens.make import INPUTS, OUTPUTS, rounded
from scripts import ROOT
from tensorboard import default
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

import noisescale

PACKAGE = Path(noisescale.__file__).parent
REPOSITORY = ROOT.parents[1]
PROGRAM = Path(sys.executable).with_name("noisescale")


def files_in(folder: Path) -> set[str]:
    """Names below a folder, without what running leaves there."""
    return {
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and not {"__pycache__", "lightning_logs"} & set(file.parts)
    }


def test_the_package_is_the_installed_one() -> None:
    assert PACKAGE.parent.name == "site-packages"
    assert PACKAGE.is_relative_to(ROOT)
    assert not (ROOT / "noisescale").exists()


def test_the_wheel_has_every_file_of_the_package() -> None:
    assert files_in(PACKAGE) == files_in(REPOSITORY / "noisescale")
    assert {"py.typed", "report/page.html", "tensorboard_plugin/static/index.js"} <= files_in(
        PACKAGE
    )


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_the_sdist_has_every_file_of_a_folder(folder: str) -> None:
    assert files_in(ROOT / folder) == files_in(REPOSITORY / folder)


def test_every_module_can_be_imported() -> None:
    names = [each.name for each in walk_packages([str(PACKAGE)], "noisescale.")]

    for name in names:
        if not name.endswith("__main__"):  # it runs the program
            importlib.import_module(name)

    assert len(names) > 200


def test_every_exported_name_is_there() -> None:
    assert all(getattr(noisescale, name) for name in noisescale.__all__)


def test_the_metadata_are_those_of_the_package() -> None:
    found = distribution("noisescale")

    assert found.version == noisescale.__version__
    assert {(each.group, each.name) for each in found.entry_points} == {
        ("console_scripts", "noisescale"),
        ("tensorboard_plugins", "noise_scale"),
    }
    assert "https://raw.githubusercontent.com/" in (found.metadata.get_payload() or "")


def printed(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [PROGRAM, *words],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "100", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return f"$ noisescale {' '.join(words)}\n{done.stdout}--- errors\n--- 0\n"


def test_the_program_says_its_version(tmp_path: Path) -> None:
    assert noisescale.__version__ in printed("--version", cwd=tmp_path)


def test_the_program_predicts_what_the_sources_predict(tmp_path: Path) -> None:
    shutil.copytree(INPUTS / "plain", tmp_path / "plain")
    stored = OUTPUTS / "plain"
    devices = ("--json", "--devices", "1,2,16")

    text = printed("predict", "plain", cwd=tmp_path)
    found = printed("predict", "plain", *devices, "--html", "page.html", cwd=tmp_path)

    assert rounded(text) == (stored / "predict.txt").read_text()
    figures = found.partition("\n")[2]
    assert rounded(figures) == (stored / "predict.json").read_text().partition("\n")[2]
    page = (tmp_path / "page.html").read_text()
    assert "Critical batch size" in page
    assert (PACKAGE / "report/figures.js").read_text().splitlines()[-1] in page


def test_tensorboard_finds_the_tab_and_serves_its_page() -> None:
    logs = str(INPUTS / "plain")
    multiplexer = EventMultiplexer().AddRunsFromDirectory(logs).Reload()
    context = TBContext(data_provider=MultiplexerDataProvider(multiplexer, logs), logdir=logs)

    (loader,) = (
        each for each in default.get_dynamic_plugins() if each.__module__.startswith("noisescale.")
    )
    plugin = loader().load(context)
    routes = plugin.get_plugin_apps()

    assert plugin.is_active()
    assert len(json.loads(Client(routes["/runs"]).get("/runs").data)) == 1
    for file in (PACKAGE / "tensorboard_plugin/static").iterdir():
        assert Client(routes[f"/{file.name}"]).get(f"/{file.name}").data == file.read_bytes()
