# SPDX-License-Identifier: Apache-2.0
"""One thread a process, loopback for gloo: what makes two-process tests fast and repeatable."""

import functools
import gc
import os
from importlib import metadata

import pytest

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# Lightning calls what jsonargparse deprecates, when it is imported too.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

import torch
from browser import browser as browser

from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import MeasuredStep
from noisescale.meter.readings import MeterReadings

torch.set_num_threads(1)
# Every Trainer of Lightning looks through all installed packages: a third of a short fit.
metadata.entry_points = functools.cache(metadata.entry_points)


def pytest_collection_finish() -> None:
    """Let collections of garbage, one after each fit of transformers, leave out what is imported.

    Forks then share its pages, too.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[StepNorms]:
    """Every step that any meter takes in, in the process that it does it in."""
    steps: list[StepNorms] = []
    take = MeterReadings._take

    def record(meter: MeterReadings, step: MeasuredStep, coverage: float) -> None:
        steps.append(step.norms)
        take(meter, step, coverage)

    monkeypatch.setattr(MeterReadings, "_take", record)
    return steps
