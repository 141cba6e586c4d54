# SPDX-License-Identifier: Apache-2.0
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from lab.jobs.jobs_for_tests import ended

from noisescale import fit_tradeoff
from noisescale.history.metrics import Goal
from noisescale.lab.compare.reading import read_trials
from noisescale.lab.jobs.jobs import FAILED, Entry, State, Task, Training
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.files import write_files
from noisescale.lab.sweep.results import PRUNED
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import Own, SweepJob
from noisescale.lab.sweep.sweep_record import SweepRecord, sweep_record
from noisescale.tradeoff.sweep_files import read_sweeps

JOB = SweepJob(
    Training("train.py:make"),
    Own(1e6, 16, 0.1),
    Goal.read("loss<=0.1"),
    (16, 64, 256),
    Search((), trials=6, repeats=3),
    epochs=10,
)


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


def taken(ledger: Ledger, entries: list[Entry]) -> None:
    ledger.take((Task(each.key, each.spec), each.result) for each in entries)


def found_in(entries: Mapping[str, Entry]) -> SweepRecord:
    return sweep_record(JOB, entries, Place("test", "sweep.journal"))


def test_the_files_are_those_that_fit_and_compare_take(tmp_path: Path) -> None:
    write_files(found_in(finished()), tmp_path)

    curve = read_sweeps(tmp_path / "sweep.csv")[""]
    trials = read_trials(tmp_path / "trials.csv", "loss")
    assert curve.batch_sizes == [16] * 3 + [64] * 3 + [256] * 3
    assert fit_tradeoff(*curve).critical_batch_size == pytest.approx(64, rel=0.25)
    assert len(trials) == len(finished())
    assert {trial.batch_size for trial in trials} == {16, 64, 256}
    assert all(trial.learning_rate > 0 for trial in trials)
    assert not list(tmp_path.glob("*.part"))


def test_the_files_do_not_depend_on_the_order_of_trainings(tmp_path: Path) -> None:
    tables = set()
    for order in range(4):
        write_files(found_in(finished(order)), tmp_path)
        tables.add((tmp_path / "sweep.csv").read_text())

    assert len(tables) == 1


def test_a_batch_size_whose_search_is_not_done_is_not_in_the_table_yet(tmp_path: Path) -> None:
    entries = finished()
    last = next(key for key in reversed(entries) if entries[key].spec["batch_size"] == 64)
    del entries[last]

    write_files(found_in(entries), tmp_path)

    assert set(read_sweeps(tmp_path / "sweep.csv")[""].batch_sizes) == {16, 256}


def test_a_sweep_has_the_regimes_of_a_comparison() -> None:
    swept = found_in(finished()).law

    assert swept is not None
    assert swept.regimes is not None
    band = swept.regimes.critical_batch_size
    assert band.low < 64 < band.high
    assert [batch.counts for batch in swept.batches] == [True] * 3


def test_progress_says_what_was_spent_and_what_is_left(tmp_path: Path) -> None:
    ledger = Ledger.begin(str(tmp_path / "j"), "test", JOB)
    begun = found_in(ledger.entries())
    whole = list(finished().values())
    half = whole[: len(whole) // 2]
    taken(ledger, half)
    ledger.want(wanted := JOB.next_tasks(ledger.entries()))
    shared = {"host": "a", "sharing": 2}  # two of them are as fast as one device
    claimed = [ledger.claim([task.key for task in wanted], shared) for _ in range(2)]

    going = found_in(ledger.entries())
    taken(ledger, whole)

    assert (len(begun.progress.ended), begun.expected_trainings) == (0, 3 * (6 + 2 + 2))
    assert math.isnan(begun.seconds_left)
    assert len(going.progress.ended) == len(half)
    assert going.progress.device_hours == pytest.approx(0.01 * len(half))
    assert going.seconds_left == pytest.approx(
        36.0 * (going.expected_trainings - len(going.progress.ended))
    )
    assert {entry.key for entry in going.progress.running} == {one.key for one in claimed if one}
    assert [entry.state for entry in going.progress.running] == 2 * [State.RUNNING]
    end = found_in({k: e for k, e in ledger.entries().items() if e.result})
    assert len(end.progress.ended) <= end.expected_trainings


def test_a_finished_sweep_has_what_was_best(tmp_path: Path) -> None:
    ledger = Ledger.begin(str(tmp_path / "j"), "test", JOB)
    taken(ledger, whole := list(finished().values()))

    found = found_in(ledger.entries())

    assert found.finished
    assert len(found.progress.ended) == found.expected_trainings == len(whole)
    for size in found.sizes:
        assert size.steps == pytest.approx(100 * (1 + 64 / size.batch_size), rel=0.2)
        assert size.learning_rate == pytest.approx(0.1 * math.sqrt(size.batch_size / 16), rel=1)
        assert size.reached + size.count(PRUNED) == len(size.results)


def test_failures_have_their_reasons_and_no_evaluations(tmp_path: Path) -> None:
    entries = finished()
    first = next(iter(entries))
    entries[first] = replace(entries[first], result={FAILED: "no luck"})

    write_files(found_in(entries), tmp_path)

    assert found_in(entries).progress.failures == {first: "no luck"}
    assert len(read_trials(tmp_path / "trials.csv", "loss")) == len(entries) - 1
    assert sum(size.count(FAILED) for size in found_in(entries).sizes) == 1
