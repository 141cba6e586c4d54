# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from noisescale.history.metrics import Goal
from noisescale.lab.branch.branch_job import BranchJob
from noisescale.lab.jobs.jobs import FAILED, Task, Training
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.status import JobStatus, status
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob
from noisescale.lab.sweep.sweep import Sweep

SWEEP = SweepJob(
    Training("train.py:make"),
    Own(1000.0, 32, 0.1, met=True),
    Goal.read("loss<=0.1"),
    (16, 64),
    Search((), 3, 1),
    10,
)


def test_a_sweep_under_way_says_how_far_it_is_and_how_to_join(tmp_path: Path) -> None:
    place = str(tmp_path / "a.journal")
    ledger = Ledger.begin(place, "mine", SWEEP)
    ledger.want(wanted := SWEEP.next_tasks({}))
    ledger.claim([wanted[0].key], {"host": "there", "process": 7})

    found = status(place)

    assert isinstance(found, Sweep)
    document = found.document()
    assert document.status == "under way"
    assert document.headline == (
        "0 of about 10 trainings done, 1 training under way, 0 device-hours spent"
    )
    assert [table.title for table in document.tables] == [
        "Steps to loss <= 0.1",
        "1 worker at work",
    ]
    assert [cell.text for cell in document.tables[1].lines[0].cells[:2]] == [
        "there:7",
        wanted[0].key,
    ]
    assert document.doubts[0].startswith("A single step has met loss <= 0.1.")
    assert document.next == [
        f"Further workers join with: noisescale work --storage {place} --name mine"
    ]
    assert [each["trains"] for each in found.to_dict()["workers"]] == [wanted[0].key]


def test_branches_have_their_progress_and_their_failures(tmp_path: Path) -> None:
    job = BranchJob(Training("train.py:make"), {}, {}, (32.0,), 1, 16)
    place = str(tmp_path / "b.journal")
    ledger = Ledger.begin(place, "branches", job)
    (task,) = job.next_tasks({})
    ledger.take([(Task(task.key, {}), {FAILED: "no luck"})])

    found = status(place)

    assert isinstance(found, JobStatus)
    assert (found.done, found.finished) == (1, True)
    assert found.document().doubts == [f"Failed: {task.key}: no luck"]
    assert found.to_dict() == {
        "name": "branches",
        "kind": "branch",
        "done": 1,
        "failures": {task.key: "no luck"},
        "workers": [],
    }
