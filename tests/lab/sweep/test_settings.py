# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from lab.jobs.jobs_for_tests import SWEEP, ended
from refused import refused

from noisescale.lab.jobs.jobs import Training
from noisescale.lab.jobs.status import job_from
from noisescale.lab.parameter_texts import sweep_parameters
from noisescale.lab.sweep.results import trial_name
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import ModuleDefaults, SweepJob, check_goal, read_batch_sizes
from noisescale.plan import Plan


def job(**other: Any) -> SweepJob:
    return replace(SWEEP, **{"own": ModuleDefaults(1000.0, 32, 0.1, 0.99)} | other)


def test_a_job_survives_json() -> None:
    searched = Search(sweep_parameters(["lr=1..2", "momentum=0..0.9"]), 3, 2)
    for each in (job(), job(own=ModuleDefaults(math.inf, None, 0.1), search=searched)):
        record = json.loads(json.dumps({"kind": each.kind, **each.as_dict()}))

        assert job_from(record) == each
    with refused("storage", got="'x' with other settings ('x')"):
        job_from({"kind": "x"})


def test_larger_batches_may_take_more_epochs_but_fewer_steps() -> None:
    assert [job().most_steps(size) for size in (16, 64, 256)] == [620, 300, 120]
    assert job(own=ModuleDefaults(math.inf, 32, 0.1)).most_steps(16) == 625_000


def test_the_learning_rate_is_searched_around_the_module_s_own_by_the_square_root() -> None:
    (small,), (large,) = job().parameters(32), job().parameters(128)
    (given,) = job(search=Search(sweep_parameters(["learning_rate=1..2"]), 3, 2)).parameters(128)

    assert (small.low, small.high) == (0.1 / 8, 0.1 * 8)
    assert (large.low, large.high) == (0.2 / 8, 0.2 * 8)
    assert (given.low, given.high) == (1, 2)


def test_a_task_says_all_that_a_training_needs() -> None:
    first = job(max_device_batch_size=24).next_tasks({})

    assert [task.spec["batch_size"] for task in first] == [16] * 3 + [64] * 3 + [256] * 3
    spec = dict(first[3].spec)
    assert first[3].key == trial_name(64, spec["hyperparameters"], 0)
    assert (spec["device_batch_size"], spec["accumulation"]) == (16, 4)
    assert spec["beta2"] == pytest.approx(0.99**2)
    assert spec["most_steps"] == 300
    assert spec["batches_of_epoch"] == 15 * 4
    assert spec["most_epochs"] == 20
    assert spec["goal"] == {"metric": "loss", "value": 0.1, "side": "<", "strict": False}
    json.dumps(spec)


@pytest.mark.parametrize(
    ("size", "most", "devices", "plan"),
    [
        (64, None, 1, Plan(64, 1)),
        (64, 16, 1, Plan(16, 4)),
        (61, 16, 1, Plan(1, 61)),
        (96, 20, 2, Plan(16, 3, 2)),
    ],
)
def test_a_batch_is_split_exactly(size: int, most: int | None, devices: int, plan: Plan) -> None:
    found = job(
        training=Training("x", devices=devices), batch_sizes=(size,), max_device_batch_size=most
    )

    assert found.plan(size) == plan


def test_batch_sizes_that_cannot_be_trained_are_refused() -> None:
    with refused("batch_sizes", requirement="1,000", got="2,048"):
        job(batch_sizes=(16, 2048))
    with refused("batch_sizes", requirement="3", got="16"):
        job(training=Training("x", devices=3))
    with refused("epochs", got="0"):
        job(epochs=0)


def test_batch_sizes_are_a_ladder_or_a_list() -> None:
    assert read_batch_sizes("16..2048") == (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert read_batch_sizes("10..45") == (10, 20, 40)
    assert read_batch_sizes("64, 16,64") == (16, 64)
    for bad in ("16", "16..", "a,b", "0,16", "16..20", "64..8", "16.5,32", "-16,32"):
        with refused("batch_sizes"):
            read_batch_sizes(bad)


def test_goals_need_a_side() -> None:
    assert check_goal("val_acc>=0.9").side == ">"
    with refused("goal", got="'x=1'"):
        check_goal("x=1")


def test_names_of_trainings_have_all_digits_of_a_batch_size() -> None:
    name = trial_name(2**20 + 1, {"learning_rate": 1e-05}, 0)

    assert name == "batch_size=1048577,learning_rate=1e-05,seed=0"


def test_results_at_one_batch_size_limit_trainings_at_this_one_alone() -> None:
    tasks = job().next_tasks({})
    result = {"steps": [1, 40], "values": [1, 0.1], "seconds": [1, 2], "ended": "x"}
    done = {tasks[3].key: ended(tasks[3], result)}

    assert job().limit_of(tasks[4].spec, done) == 61
    assert job().limit_of(tasks[0].spec, done) == math.inf
    assert job().limit_of({**tasks[4].spec, "seed": 1}, done) == math.inf
