# SPDX-License-Identifier: Apache-2.0
"""One thread a process, loopback for gloo: what makes two-process tests fast and repeatable.

And the device that tests run on: `--device`.
"""

import functools
import gc
import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import devices
import pytest
from browser import browser as browser

if TYPE_CHECKING:
    import torch

    from noisescale.collectors.rows.step_norms import StepNorms
    from noisescale.collectors.rows.step_rows import MeasuredStep

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["OMP_NUM_THREADS"] = "1"  # of torch and of NumPy
# Asking whether there is a GPU must not initialise CUDA: forked ranks could not use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Lightning calls what jsonargparse deprecates, when it is imported too.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

# Every Trainer of Lightning looks through all installed packages: a third of a short fit.
metadata.entry_points = functools.cache(metadata.entry_points)


DEVICES = ("cpu", "fake", "cuda", "mps")
NOT_THERE = pytest.StashKey[str]()
"""Why the device cannot be used."""


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


def pytest_configure(config: pytest.Config) -> None:
    devices.name = config.getoption("device")
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

        if not getattr(torch, device).is_available():
            return f"there is no device {device!r}"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device, not_there = devices.name, config.stash[NOT_THERE]
    chosen, others = [], []
    for item in items:
        of_fake = "fake_device" in item.path.parts
        if device == "cpu" and of_fake:
            item.add_marker(pytest.mark.skip(reason="run with --device fake"))
        if not_there:
            item.add_marker(pytest.mark.skip(reason=not_there))
        takes_device = "device" in getattr(item, "fixturenames", ())
        of_device = {"fake": of_fake, "cuda": item.get_closest_marker("gpu") is not None}
        runs = device == "cpu" or takes_device or of_device.get(device, False)
        (chosen if runs else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Of a device with threads of autograd's, each test is forked.

    A process that has had a backward pass could fork no ranks that have one.
    """
    if devices.name != "cpu":
        from ranks import in_a_fork

        pyfuncitem.obj = in_a_fork(pyfuncitem.obj)


@pytest.fixture(scope="session")
def device() -> "torch.device":
    """What `--device` names, the first of its kind."""
    return devices.of_rank()


def pytest_collection_finish(session: pytest.Session) -> None:
    # Advice of Lightning to its users: few workers, no validation data, an unstateful loader.
    # Among the filters of pyproject.toml it would have Lightning imported for every test.
    for package in ("lightning.fabric", "lightning_fabric"):
        if package in sys.modules:
            category = f"{package}.utilities.warnings.PossibleUserWarning"
            session.config.addinivalue_line("filterwarnings", f"ignore::{category}")
    # Collections of garbage, one after each fit of transformers, leave out what is imported, and
    # forks share its pages.
    gc.collect()
    gc.freeze()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> "list[StepNorms]":
    """Every step that any meter takes in, in the process that it does it in."""
    from noisescale.meter.readings import MeterReadings

    steps: list[StepNorms] = []
    take = MeterReadings._take

    def record(meter: MeterReadings, step: "MeasuredStep", coverage: float) -> None:
        steps.append(step.norms)
        take(meter, step, coverage)

    monkeypatch.setattr(MeterReadings, "_take", record)
    return steps
