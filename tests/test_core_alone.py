# SPDX-License-Identifier: Apache-2.0
"""`pip install noisescale` without extras is enough to measure, to schedule and to predict."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from program import refused
from scripts import ROOT, run

import noisescale
from noisescale.extras import MissingExtraError
from noisescale.lab.jobs.launchers import launch

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed_by(requirements: list[str]) -> set[str]:
    """Installed distributions that pip would install for these, and those that they need."""
    found: set[str] = set()
    todo = [(Requirement(line), {""}) for line in requirements]
    while todo:
        requirement, extras = todo.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if name in found and not requirement.extras:
            continue
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:  # of other platforms
            continue
        found.add(name)
        todo += [(Requirement(line), {"", *requirement.extras}) for line in lines]
    return found


def link(name: str, folder: Path) -> None:
    """Put what a distribution consists of into a folder."""
    files = distribution(name).files or []
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        source = Path(str(distribution(name).locate_file(top)))
        if not (folder / top).exists() and source.exists():
            (folder / top).symlink_to(source)


@pytest.mark.slow
def test_measuring_scheduling_and_predicting_need_no_extra(tmp_path: Path) -> None:
    core = needed_by(PROJECT["dependencies"])
    for name in core:
        link(name, tmp_path)
    (tmp_path / "noisescale").symlink_to(Path(noisescale.__file__).parent)

    # Without `site` (-S) there are no installed packages but those of the folder.
    done = subprocess.run(
        [sys.executable, "-P", "-S", ROOT / "tests/core_alone.py"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("works without extras\n")
    assert core.isdisjoint({"plotly", "tensorboard", "lightning", "transformers"})


@pytest.mark.parametrize(
    ("words", "package", "extra", "user"),
    [
        ("predict FOLDER --html report.html", "plotly", "report", "`--html`"),
        ("compare FOLDER --goal a=1", "tensorboard", "tensorboard", "Reading the event files of"),
        ("sweep train.py:make --goal loss<=1 --batch-sizes 8,16", "optuna", "sweep", "`noisescale"),
        ("work --storage FOLDER/sweep.journal", "optuna", "sweep", "A sweep"),
        ("", "submitit", "slurm", "`--launcher slurm`"),
        ("", "ray", "ray", "`--launcher ray`"),
    ],
)
def test_commands_name_the_extra_that_they_need(
    words: str, package: str, extra: str, user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")

    if words:
        said = refused(*words.replace("FOLDER", str(tmp_path)).split())
    else:
        with pytest.raises(MissingExtraError) as refusal:
            launch(extra, ["true"], 1, tmp_path)
        said = str(refusal.value)

    assert said.startswith(user)
    assert said.endswith(
        f' needs {package}, which is not installed. Run: pip install "noisescale[{extra}]"'
    )
    assert any(line.startswith(package) for line in PROJECT["optional-dependencies"][extra])


@pytest.mark.slow
def test_importing_the_package_imports_nothing_that_is_optional() -> None:
    script = (
        "import sys, noisescale; from noisescale import NoiseScaleMonitor, BatchSizeScheduler,"
        "NoiseScaleMeter, predict;"
        "print({'plotly', 'tensorboard', 'sklearn', 'optuna', 'ray'} & sys.modules.keys())"
    )

    assert run("-c", script) == "set()\n"
