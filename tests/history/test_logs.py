# SPDX-License-Identifier: Apache-2.0
"""Other metrics of a run in TensorBoard's event files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from logged_runs import write_events
from refused import refused
from tiers import slow_but

from noisescale.history.logs import EventLog
from noisescale.history.run_files import logs_of

STORED = ("plain", "transformers", "with_pictures", "two_monitors")


def read(folder: Path) -> EventLog:
    return EventLog(folder, logs_of(folder))


@pytest.mark.parametrize("run", slow_but(STORED, "two_monitors"))
def test_every_number_is_the_one_that_tensorboard_reads(run: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(__file__).parents[1] / "goldens" / "inputs" / run
    theirs = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()

    log = read(folder)

    tags = theirs.Tags()["scalars"]
    assert len(tags) > 20
    assert set(tags) == set(log.names)
    for tag in tags:
        expected = [(event.step, event.value) for event in theirs.Scalars(tag)]
        found = log.metric(tag)
        assert list(zip(found.steps.tolist(), found.values.tolist(), strict=True)) == expected


def test_scalars_that_were_written_as_tensors_are_read(tmp_path: Path) -> None:
    """As TensorFlow's writers and TensorBoard's newer ones do it."""
    write_events(tmp_path, [(3, {"loss": 0.5})], new_style=True)

    steps, values, _ = read(tmp_path).metric("loss")

    assert (steps.tolist(), values.tolist()) == ([3], [0.5])


def test_a_file_is_read_up_to_an_event_that_ends_too_early(tmp_path: Path) -> None:
    """A killed run leaves it."""
    write_events(tmp_path, [(step, {"loss": 1 / step}) for step in range(1, 41)])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    steps = read(tmp_path).metric("loss").steps.tolist()

    assert steps == [*range(1, len(steps) + 1)]
    assert 15 < len(steps) < 25


def test_damage_is_refused(tmp_path: Path) -> None:
    """TensorBoard's own page stops there without a word."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in (1, 2):
            writer.add_scalar("loss", 1.0, step)
            writer.add_image("picture", torch.rand(3, 32, 32), step)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for begin, end in list(frames(whole))[:3]:
        for place in (begin, end - 5):
            content = bytearray(whole)
            content[place] ^= 1
            file.write_bytes(content)
            with refused(str(file), requirement="have whole events"):
                read(tmp_path)


def frames(content: bytes) -> Iterator[tuple[int, int]]:
    """Where each record begins, with its length and the checksum of it, and where it ends."""
    begin = 0
    while begin < len(content):
        end = begin + 16 + int.from_bytes(content[begin : begin + 8], "little")
        yield begin, end
        begin = end
