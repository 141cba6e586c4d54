# SPDX-License-Identifier: Apache-2.0
"""What each step transfers between host and device, in every way of measuring: a table.

Each read, and each copy to the device that blocks, has the host wait until the device has done all
that was asked of it. What is not in the table must not be transferred, whatever the way.
"""

from collections import Counter
from collections.abc import Mapping

import pytest

from fake_device.trainers import FITS
from fake_device.transfers import READ, TO_DEVICE, TO_DEVICE_LATER, TO_HOST, TO_HOST_LATER, Transfer
from fake_device.ways import WAYS, counted, most

Table = Mapping[tuple[str, str], int]
"""The most transfers of a step, by kind and by the file that asks for them."""

ROWS = "collectors/rows/step_rows.py"
NOTHING: Table = {}
ONE_READ: Table = {(TO_HOST, ROWS): 1}
CONSTANTS: Table = {(TO_DEVICE_LATER, ROWS): 1}
"""What rows hold besides norms, where it is not what it was in the step before."""
SIGNS: Table = {(TO_DEVICE_LATER, "collectors/halves/row_pass.py"): 1}
"""Which half of the batch a row is in."""
PROOF: Table = {
    (TO_HOST, "collectors/halves/proved_cuts.py"): 1,
    (TO_HOST, "collectors/halves/row_pass.py"): 1,
    (TO_DEVICE_LATER, "collectors/halves/row_pass.py"): 2,
    (TO_DEVICE_LATER, "collectors/halves/derivatives.py"): 14,
    (TO_DEVICE_LATER, "collectors/halves/loss_derivative.py"): 3,
    (TO_DEVICE_LATER, "collectors/coordinates.py"): 1,
    **CONSTANTS,
}
"""Of a cut: whether rows act on each other, and whether the training's own pass agrees."""
GROUPS: Table = {(TO_DEVICE_LATER, "batches/row_groups.py"): 2}
"""In a pass with halves of whole groups, and in one with halves within each of them."""

HALVES = {"first measured": PROOF, "measured": SIGNS}
GROUPED = {
    "first measured": {**PROOF, (TO_DEVICE_LATER, "collectors/halves/row_pass.py"): 3, **GROUPS},
    "measured": {(TO_DEVICE_LATER, "collectors/halves/row_pass.py"): 2, **GROUPS},
}
COORDINATES: Table = {(TO_DEVICE_LATER, "collectors/coordinates.py"): 1}
"""Where gradients are compared between steps."""
COMPARED: Table = {**COORDINATES, **CONSTANTS}
OTHERS = {"first measured": COMPARED, "measured": NOTHING}
SHARDED = {"first measured": CONSTANTS, "measured": NOTHING}
UNEQUAL = {"first measured": COMPARED, "measured": CONSTANTS}
EXPECTED: Mapping[str, Mapping[str, Table]] = {
    "halves": HALVES,
    "halves, groups": HALVES,
    "halves, frozen BatchNorms": HALVES,
    "halves, groups of rows": GROUPED,
    "halves, weights of rows": HALVES,
    "micro-batches of unequal sizes": UNEQUAL,
    "ranks that are not averaged": SHARDED,
    "FSDP2": SHARDED,
    "FSDP2, accumulation, groups": SHARDED,
}
"""Other ways are as `OTHERS`."""

SIZES: Table = {(READ, "lightning/scheduler/scheduled_fit.py"): 1}
"""The mean micro-batch of all ranks, at the first step."""
RANKS_AGREE: Table = {
    (TO_DEVICE_LATER, "scheduling/agreement.py"): 1,
    (TO_HOST_LATER, "scheduling/agreement.py"): 1,
}
"""What ranks want is compared in the background. If it has changed, the host waits for that."""
CHECKSUMS: Table = {(TO_DEVICE_LATER, "batches/shared_examples.py"): 1}
"""Weights of checksums of examples, of the first batches of a shape."""
SHARED: Table = {
    (TO_HOST, "batches/shared_examples.py"): 1,
    (READ, "batches/shared_examples.py"): 1,
}
"""Whether ranks train on the same examples: once in a fit."""

SAID = CONSTANTS
"""What a rank says of its pace goes to the device once after it has changed, at log steps."""

FITTED: Mapping[str, Mapping[str, Table]] = {
    "Lightning": {
        "first measured": PROOF,
        "measured": {**SIGNS, **SAID},
        "unmeasured": NOTHING,
        "measured, read": {**SIGNS, **SAID, **ONE_READ},
        "unmeasured, read": ONE_READ,
    },
    "Lightning, scheduler": {
        "first measured": CONSTANTS,
        "first measured, read": COORDINATES,
        "measured": CONSTANTS,  # where the batch size has changed
        "measured, read": {**SAID, **ONE_READ},
    },
    "Lightning, DDP, scheduler": {
        "first measured": CONSTANTS,
        "first measured, read": {**SIZES, **CHECKSUMS, **COORDINATES},
        "measured": CONSTANTS,
        "measured, read": {**ONE_READ, **RANKS_AGREE},
        "measured, compared": SHARED,
    },
    "Hugging Face": {
        "first measured": COMPARED,
        "measured": SAID,
        "unmeasured": NOTHING,
        "measured, read": ONE_READ,
        "unmeasured, read": ONE_READ,
    },
}
"""For batches of a trainer. "read": the run logs, decides or ends an epoch."""

MOST_READS = {"measured": 0, "unmeasured": 0, "first measured": 2, "measured, compared": 2}
"""Of a step; 1 where it logs or decides."""


@pytest.mark.parametrize("name", WAYS)
def test_a_step_transfers_what_the_table_says(name: str) -> None:
    found = most(counted(WAYS[name]))

    expected = {"unmeasured": NOTHING, "read": ONE_READ, **EXPECTED.get(name, OTHERS)}
    assert {phase: by_file(some) for phase, some in found.items()} == expected, told(found)


@pytest.mark.parametrize("name", FITS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of trainers: few workers
def test_a_batch_of_a_trainer_transfers_what_the_table_says(name: str) -> None:
    found = most(FITS[name]())

    assert {phase: by_file(some) for phase, some in found.items()} == FITTED[name], told(found)


def test_the_table_keeps_the_limits() -> None:
    for name, phases in ({way: EXPECTED.get(way, OTHERS) for way in WAYS} | FITTED).items():
        for phase, table in phases.items():
            waits = {kind: n for (kind, _), n in table.items() if kind in (READ, TO_HOST)}
            assert sum(waits.values()) <= MOST_READS.get(phase, 1), (name, phase)
            assert TO_DEVICE not in {kind for kind, _ in table}, (name, phase)


def by_file(transfers: Mapping[Transfer, int]) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for (kind, where), n in transfers.items():
        found[kind, where.removeprefix("noisescale/").partition(":")[0]] += n
    return dict(found)


def told(found: Mapping[str, Mapping[Transfer, int]]) -> str:
    """Say which lines ask for what was found."""
    lines = [
        f"{phase}: {n} x {kind} at {where}"
        for phase, transfers in found.items()
        for (kind, where), n in sorted(transfers.items())
    ]
    return "\n".join(["what is transferred is not in the table, or less:", *lines])
