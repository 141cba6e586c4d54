# SPDX-License-Identifier: Apache-2.0
"""Count what a measured step transfers between host and device, and how many kernels it launches.

Each way of measuring trains a small network for 40 steps on the fake device of the tests, every
second step measured, once with a meter and once without. Counted are the calls of PyTorch's
operations below autograd: what a device with its own kernels is asked for. There is no time here,
and no GPU: fused kernels of CUDA may launch several times in one operation.

    python tests/save_transfers.py

A row of benchmarks/results/cost/transfers.json is a way. `kernels` are operations of one
step: of the training alone and of a measured step. `transfers` are the most in one step, by kind
and by the line of the package that asks for them. Needs a C++ compiler.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not where pytest looks for doctests
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

import devices
import fake_device

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.lib.results import write_results

Lines = dict[str, dict[str, int]]
"""For each kind of transfer the lines that ask for it."""


def main() -> None:
    devices.name = "fake"
    fake_device.register()
    from fake_device.trainers import FITS
    from fake_device.ways import WAYS, counted, launched

    rows = []
    warnings.simplefilter("ignore")
    for name, way in WAYS.items():
        steps = counted(way)
        kernels = launched(way, steps)
        print(f"{name:46} {kernels.plain:5} {kernels.measured:5}", flush=True)
        rows.append({"way": name, "kernels": kernels._asdict(), "transfers": by_phase(steps)})
    for name in FITS:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as alone:
            rows.append({"way": name, "transfers": alone.submit(of_fit, name).result()})
    write_results("cost/transfers", rows)


def of_fit(name: str) -> dict[str, Lines]:
    """Transfers of a trainer's fit. No other may run in the process."""
    from fake_device.trainers import FITS

    return by_phase(FITS[name]())


def by_phase(steps: Sequence[Any]) -> dict[str, Lines]:
    """The most transfers of a step in each phase of a training."""
    from fake_device.ways import most

    found: dict[str, Lines] = {}
    for phase, transfers in most(steps).items():
        lines = found.setdefault(phase, {})
        for (kind, where), n in sorted(transfers.items()):
            lines.setdefault(kind, {})[where] = n
    return found


if __name__ == "__main__":
    main()
