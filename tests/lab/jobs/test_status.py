# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import replace
from pathlib import Path

from lab.jobs.jobs_for_tests import SWEEP, claimed

from noisescale.lab.branch.branch_job import BranchJob
from noisescale.lab.branch.planning import BranchOptions
from noisescale.lab.jobs.job_progress import JobProgress, end_of
from noisescale.lab.jobs.jobs import FAILED, Task, Training
from noisescale.lab.jobs.ledger import ATTEMPTS, Ledger
from noisescale.lab.jobs.status import status
from noisescale.lab.sweep.answer import Sweep
from noisescale.lab.sweep.search import Search


def test_a_sweep_under_way_says_how_far_it_is_and_how_to_join(tmp_path: Path) -> None:
    place = str(tmp_path / "a.journal")
    met = replace(SWEEP.own, met=True)
    job = replace(SWEEP, own=met, batch_sizes=(16, 64), search=Search((), 3, 1))
    ledger = Ledger.begin(place, "mine", job)
    ledger.want(wanted := job.next_tasks({}))
    claimed(ledger, wanted[0].key, host="there", process=7)

    found = status(place)

    assert isinstance(found, Sweep)
    document = found.document()
    assert document.status == "under way"
    assert re.findall(r"\d+", document.headline) == ["0", "10", "1", "0"]
    steps, workers = document.tables
    assert steps.title.endswith("loss <= 0.1")
    assert workers.title.startswith("1 worker ")
    assert [cell.text for cell in workers.lines[0].cells[:2]] == ["there:7", wanted[0].key]
    assert document.doubts[0].startswith("A single step")
    assert document.next[0].endswith(f"noisescale work --storage {place} --name mine")
    assert [each["trains"] for each in found.to_dict()["workers"]] == [wanted[0].key]


def branches(folder: Path, *sizes: float) -> tuple[str, Ledger]:
    place = str(folder / "b.journal")
    asked = BranchOptions("run", "saved", sizes, orders=2)
    job = BranchJob(Training("train.py:make"), asked, {}, 16)
    return place, Ledger.begin(place, "branches", job)


def test_branches_have_their_progress_and_their_failures(tmp_path: Path) -> None:
    place, ledger = branches(tmp_path, 32.0)
    keys = [f"batch_size=32,order={order}" for order in range(2)]
    ledger.take((Task(key, {}), {FAILED: "no luck"}) for key in keys)

    found = status(place)

    assert isinstance(found, JobProgress)
    assert (len(found.ended), found.finished) == (2, True)
    assert found.document().doubts == [f"Failed: {key}: no luck" for key in keys]
    expected = {"name": "branches", "kind": "branch", "done": 2, "workers": [], "devices": []}
    assert found.to_dict() == expected | {"failures": dict.fromkeys(keys, "no luck")}


def test_what_each_device_did_is_a_table(tmp_path: Path) -> None:
    """Two workers share a GPU; the third worker fails, on a device of which nothing is known."""
    place, ledger = branches(tmp_path, 32.0, 64.0)
    tasks = [Task(f"order={order}", {}) for order in range(4)]
    done = {"ended": "done", "devices": 1, "device_seconds": 1800.0}

    ledger.want(tasks)
    for task, process in zip(tasks, (7, 8, 7), strict=False):
        ledger.finish(claimed(ledger, task.key, host="a", process=process, device="GPU 1"), done)
    for _ in range(ATTEMPTS):
        ledger.fail(claimed(ledger, "order=3", host="b", process=9, device=""), "no luck")
        ledger.want(tasks)

    found = status(place)

    assert isinstance(found, JobProgress)
    (table, *_) = found.document().tables
    assert [[cell.text for cell in line.cells] for line in table.lines] == [
        ["a, GPU 1", "2", "3", "0", "1.5"],
        ["b", "1", "1", "1", "0"],
    ]
    assert [end_of(each) for each in found.ended[2:]] == [
        "order=2: done, 30 min, on a:7",
        "order=3: failed: no luck, on b:9",
    ]
