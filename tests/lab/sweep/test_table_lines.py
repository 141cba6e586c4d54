# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Record, Training
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob
from noisescale.lab.sweep.table import alike_in, comparison_of, write_sweep

JOB = SweepJob(
    Training("train.py:make"),
    Own(1000.0, 32, 0.1),
    Goal.read("loss<=0.1"),
    (16, 64),
    Search((), 3, 3),
    10,
)


def searched(reached: tuple[bool, ...] = (True,) * 3, best: float = 0.1) -> dict[str, Record]:
    """All results of a search in which some repetitions, by their seeds, reach the goal.

    Of the batch size 64 the best learning rate is `best`.
    """
    found: dict[str, Record] = {}
    while wanted := JOB.wanted(found):
        for task in wanted:
            middle = 0.1 if task.spec["batch_size"] == 16 else best
            away = abs(math.log(task.spec["hyperparameters"]["learning_rate"] / middle))
            good = task.spec["batch_size"] == 16 or reached[task.spec["seed"]]
            steps, last = [1, round(100 + 100 * away)], 0.1 if good else 0.2
            ended = "reached" if good else "out of steps"
            found[task.key] = {
                "steps": steps,
                "values": [1, last],
                "seconds": steps,
                "ended": ended,
            }
    return found


def sizes_in(folder: Path) -> list[str]:
    return [line.split(",")[0] for line in (folder / "sweep.csv").read_text().splitlines()[1:]]


def test_a_repetition_that_misses_the_goal_is_left_out(tmp_path: Path) -> None:
    write_sweep(JOB, searched((True, False, True)), tmp_path)

    assert sizes_in(tmp_path) == ["16"] * 3 + ["64"] * 2


def test_a_batch_size_at_which_most_repetitions_miss_the_goal_has_no_steps(tmp_path: Path) -> None:
    write_sweep(JOB, searched((True, False, False)), tmp_path)

    assert sizes_in(tmp_path) == ["16"] * 3


def test_a_batch_size_whose_best_learning_rate_is_at_the_edge_has_no_steps(tmp_path: Path) -> None:
    """The law of `compare` does not count it either."""
    results = searched(best=1e9)
    write_sweep(JOB, results, tmp_path)

    (found,) = comparison_of(JOB, results).sweeps
    assert [(batch.batch_size, batch.counts) for batch in found.batches] == [
        (16, True),
        (64, False),
    ]
    assert sizes_in(tmp_path) == ["16"] * 3


def test_repetitions_that_are_the_same_are_named() -> None:
    results = searched()
    assert alike_in(JOB, results) == [16, 64]

    (last,) = (
        key for key in results if key.startswith("batch_size=16,") and key.endswith("seed=2")
    )
    changed = {**results, last: {**results[last], "values": [0.9, 0.1]}}
    assert alike_in(JOB, changed) == [64]
