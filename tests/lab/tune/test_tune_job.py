# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.jobs.jobs_for_tests import scripted
from refused import refused

from noisescale.lab.jobs.jobs import FAILED, Entry, State, Training
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.status import job_from
from noisescale.lab.jobs.worker import Worker
from noisescale.lab.jobs.workers import Place
from noisescale.lab.parameter_texts import search_parameters
from noisescale.lab.parameters import range_parameter
from noisescale.lab.sweep.settings import ModuleDefaults
from noisescale.lab.tune.answer import Tune, progress_sentence
from noisescale.lab.tune.tune_job import Length, TuneJob, center_parameters, prior_cost
from noisescale.refusal import Refusal

SEARCH = ("learning_rate=0.001..1", "batch_size=8..256", "width=8..128")
OWN = ModuleDefaults(1000, 32, 0.05, momentum=0.9)

SCRIPT = """
{body}
p = spec["parameters"]
seconds = spec["most_steps"] * (0.001 + 1e-5 * spec["batch_size"])
value, ended = 1 / p["width"] + (math.log10(p["learning_rate"]) + 2) ** 2, "done"
if p["learning_rate"] > 0.5:
    value, ended = None, "diverged"
"""
RESULT = '{"value": value, "steps": spec["most_steps"], "seconds": seconds, "ended": ended}'


def job(*search: str, own: ModuleDefaults = OWN, **others: Any) -> TuneJob:
    length = others.pop("length", Length(epochs=2.0))
    parameters = center_parameters(search_parameters(search or SEARCH), own, length, {"width": 16})
    training = others.pop("training", Training("train.py:make"))
    settings: dict[str, Any] = {"trials": 6} | others
    return TuneJob(training, own, "val_loss", False, parameters, length, **settings)


def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, **others: Any) -> Ledger:
    """The ledger of a search by one worker in this process."""
    scripted(tmp_path, monkeypatch, SCRIPT.format(body=others.pop("body", "")), RESULT)
    begun = job(**others)
    ledger = Ledger.begin(str(tmp_path / f"{name}.journal"), "tune", begun)
    Worker(ledger, begun, tmp_path / name).work()
    return ledger


def parameters_in(ledger: Ledger) -> list[dict[str, Any]]:
    entries = ledger.entries()
    return [dict(entries[key].spec["parameters"]) for key in sorted(entries, key=int)]


def entry(number: int, state: State = State.DONE, **result: Any) -> Entry:
    spec = job().spec(number, job().center)
    return Entry(str(number), state, number, 1, spec, {}, math.nan, result)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A search of 9 trainings, one of which fails each time that it is tried."""
    with pytest.MonkeyPatch.context() as patch:
        tmp_path = tmp_path_factory.mktemp("tune")
        body = "if folder.name.startswith('3'): raise ArithmeticError('no such luck')"
        yield trained(tmp_path, patch, "first", trials=9, body=body)


def test_the_settings_come_back_from_json() -> None:
    begun = job("act=relu,tanh", "keep=0.5..0.9:logit", own=replace(OWN, examples=math.inf))

    assert job_from(json.loads(json.dumps({"kind": "tune", **begun.as_dict()}))) == begun


def test_a_search_begins_at_the_own_settings_not_at_the_dearest() -> None:
    (task,) = job().next_tasks({})

    own = {"learning_rate": 0.05, "batch_size": 32, "width": 16}
    assert (task.key, task.spec["parameters"]) == ("0", own)
    assert task.spec["arguments"] == {"width": 16}
    assert task.spec["hyperparameters"] == {"learning_rate": 0.05}


def test_a_search_learns_from_results_and_gives_up_what_fails(searched: Ledger) -> None:
    entries = searched.entries()

    assert list(entries) == [str(k) for k in range(9)]
    assert FAILED in entries["3"].result
    assert len({json.dumps(each) for each in parameters_in(searched)}) > 5
    found = Tune.of(job(trials=9), entries, Place("tune", "tune.journal"))
    assert (len(found.front.trials), found.finished) == (9, True)
    assert found.progress.device_hours > 0
    assert all(each.cost > 0 for each in found.front.front)


def test_a_suggestion_depends_on_the_seed_the_results_and_what_is_under_way(
    searched: Ledger,
) -> None:
    entries = {key: each for key, each in searched.entries().items() if int(key) < 7}
    begun = job(trials=9)

    (again,) = begun.next_tasks(entries)
    (other,) = replace(begun, seed=1).next_tasks(entries)
    under_way = Entry("7", State.RUNNING, 9, 1, again.spec, {}, 0.0, {})
    (second,) = begun.next_tasks({**entries, "7": under_way})
    lost = replace(under_way, state=State.GIVEN_UP, result={FAILED: "no such luck"})
    (after_failure,) = begun.next_tasks({**entries, "7": lost})

    assert again.spec["parameters"] == parameters_in(searched)[7]
    assert other.spec["parameters"] != again.spec["parameters"]
    assert second.key == after_failure.key == "8"
    assert second.spec["parameters"] != after_failure.spec["parameters"]


def test_what_waits_comes_before_anything_new() -> None:
    begun = job()
    entries = {"0": entry(0, value=1.0, seconds=1.0, ended="done"), "1": entry(1, State.FAILED)}

    (again,) = begun.next_tasks(entries)

    assert (again.key, again.spec) == ("1", entries["1"].spec)


def test_the_budget_ends_the_search_lets_running_trainings_end_and_is_in_the_progress() -> None:
    begun = job(trials=None, budget=0.5)
    done = entry(0, value=0.25, seconds=90.0, ended="done", device_seconds=1900.0)
    lost = entry(1, value=None, seconds=9.0, ended="diverged", device_seconds=260.0)
    over = {"0": done, "1": lost}
    entries = {**over, "2": entry(2, State.RUNNING)}

    assert [task.key for task in begun.next_tasks(entries)] == ["2"]
    assert not begun.is_finished(entries)
    assert begun.next_tasks(over) == []
    assert begun.is_finished(over)
    said = progress_sentence(Tune.of(begun, entries, Place("tune", "tune.journal")))
    assert said.startswith("1 training done, 1 without a result, 1 under way, 0.6 of 0.5 ")
    assert said.endswith("val_loss: 0.25 for 90.0 device-seconds")


def test_a_search_goes_on_with_a_larger_budget_and_with_nothing_else_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = trained(tmp_path, monkeypatch, "more", trials=2)

    more = trained(tmp_path, monkeypatch, "more", trials=3)

    assert len(more.entries()) == 3
    assert parameters_in(more)[:2] == parameters_in(ledger)[:2]
    assert job_from(more.job) == job(trials=3)
    with pytest.raises(Refusal, match="`seed`"):
        Ledger.begin(str(tmp_path / "more.journal"), "tune", job(trials=3, seed=1))


def test_the_files_have_all_trainings_and_the_front(searched: Ledger, tmp_path: Path) -> None:
    found = Tune.of(job(trials=9), searched.entries(), Place("tune", "tune.journal"))

    found.write_files(tmp_path)

    names, first, _, _, failed, *_ = lines = (tmp_path / "trials.csv").read_text().splitlines()
    assert names == (
        "trial,learning_rate,batch_size,width,examples_of_a_step,steps,device_seconds,val_loss,ended"
    )
    assert first.startswith("0,0.05,32,16,32,62,")
    assert failed.endswith(",,,failed")
    assert len(lines) == 10
    front = (tmp_path / "front.csv").read_text().splitlines()
    assert len(front) == 1 + len(found.front.front)


def test_equal_progress_gives_each_batch_size_the_steps_of_the_law() -> None:
    """S = S_min·(1 + B_crit/B): 62 steps at 32 are 2·31·(1 + 64/B)/3."""
    begun, by_epochs = job(length=Length(epochs=2.0, noise_scale=64.0)), job()

    steps = {size: begun.steps_of({"batch_size": size}) for size in (8, 32, 64, 256)}

    assert steps == {size: math.ceil(62 * (1 + 64 / size) / 3) for size in steps}
    assert steps[32] == 62
    assert [by_epochs.steps_of({"batch_size": size}) for size in (8, 32)] == [250, 62]


def test_the_prior_of_the_cost_is_steps_times_seconds_a_step() -> None:
    begun = job(length=Length(steps=100, noise_scale=64.0))
    entries = {}
    for k, size in enumerate((8, 64, 256)):
        result = {"steps": 50, "seconds": 50 * (0.002 + 1e-4 * size), "ended": "done"}
        spec = begun.spec(k, {"batch_size": size})
        entries[str(k)] = Entry(str(k), State.DONE, k, 1, spec, {}, 0.0, result)
    timed = replace(begun, timings=((32.0, 1, 0.01), (64.0, 1, 0.02)))

    cost, from_run = prior_cost(begun, entries), prior_cost(timed, {})

    assert cost is not None
    steps = math.ceil(100 * (1 + 64 / 128) / 3)
    assert cost({"batch_size": 128}) == pytest.approx(steps * (0.002 + 1e-4 * 128), rel=1e-6)
    assert prior_cost(begun, {}) is None
    assert from_run is not None
    assert from_run({"batch_size": 32}) == pytest.approx(100 * 0.01)


def test_an_adam_keeps_its_half_life_and_large_batches_are_accumulated() -> None:
    begun = job(own=replace(OWN, beta2=0.99), max_device_batch_size=64)

    spec = begun.spec(0, {"batch_size": 256, "width": 8})

    assert spec["beta2"] == pytest.approx(0.99**8)
    assert (spec["device_batch_size"], spec["accumulation"]) == (64, 4)
    assert spec["batches_of_epoch"] == 3 * 4


@pytest.mark.parametrize(
    ("others", "argument", "got"),
    [
        ({"own": ModuleDefaults(100, 32, 0.05)}, "search", ""),
        ({"training": Training("t", devices=3)}, "search", "8 to 256"),
        ({"training": Training("t", devices=16)}, "search", "8"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(
    others: dict[str, Any], argument: str, got: str
) -> None:
    with refused(argument) as found:
        job(**others)
    assert got in found.value.got


def test_a_center_that_was_given_stays_and_a_real_default_makes_real_values() -> None:
    rate = range_parameter("learning_rate", 0.001, 1, center=0.3)
    (dropout,) = search_parameters(["dropout=0..1:linear"])

    found = center_parameters([rate, dropout], OWN, Length(epochs=1), {"dropout": 0.1})

    assert [each.center for each in found] == [0.3, 0.1]
    assert not found[1].whole
