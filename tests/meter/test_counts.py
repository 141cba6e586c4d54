# SPDX-License-Identifier: Apache-2.0
"""Counts of a meter go on from what was saved, by earlier versions as well."""

import pytest

from noisescale.meter.readings import Counts

SAVED = {
    "steps": 12,
    "last_measured_step": 11,
    "skipped_steps": 2,
    "examples": 96.0,
    "unmeasured_examples": 8.0,
    "batch_size": 8.0,
    "accumulation": 2,
}


def test_a_state_from_before_some_counts_were_kept_is_counted_on() -> None:
    counts = Counts()

    counts.load_state_dict(SAVED)

    kept_since = {"measured_steps": 0, "lone_since": None, "lone_steps": 0, "spent": None}
    assert vars(counts) == {**SAVED, **kept_since}


def test_what_a_damaged_state_has_is_counted_on() -> None:
    counts = Counts()

    with pytest.raises(KeyError, match="examples"):
        counts.load_state_dict({k: v for k, v in SAVED.items() if k != "examples"})

    assert (counts.steps, counts.last_measured_step, counts.skipped_steps) == (12, 11, 2)


def test_steps_are_alone_since_the_first_that_had_nothing_to_compare() -> None:
    counts, alone_since = Counts(), []
    for micro_batches in (2, 1, 1, 2, 1):
        counts.steps += 1
        counts.close_measured(micro_batches, least=2)
        alone_since.append(counts.lone_since)

    assert alone_since == [None, 2, 2, None, 5]
