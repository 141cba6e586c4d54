# SPDX-License-Identifier: Apache-2.0
import json
import math

from courses import sweep, trial

from noisescale.history.metrics import Goal
from noisescale.report.comparison_records import comparison_as_dict
from noisescale.time_to_result.comparison import compare

GOAL = Goal.read("loss<=0.1")


def test_a_comparison_is_json_and_what_was_not_reached_is_null() -> None:
    trials = [trial(100, seconds=2.0, submission="a"), trial(math.inf, submission="b", name="late")]

    record = json.loads(json.dumps(comparison_as_dict(compare(trials, GOAL)), allow_nan=False))

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
    trials += [trial(300, submission="b", workload="x"), trial(300, submission="b", workload="y")]
    trials += [trial(100, submission="a", workload="y")]

    record = comparison_as_dict(compare(trials, GOAL))

    (found,) = record["sweeps"]
    assert [batch["steps"] for batch in found["batches"]] == [900, 200, 110]
    assert [batch["learning_rate"] for batch in found["batches"]] == [0.1, 0.1, 0.1]
    assert set(found["regimes"]) == {"critical_batch_size", "perfect_up_to", "maximal_from"}
    assert record["scores"]["a"] == 1
    assert record["ratios"]["b"]["y"] == 3
