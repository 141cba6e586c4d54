# SPDX-License-Identifier: Apache-2.0
import pytest

from noisescale.step_time.assumptions import assumptions


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (["overlap"], ["How much of synchronisation overlaps with"]),
        # Of a step without any synchronisation that was timed there is nothing to overlap.
        (["sync", "sync_across", "overlap"], ["How long devices synchronise"]),
        (["sync_across", "overlap"], ["How long nodes synchronise", "How much of synchronisation"]),
        (["sync_across", "growth_across"], ["How long nodes synchronise"]),
        (["growth_across"], ["How synchronisation grows with the devices"]),
        ([], []),
    ],
)
def test_what_was_not_timed_is_said_once(held: list[str], said: list[str]) -> None:
    found = assumptions(held, checked=True)

    assert len(found) == len(said)
    for sentence, beginning in zip(found, said, strict=True):
        assert sentence.startswith(beginning)
