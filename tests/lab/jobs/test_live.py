# SPDX-License-Identifier: Apache-2.0
import math
from types import SimpleNamespace
from typing import Any

import pytest

from noisescale.lab.jobs.job_progress import JobProgress
from noisescale.lab.jobs.jobs import FAILED, Entry, State
from noisescale.lab.jobs.live import in_sight
from noisescale.lab.jobs.workers import Place
from noisescale.report.document import Document


def entry(key: str, **result: Any) -> Entry:
    worker = {"host": "here", "process": 7, "sharing": 2}
    return Entry(key, State.DONE, 0, 1, {}, worker, math.nan, result)


def found(*ended: Entry, status: Any = "under way") -> Any:
    headline = "An answer" if status == "done" else f"{len(ended)} of 4 done, and more"
    document = Document("", headline, (), status=status, doubts=["A doubt."], next=["Join."])
    progress = JobProgress(Place("a", "b"), "sweep", ended, (), 0.0, False)
    return SimpleNamespace(progress=progress, document=lambda: document)


def test_a_pipe_has_a_line_for_each_training_once(capsys: pytest.CaptureFixture[str]) -> None:
    before = entry("before", ended="reached")
    one = entry("one", ended="diverged", devices=2, device_seconds=4.0)
    two, three = entry("two", **{FAILED: "no luck"}), entry("three", ended="reached")

    with in_sight("b") as show:
        show(found(before))
        show(found(before))
        show(found(before, one, two))
        show(found(before, one, two, three, status="done"))

    printed = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert printed == [
        "Join.",
        "A doubt.",
        "one: diverged, 4 s, on here:7",
        "two: failed: no luck, on here:7 (3 of 4 done)",
        "three: reached, on here:7 (4 trainings done)",
    ]
