# SPDX-License-Identifier: Apache-2.0
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from lab.jobs.jobs_for_tests import SWEEP, ended
from tiers import slow

from noisescale import fit_tradeoff
from noisescale.lab.compare.reading import read_trials
from noisescale.lab.jobs.jobs import FAILED, Entry, State, Task
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.answer import Sweep
from noisescale.lab.sweep.results import PRUNED
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import ModuleDefaults, SweepJob
from noisescale.tradeoff.sweep_files import read_sweeps

JOB = replace(SWEEP, own=ModuleDefaults(1e6, 16, 0.1), search=Search((), trials=6, repeats=3))
TWO = replace(SWEEP, batch_sizes=(16, 64))


def truth(size: int, rate: float, seed: int) -> float:
    """The law with S_min = 100 and B_crit = 64, if the learning rate grows with the root."""
    away = math.log(rate / (0.1 * math.sqrt(size / 16)))
    luck = random.Random(f"{size}/{rate}/{seed}").gauss(0, 0.02)
    return round(100 * (1 + 64 / size) * math.exp(0.5 * away**2 + luck))


def finished(order: int = 0) -> dict[str, Entry]:
    """The entries of a whole sweep, whose trainings end in a random order."""
    rng, entries = random.Random(order), dict[str, Entry]()
    while wanted := JOB.next_tasks(entries):
        task = rng.choice(wanted)
        spec = task.spec
        steps = truth(spec["batch_size"], spec["hyperparameters"]["learning_rate"], spec["seed"])
        limit = JOB.limit_of(spec, entries)
        lost = steps > limit
        result = {
            "steps": [1, limit if lost else steps],
            "values": [0.9, 0.5 if lost else 0.1],
            "seconds": [0.1, 0.01 * steps],
            "ended": "stopped early" if lost else "reached",
            "devices": 1,
            "device_seconds": 36.0,
        }
        entries[task.key] = ended(task, result)
    return entries


@pytest.fixture(scope="module")
def whole() -> dict[str, Entry]:
    return finished()


def found_in(entries: Mapping[str, Entry], job: SweepJob = JOB) -> Sweep:
    return Sweep.of(job, entries, Place("test", "sweep.journal"))


def sizes_in_table(found: Sweep, folder: Path) -> list[float]:
    found.write_files(folder)
    return list(read_sweeps(folder / "sweep.csv")[""].batch_sizes)


def searched(reached: tuple[bool, ...] = (True,) * 3, best: float = 0.1) -> dict[str, Entry]:
    """All entries of a search in which some repetitions, by their seeds, reach the goal.

    Of the batch size 64 the best learning rate is `best`.
    """
    found: dict[str, Entry] = {}
    while wanted := TWO.next_tasks(found):
        for task in wanted:
            middle = 0.1 if task.spec["batch_size"] == 16 else best
            away = abs(math.log(task.spec["hyperparameters"]["learning_rate"] / middle))
            good = task.spec["batch_size"] == 16 or reached[task.spec["seed"]]
            steps, last = [1, round(100 + 100 * away)], 0.1 if good else 0.2
            word = "reached" if good else "out of steps"
            result = {"steps": steps, "values": [1, last], "seconds": steps, "ended": word}
            found[task.key] = ended(task, result)
    return found


@pytest.mark.parametrize("order", [1, slow(2), slow(3)])
def test_the_files_are_those_that_fit_and_compare_take(
    order: int, tmp_path: Path, whole: dict[str, Entry]
) -> None:
    """They do not depend on the order of trainings."""
    for name, entries in (("one", whole), ("other", finished(order))):
        (tmp_path / name).mkdir()
        found_in(entries).write_files(tmp_path / name)

    folder = tmp_path / "one"
    curve = read_sweeps(folder / "sweep.csv")[""]
    trials = read_trials(folder / "trials.csv", "loss")
    assert curve.batch_sizes == [16] * 3 + [64] * 3 + [256] * 3
    assert fit_tradeoff(*curve).critical_batch_size == pytest.approx(64, rel=0.25)
    assert len(trials) == len(whole)
    assert {trial.batch_size for trial in trials} == {16, 64, 256}
    assert all(trial.learning_rate > 0 for trial in trials)
    assert not list(tmp_path.rglob("*.part"))
    assert (folder / "sweep.csv").read_text() == (tmp_path / "other/sweep.csv").read_text()


def test_a_batch_size_whose_search_is_not_done_is_not_in_the_table_yet(
    tmp_path: Path, whole: dict[str, Entry]
) -> None:
    last = next(key for key in reversed(whole) if whole[key].spec["batch_size"] == 64)

    found = found_in({key: whole[key] for key in whole if key != last})

    assert set(sizes_in_table(found, tmp_path)) == {16, 256}


def test_a_finished_sweep_has_what_was_best_and_the_regimes_of_a_comparison(
    whole: dict[str, Entry],
) -> None:
    found = found_in(whole)

    assert found.finished
    assert len(found.progress.ended) == found.expected_trainings == len(whole)
    for size in found.sizes:
        assert size.steps == pytest.approx(100 * (1 + 64 / size.batch_size), rel=0.2)
        assert size.learning_rate == pytest.approx(0.1 * math.sqrt(size.batch_size / 16), rel=1)
        assert size.reached + size.count(PRUNED) == len(size.results)
    assert found.law is not None
    assert found.law.regimes is not None
    band = found.law.regimes.critical_batch_size
    assert band.low < 64 < band.high
    assert [batch.counts for batch in found.law.batches] == [True] * 3


def test_progress_says_what_was_spent_and_what_is_left(
    tmp_path: Path, whole: dict[str, Entry]
) -> None:
    ledger = Ledger.begin(str(tmp_path / "j"), "test", JOB)
    begun = found_in(ledger.entries())
    half = list(whole.values())[: len(whole) // 2]
    ledger.take((Task(each.key, each.spec), each.result) for each in half)
    ledger.want(wanted := JOB.next_tasks(ledger.entries()))
    shared = {"host": "a", "sharing": 2}  # two of them are as fast as one device
    claimed = [ledger.claim([task.key for task in wanted], shared) for _ in range(2)]

    going = found_in(ledger.entries())

    assert (len(begun.progress.ended), begun.expected_trainings) == (0, 3 * (6 + 2 + 2))
    assert math.isnan(begun.seconds_left)
    assert len(going.progress.ended) == len(half)
    assert going.progress.device_hours == pytest.approx(0.01 * len(half))
    left = going.expected_trainings - len(half)
    assert going.seconds_left == pytest.approx(36.0 * left)
    assert {entry.key for entry in going.progress.running} == {one.key for one in claimed if one}
    assert [entry.state for entry in going.progress.running] == 2 * [State.RUNNING]


def test_failures_have_their_reasons_and_no_evaluations(
    tmp_path: Path, whole: dict[str, Entry]
) -> None:
    first = next(iter(whole))
    found = found_in({**whole, first: replace(whole[first], result={FAILED: "no luck"})})

    found.write_files(tmp_path)

    assert found.progress.failures == {first: "no luck"}
    assert len(read_trials(tmp_path / "trials.csv", "loss")) == len(whole) - 1
    assert sum(size.count(FAILED) for size in found.sizes) == 1


@pytest.mark.parametrize(
    ("reached", "best", "rows"),
    [((True, False, True), 0.1, 2), ((True, False, False), 0.1, 0), ((True,) * 3, 1e9, 0)],
    ids=["a miss is left out", "of most misses nothing stays", "nor with the best at the edge"],
)
def test_only_repetitions_of_an_inner_best_learning_rate_that_reach_the_goal_have_steps(
    reached: tuple[bool, ...], best: float, rows: int, tmp_path: Path
) -> None:
    """The law of `compare` does not count the others either."""
    found = found_in(searched(reached, best), TWO)

    assert sizes_in_table(found, tmp_path) == [16] * 3 + [64] * rows
    assert found.law is not None
    counts = {batch.batch_size: batch.counts for batch in found.law.batches}
    assert counts == {16: True, 64: rows > 0}


def test_repetitions_that_are_the_same_are_named() -> None:
    def alike_in(entries: dict[str, Entry]) -> list[int]:
        return [s.batch_size for s in found_in(entries, TWO).sizes if s.repetitions_are_alike]

    entries = searched()
    (last,) = (e for e in entries.values() if (e.spec["batch_size"], e.spec["seed"]) == (16, 2))
    changed = replace(last, result={**last.result, "values": [0.9, 0.1]})

    assert alike_in(entries) == [16, 64]
    assert alike_in({**entries, last.key: changed}) == [64]
