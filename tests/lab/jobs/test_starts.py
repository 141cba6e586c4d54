# SPDX-License-Identifier: Apache-2.0
import multiprocessing
from pathlib import Path
from unittest import mock

import pytest

from noisescale.lab.jobs import warm
from noisescale.lab.jobs.warm import Starts, WarmProcess

Started = tuple[Starts, mock.Mock, list[str]]


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Starts whose forks are what a mock says, after the first training."""
    context = mock.Mock()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(warm, "begin_server", lambda _: "")
    monkeypatch.setattr(warm, "ColdProcess", mock.Mock())
    events: list[str] = []
    found = Starts(1, cold=False, on_event=events.append)
    found.start(tmp_path)
    (tmp_path / "imports.json").write_text("{}")
    found.prepare()
    return found, context.Process, events


def test_once_the_server_was_ended_trainings_are_cold(tmp_path: Path, starts: Started) -> None:
    found, process, events = starts
    process.return_value.exitcode = 255

    first = found.start(tmp_path)

    assert (first.code, (tmp_path / "output.txt").read_text()) == (255, "")
    assert not isinstance(found.start(tmp_path), WarmProcess)
    (event,) = events
    assert event.endswith("was ended")


def test_where_no_fork_is_made_the_training_is_cold(tmp_path: Path, starts: Started) -> None:
    found, process, events = starts
    process.return_value.start.side_effect = ConnectionRefusedError("gone")

    assert [isinstance(found.start(tmp_path), WarmProcess) for _ in range(2)] == [False, False]
    (event,) = events
    assert event.endswith("(ConnectionRefusedError: gone)")
