# SPDX-License-Identifier: Apache-2.0
import json
import math

from courses import compared, on_workloads, seeds, sweep, trial

from noisescale.lab.compare.measurements import Measurements, Trial


def test_a_comparison_is_json_and_what_was_not_reached_is_null() -> None:
    trials = [trial(100, seconds=2.0, submission="a"), trial(math.inf, submission="b", name="late")]

    record = json.loads(json.dumps(compared(trials).to_dict(), allow_nan=False))

    assert record["goals"] == {"": "loss <= 0.1"}
    assert (record["clock"], record["reference"]) == ("seconds", "a")
    first, second = record["standings"]
    assert (first["submission"], first["steps"], first["seconds"]) == ("a", 100, 200)
    assert first["speed_up"] == {"value": 1, "low": 1, "high": 1}
    assert (second["steps"], second["reached"], second["best"]) == (None, 0, "late")
    assert [each["reached"] for each in record["trials"]] == [True, False]
    assert record["scores"] is None
    assert record["sweeps"] == []


def test_sweeps_and_scores_are_in_the_record() -> None:
    trials = sweep({8: 900, 64: 200, 512: 110}, submission="a", workload="x")
    trials += on_workloads({"b": {"x": 300, "y": 300}, "a": {"y": 100}})

    record = compared(trials).to_dict()

    (found,) = record["sweeps"]
    assert [batch["steps"] for batch in found["batches"]] == [900, 200, 110]
    assert [batch["learning_rate"] for batch in found["batches"]] == [0.1, 0.1, 0.1]
    assert set(found["regimes"]) == {"critical_batch_size", "perfect_up_to", "maximal_from"}
    assert record["scores"]["a"] == 1
    assert record["ratios"]["b"]["y"] == 3


def test_each_trial_is_in_the_record_with_all_that_is_known_of_it() -> None:
    said = {
        **{"submission": "a", "workload": "x", "study": "s", "batch_size": 8.0},
        **{"learning_rate": 0.5, "hyperparameters": {"momentum": 0.9}},
    }
    measured = Measurements(
        [10, 20, 30], [0.9, 0.1, math.nan], examples=[80, 160, 240], epochs=[1, 2, 3]
    )

    record = compared([Trial("t", measured, **said)], confidence=0.5).to_dict()

    assert record["trials"] == [
        {
            **said,
            "trial": "t",
            "diverged": True,
            "reached": True,
            "steps": 20,
            "examples": 160,
            "epochs": 2,
            "seconds": None,
            "best": 0.1,
            "best_step": 20,
        }
    ]
    assert record["clock"] == "steps"
    assert record["confidence"] == 0.5
    assert record["speed_ups"] == {}
    (told,) = record["warnings"]
    assert told.startswith("In 1 of 1 runs")


def test_a_standing_counts_all_trials_of_its_submission() -> None:
    trials = [
        trial(
            steps,
            submission="a",
            workload=workload,
            feasible=steps < 300,
            hyperparameters={"momentum": steps},
        )
        for workload in "xy"
        for steps in (100, 200, 300, math.inf)
    ]
    trials += on_workloads({"b": {"x": 200, "y": 200}})

    record = compared(trials).to_dict()

    first = record["standings"][0]
    assert (first["trials"], first["reached"], first["diverged"]) == (4, 3, 2)
    assert record["speed_ups"] == {"a": 1, "b": 0.5}


def test_each_batch_size_is_in_the_record_with_what_was_searched() -> None:
    trials = [
        each
        for size, rate, of in (
            (8.0, 0.1, (400, 420, 410)),
            (8.0, 0.01, (900,)),
            (8.0, 1.0, (math.inf,)),
            (64.0, 0.1, (100,)),
            (64.0, 0.01, (math.inf,)),
        )
        for each in seeds(of, batch_size=size, learning_rate=rate, feasible=rate < 1)
    ]

    (found,) = compared([*trials, *sweep({16: 250})]).to_dict()["sweeps"]

    first, middle, last = found["batches"]
    assert first == {
        "batch_size": 8,
        "steps": 410,
        "repeated_steps": [400, 420, 410],
        "learning_rate": 0.1,
        "learning_rates": [0.01, 0.1, 1],
        "edge": None,
        "unsearched": False,
        "counts": True,
        "trials": 5,
        "reached": 4,
        "diverged": 1,
        "regime": "between",
    }
    assert middle["counts"] is True
    assert (last["edge"], last["counts"]) == ("high", False)
    (told,) = found["warnings"]
    assert told.startswith("At batch size 64 ")
