# SPDX-License-Identifier: Apache-2.0
"""One thread a process, loopback for gloo: what makes two-process tests fast and repeatable.

And the device that tests run on: `--device`.
"""

import csv
import functools
import gc
import json
import logging
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Generator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import devices
import pytest
from _pytest.doctest import DoctestModule
from browser import browser as browser
from hypothesis import settings

if TYPE_CHECKING:
    import torch

    from noisescale.collectors.rows.step_norms import StepNorms
    from noisescale.collectors.rows.step_rows import MeasuredStep

# Last: an installed package comes before the sources.
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for `benchmarks`

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["OMP_NUM_THREADS"] = "1"  # of torch and of NumPy
# Asking whether there is a GPU must not initialise CUDA: forked ranks could not use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Lightning calls what jsonargparse deprecates, when it is imported too.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

# What libraries log is not shown where nobody has asked for it.
logging.getLogger().addHandler(logging.NullHandler())

# Machines that tests share are slow at times.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Every Trainer of Lightning looks through all installed packages: a third of a short fit.
metadata.entry_points = functools.cache(metadata.entry_points)


FAKE = Path(__file__).parent / "fake_device"
DEVICES = ("cpu", "fake", "cuda", "mps")
NOT_THERE = pytest.StashKey[str]()
"""Why the device cannot be used."""
HARDWARE = ("cuda", "mps")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="what tests with the fixture `device` run on; of other devices than the CPU no others"
        " run. fake: a device without hardware, see tests/fake_device",
    )
    parser.addoption(
        "--require-device",
        action="store_true",
        help="fail where the device cannot be used, rather than skip",
    )
    parser.addoption(
        "--share-device",
        choices=("nccl", "gloo"),
        default="",
        help="let two ranks share a device where there is one, over this backend",
    )
    parser.addoption(
        "--save-durations",
        type=Path,
        metavar="FILE",
        help="save the CPU seconds of each file's tests, and of each test that took one or more",
    )


def pytest_configure(config: pytest.Config) -> None:
    devices.name = config.getoption("device")
    devices.shared = config.getoption("share_device")
    reason = _why_not(devices.name)
    if reason and config.getoption("require_device"):
        raise pytest.UsageError(f"--device {devices.name}: {reason}")
    config.stash[NOT_THERE] = reason


def _why_not(device: str) -> str:
    """Why a device cannot be used, "" if it can; the fake one is there from then on.

    All of the process is changed by it, so only tests that use it may run.
    """
    if device == "fake":
        import fake_device

        try:
            fake_device.register()
        except fake_device.CannotBuildError as error:
            return str(error)
    elif device != "cpu":
        import torch

        found = torch.accelerator.current_accelerator()
        if found is None or found.type != device or not torch.accelerator.is_available():
            return f"there is no device {device!r}"
    return ""


collect_ignore = ["goldens/record.py", "save_transfers.py"]
"""Scripts."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules in which no test would run are not even imported.

    All of their tests are slow, or on a device nothing in them takes it. The tests of the fake
    device run on no other.
    """
    if FAKE in collection_path.parents and devices.name != "fake":
        return True
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    text, all_slow = collection_path.read_text(), r"^pytestmark = .*\bslow\b"
    if config.option.markexpr == QUICK and re.search(all_slow, text, re.MULTILINE):
        return True
    if devices.name == "cpu" or FAKE in collection_path.parents:
        return None
    takes_it = re.search(r'def \w+\([^)]*\bdevice\b|"device"', text)
    return None if takes_it else True


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[Any], list[Any]]:
    """Doctests are the package's. Else each helper of tests was imported for its docstrings."""
    return [one for one in (yield) if not isinstance(one, DoctestModule)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen, others = [], []
    for item in items:
        of_fake = item.path.parent == FAKE
        of_hardware = item.get_closest_marker("gpu") is not None
        if devices.name == "cpu" and of_hardware:
            item.add_marker(pytest.mark.skip(reason="run with --device cuda"))
        if config.stash[NOT_THERE]:
            item.add_marker(pytest.mark.skip(reason=config.stash[NOT_THERE]))
        runs = devices.name == "cpu" or "device" in getattr(item, "fixturenames", ())
        if devices.name == "fake":
            runs = of_fake or (runs and not of_hardware)
        (chosen if runs else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
    # Tests of one way stand together, so that one worker finds out for all of them what they ask.
    first: dict[object, int] = {}
    for position, item in enumerate(chosen):
        first.setdefault(_way_of(item), position)
    items[:] = sorted(chosen, key=lambda item: first[_way_of(item)])


def _way_of(item: pytest.Item) -> object:
    params = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
    return (item.path, params["way"]) if params and "way" in params else item


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    if devices.forks():
        from ranks import call_in_a_fork

        pyfuncitem.obj = functools.partial(call_in_a_fork, pyfuncitem.obj)


@pytest.fixture(scope="session")
def device() -> "torch.device":
    """What `--device` names, the first of its kind."""
    return devices.of_rank()


@pytest.fixture
def figure(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], None]:
    """Keep a figure of the device, from a forked process too."""
    folder = tmp_path_factory.getbasetemp()
    # One file for all processes of xdist, whose folders are in that of the first.
    file = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "figures"

    def keep(name: str, value: float) -> None:
        with file.open("a") as figures:
            figures.write(json.dumps([name, value]) + "\n")

    return keep


QUICK = "not slow and not weekly"
"""What `make test` runs: see pyproject.toml."""

SPENT = pytest.StashKey[float]()
"""CPU seconds of this process and its children when the last phase of a test had ended."""


def spent() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give each report the CPU seconds since the last one: those of processes that ended, too."""
    report = yield
    now = spent()
    report.cpu_seconds = now - item.config.stash[SPENT]  # type: ignore[attr-defined]
    item.config.stash[SPENT] = now
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.option.save_durations:
        save_durations(terminalreporter.stats, config.rootpath / config.option.save_durations)


def save_durations(stats: dict[str, list[Any]], path: Path) -> None:
    """Save the CPU seconds of files and of long tests, with their fixtures, the longest first."""
    tests: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for report in chain.from_iterable(stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds = getattr(report, "cpu_seconds", 0.0)
            tests[report.nodeid] += seconds
            files[report.nodeid.partition("::")[0]] += seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["cpu_seconds", "of"])
        long = {name: seconds for name, seconds in tests.items() if seconds >= 1}
        for name, seconds in sorted({**files, **long}.items(), key=lambda each: -each[1]):
            lines.writerow([f"{seconds:.1f}", name])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave what was found on hardware, to be shown to others."""
    config = session.config
    if devices.name not in HARDWARE or config.stash[NOT_THERE] or config.option.collectonly:
        return
    import torch

    reporter = config.pluginmanager.getplugin("terminalreporter")
    assert reporter is not None
    stats = reporter.stats
    file = config._tmp_path_factory.getbasetemp() / "figures"  # type: ignore[attr-defined]
    path = config.rootpath / "build" / f"tests_on_{devices.name}.json"
    runs = json.loads(path.read_text()) if path.exists() else {}
    runs["sanitized" if "TORCH_CUDA_SANITIZER" in os.environ else "plain"] = {
        "device": torch.cuda.get_device_name() if devices.name == "cuda" else devices.name,
        "torch": torch.__version__,
        "passed": len(stats.get("passed", [])),
        "failed": {report.nodeid: str(report.longrepr) for report in stats.get("failed", [])},
        "skipped": {report.nodeid: report.longrepr[2] for report in stats.get("skipped", [])},
        "figures": dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(runs, indent=1))
    reporter.write_line(f"Saved {path}")


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze_modules(session.config)
    session.config.stash[SPENT] = spent()


MODULES = pytest.StashKey[int]()
"""How many there were when they were frozen."""


def freeze_modules(config: pytest.Config) -> None:
    """Have collections of garbage leave out what is imported, and forks share its pages."""
    gc.collect()
    gc.freeze()
    config.stash[MODULES] = len(sys.modules)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze what tests have imported, too: Lightning, transformers, Optuna."""
    if len(sys.modules) > item.config.stash[MODULES] + 300:
        freeze_modules(item.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Undo how Lightning wraps loaders: where making one fails, it leaves them wrapped."""
    data = sys.modules.get("torch.utils.data")
    classes = () if data is None else (data.DataLoader, data.BatchSampler)
    names = ("__init__", "__setattr__", "__delattr__")
    before = [(cls, name, getattr(cls, name)) for cls in classes for name in names]
    try:
        yield
    finally:
        for cls, name, method in before:
            if getattr(cls, name) is not method:
                setattr(cls, name, method)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> "list[StepNorms]":
    """Every step that any meter takes in, in the process that it does it in."""
    from noisescale.meter.meter import Meter

    steps: list[StepNorms] = []
    take = Meter._take

    def record(meter: Meter, step: "MeasuredStep") -> None:
        steps.append(step.norms)
        take(meter, step)

    monkeypatch.setattr(Meter, "_take", record)
    return steps
