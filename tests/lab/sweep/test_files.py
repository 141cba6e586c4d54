# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace
from pathlib import Path

from lab.jobs.jobs_for_tests import ended

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Entry, Training
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.files import write_files
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob
from noisescale.lab.sweep.sweep_record import SweepRecord, sweep_record

JOB = SweepJob(
    Training("train.py:make"),
    Own(1000.0, 32, 0.1),
    Goal.read("loss<=0.1"),
    (16, 64),
    Search((), 3, 3),
    10,
)


def searched(reached: tuple[bool, ...] = (True,) * 3, best: float = 0.1) -> dict[str, Entry]:
    """All entries of a search in which some repetitions, by their seeds, reach the goal.

    Of the batch size 64 the best learning rate is `best`.
    """
    found: dict[str, Entry] = {}
    while wanted := JOB.next_tasks(found):
        for task in wanted:
            middle = 0.1 if task.spec["batch_size"] == 16 else best
            away = abs(math.log(task.spec["hyperparameters"]["learning_rate"] / middle))
            good = task.spec["batch_size"] == 16 or reached[task.spec["seed"]]
            steps, last = [1, round(100 + 100 * away)], 0.1 if good else 0.2
            word = "reached" if good else "out of steps"
            result = {"steps": steps, "values": [1, last], "seconds": steps, "ended": word}
            found[task.key] = ended(task, result)
    return found


def found_in(entries: dict[str, Entry]) -> SweepRecord:
    return sweep_record(JOB, entries, Place("test", "sweep.journal"))


def alike_in(entries: dict[str, Entry]) -> list[int]:
    return [s.batch_size for s in found_in(entries).sizes if s.repetitions_are_alike]


def sizes_in(folder: Path) -> list[str]:
    return [line.split(",")[0] for line in (folder / "sweep.csv").read_text().splitlines()[1:]]


def test_a_repetition_that_misses_the_goal_is_left_out(tmp_path: Path) -> None:
    write_files(found_in(searched((True, False, True))), tmp_path)

    assert sizes_in(tmp_path) == ["16"] * 3 + ["64"] * 2


def test_a_batch_size_at_which_most_repetitions_miss_the_goal_has_no_steps(tmp_path: Path) -> None:
    write_files(found_in(searched((True, False, False))), tmp_path)

    assert sizes_in(tmp_path) == ["16"] * 3


def test_a_batch_size_whose_best_learning_rate_is_at_the_edge_has_no_steps(tmp_path: Path) -> None:
    """The law of `compare` does not count it either."""
    entries = searched(best=1e9)
    write_files(found_in(entries), tmp_path)

    found = found_in(entries).law
    assert found is not None
    assert [(batch.batch_size, batch.counts) for batch in found.batches] == [
        (16, True),
        (64, False),
    ]
    assert sizes_in(tmp_path) == ["16"] * 3


def test_repetitions_that_are_the_same_are_named() -> None:
    entries = searched()
    assert alike_in(entries) == [16, 64]

    (last,) = (
        each for each in entries.values() if (each.spec["batch_size"], each.spec["seed"]) == (16, 2)
    )
    changed = replace(last, result={**last.result, "values": [0.9, 0.1]})
    assert alike_in({**entries, last.key: changed}) == [64]
