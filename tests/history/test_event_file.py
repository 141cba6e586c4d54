# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest

from noisescale.history import event_file
from noisescale.history.event_file import EventFile
from noisescale.history.logs import EventLog
from noisescale.history.run_files import logs_of


def test_tensorboard_reads_what_is_written_also_behind_what_a_full_disk_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half of a record that could not be cut off is followed by another file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def half(path: Path, content: bytes) -> None:
        with path.open("ab") as file:
            file.write(content[:20])
        raise OSError("no space left")

    events = EventFile(tmp_path / "run")
    events.add({"loss": 2.5, "noise_scale/simple": 40.0}, step=1)
    with monkeypatch.context() as full:
        full.setattr(event_file, "append_whole", half)
        events.add({"loss": 1.5}, step=2)
        with pytest.raises(OSError, match="no space"):
            events.write()
    events.add({"loss": 0.5}, step=3)
    events.write()

    first, last = logs_of(tmp_path / "run")
    found: list[Any] = []
    for file in (first, last):
        read = EventAccumulator(str(file)).Reload()
        found += [(event.step, event.value) for event in read.Scalars("loss")]
    assert found == [(1, 2.5), (2, 1.5), (3, 0.5)]
    assert EventLog(tmp_path, [first]).metric("noise_scale/simple").values.tolist() == [40]
