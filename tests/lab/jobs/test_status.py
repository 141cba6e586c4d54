# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from noisescale.history.metrics import Goal
from noisescale.lab.branch.branch_job import BranchJob
from noisescale.lab.jobs.job_progress import end_of
from noisescale.lab.jobs.jobs import FAILED, Task, Training
from noisescale.lab.jobs.ledger import ATTEMPTS, Ledger
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
    assert (len(found.ended), found.finished) == (1, True)
    assert found.document().doubts == [f"Failed: {task.key}: no luck"]
    assert found.to_dict() == {
        "name": "branches",
        "kind": "branch",
        "done": 1,
        "failures": {task.key: "no luck"},
        "workers": [],
        "devices": [],
    }


def test_what_each_device_did_is_a_table(tmp_path: Path) -> None:
    """Two workers share a GPU; the third worker fails, on a device of which nothing is known."""
    job = BranchJob(Training("train.py:make"), {}, {}, (32.0, 64.0), 2, 16)
    place = str(tmp_path / "b.journal")
    ledger = Ledger.begin(place, "branches", job)
    tasks = [Task(f"order={k}", {}) for k in range(4)]
    gpu, unknown = {"host": "a", "device": "GPU 1"}, {"host": "b", "process": 9, "device": ""}
    done = {"ended": "done", "devices": 1, "device_seconds": 1800.0}
    for task, process in zip(tasks[:3], (7, 8, 7), strict=True):
        ledger.want([task])
        claimed = ledger.claim([task.key], {**gpu, "process": process})
        assert claimed is not None
        ledger.finish(claimed, done)
    for _ in range(ATTEMPTS):
        ledger.want(tasks[3:])
        claimed = ledger.claim([tasks[3].key], unknown)
        assert claimed is not None
        ledger.fail(claimed, "no luck")

    found = status(place)

    assert isinstance(found, JobStatus)
    (table, *_) = found.document().tables
    assert [[cell.text for cell in line.cells] for line in table.lines] == [
        ["a, GPU 1", "2", "3", "0", "1.5"],
        ["b", "1", "1", "1", "0"],
    ]
    assert [end_of(each) for each in found.ended[2:]] == [
        "order=2: done, 30 min, on a:7",
        "order=3: failed: no luck, on b:9",
    ]
