# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any

from lab.jobs.jobs_for_tests import ended

from noisescale.lab.branch.branch_job import BranchJob
from noisescale.lab.branch.planning import BranchOptions
from noisescale.lab.jobs.jobs import FAILED, Task, Training
from noisescale.lab.jobs.status import job_from

ASKED = BranchOptions("run", "saved", [8.0, 32.0], orders=2, learning_rate="sqrt")
JOB = BranchJob(Training("train.py:make"), ASKED, {"goal": 1}, 100)


def wanted(results: dict[str, Any]) -> list[Task]:
    return JOB.next_tasks({key: ended(Task(key, {}), each) for key, each in results.items()})


def keys(results: dict[str, Any]) -> list[str]:
    return [task.key for task in wanted(results)]


def test_later_orders_wait_for_the_first_and_take_its_learning_rate() -> None:
    found = {"branch": {"learning_rate_factor": 0.5}}
    first = ["batch_size=8,order=0", "batch_size=32,order=0"]

    assert keys({}) == first
    assert keys({first[0]: found}) == [first[1], "batch_size=8,order=1"]
    (_, later) = wanted({first[0]: found})
    assert later.spec["known"] == {"learning_rate_factor": 0.5}
    assert (later.spec["plan"], later.spec["order"]) == (0, 1)
    others = dict.fromkeys((*first, "batch_size=8,order=1"), found)
    assert keys(others) == ["batch_size=32,order=1"]


def test_if_the_first_order_was_given_up_the_others_search_anew() -> None:
    (*_, later) = wanted({"batch_size=8,order=0": {FAILED: "x"}})

    assert (later.key, later.spec["known"]) == ("batch_size=8,order=1", None)


def test_a_job_survives_json() -> None:
    record = json.loads(json.dumps({"kind": JOB.kind, **JOB.as_dict()}))

    assert job_from(record) == JOB
    json.dumps(dict(JOB.next_tasks({})[0].spec))
