# SPDX-License-Identifier: Apache-2.0
"""One thread a process, loopback for gloo: what makes two-process tests fast and repeatable."""

import functools
import gc
import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
from browser import browser as browser

if TYPE_CHECKING:
    from noisescale.collectors.rows.step_norms import StepNorms
    from noisescale.collectors.rows.step_rows import MeasuredStep

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["OMP_NUM_THREADS"] = "1"  # of torch and of NumPy
# Lightning calls what jsonargparse deprecates, when it is imported too.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

# Every Trainer of Lightning looks through all installed packages: a third of a short fit.
metadata.entry_points = functools.cache(metadata.entry_points)


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
