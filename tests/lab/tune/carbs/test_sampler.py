# SPDX-License-Identifier: Apache-2.0
import functools
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from lab.tune.carbs.studies import CENTER, SPACE, ended, loss, params_of, study, train
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from refused import refused
from tiers import slow, slow_but

import noisescale
from noisescale import CarbsSampler
from noisescale.extras import MissingExtraError
from noisescale.lab.tune.carbs.pareto import pareto_front
from noisescale.lab.tune.carbs.spaces import LinearSpace, LogSpace, PowerOfTwoSpace


def why(trial: Any) -> str:
    found = trial.study._storage.get_trial(trial._trial_id) if hasattr(trial, "study") else trial
    return str(found.system_attrs["carbs:suggestion"]["why"])


@functools.cache
def trained() -> list[FrozenTrial]:
    made = study(CarbsSampler(seed=0, centers=CENTER))
    train(made, 14)
    return made.trials


def after(trials: int, **settings: Any) -> optuna.Study:
    """A study that has trained so many trials; with other settings in a new one."""
    made = study(CarbsSampler(**{"seed": 0, "centers": CENTER} | settings))
    if settings:
        train(made, trials)
    else:
        made.add_trials(trained()[:trials])
    return made


def test_the_first_trials_are_near_the_centre_and_the_first_is_it() -> None:
    made = after(4)

    assert made.trials[0].params == CENTER
    widths = [trial.params["width"] for trial in made.trials]
    assert max(widths) < 512 / 4  # optuna#3656: not the dearest
    assert len({trial.params["lr"] for trial in made.trials}) == 4


def test_an_enqueued_trial_is_the_centre_else_the_middle() -> None:
    made, without = study(CarbsSampler(seed=0)), study(CarbsSampler(seed=0))
    made.enqueue_trial({"width": 256, "lr": 1e-4, "dropout": 0.7})
    train(made, 4)
    train(without, 1)

    assert made.trials[0].params == {"width": 256, "lr": 1e-4, "dropout": 0.7}
    logs = [[math.log10(t.params["width"]), math.log10(t.params["lr"])] for t in made.trials]
    assert np.abs(np.subtract(logs, [math.log10(256), -4])).max() < 1.2
    assert without.trials[0].params == pytest.approx({"width": 64, "lr": 1e-3, "dropout": 0.4})


def test_the_same_seed_and_history_give_the_same_suggestion() -> None:
    made = after(10)
    copies = [study(CarbsSampler(seed=seed, centers=CENTER), made.trials) for seed in (0, 0, 1)]

    first, second, other = (copy.ask(SPACE).params for copy in copies)

    assert first == second != other
    # Also by a sampler that has been in use, and one that was pickled.
    made.sampler = pickle.loads(pickle.dumps(made.sampler))
    assert made.ask(SPACE).params == first
    assert trained()[10].params == first
    assert CarbsSampler()._seed != CarbsSampler()._seed


@pytest.mark.slow
def test_a_study_goes_on_in_another_process(tmp_path: Path) -> None:
    places = [f"{tmp_path}/journal", f"sqlite:///{tmp_path}/study.db"]
    for place in places:
        stored(place, 5)

    script = (
        "import sys; from lab.tune.carbs.test_sampler import stored;"
        "[stored(place, 3) for place in sys.argv[1:]]"
    )
    tests = Path(__file__).parents[3]
    subprocess.run(
        [sys.executable, "-c", script, *places],
        check=True,
        env={"PYTHONPATH": f"{tests}:{tests.parent}", "PATH": "", "OMP_NUM_THREADS": "1"},
    )

    whole = params_of(after(8))
    assert [params_of(stored(place, 0)) for place in places] == [whole, whole]


def stored(place: str, count: int) -> optuna.Study:
    """Go on with a study in a storage."""
    backend = optuna.storages.journal.JournalFileBackend
    made = study(
        CarbsSampler(seed=0, centers=CENTER),
        storage=place if "://" in place else optuna.storages.JournalStorage(backend(place)),
        study_name="stored",
        load_if_exists=True,
    )
    train(made, count)
    return made


def test_what_is_under_way_is_known_to_others() -> None:
    """Also what a trial has not yet asked for."""
    made = after(6)

    trials = [made.ask(SPACE) for _ in range(4)]
    partial = made.ask()
    partial.suggest_int("width", 8, 512, log=True)  # the others were suggested, too
    left = made.ask(SPACE)

    points = np.array([[math.log10(t.params["width"]), math.log10(t.params["lr"])] for t in trials])
    assert len({tuple(point) for point in points}) == 4
    stored = json.loads(made.trials[partial.number].system_attrs["carbs:suggested"])
    assert set(stored) == set(SPACE)
    assert left.params["lr"] != stored["lr"]
    for trial in trials:
        trial.set_user_attr("cost", 1.0)
        made.tell(trial, 1.0)


def test_every_fifth_suggestion_repeats_the_cheapest_of_the_front() -> None:
    made = after(14)

    trial = made.ask(SPACE)

    assert trial.number == 14
    assert why(trial) == "resample"
    by_cost = sorted(made.trials[:14], key=lambda t: (t.params["width"], t.value))
    front = [t.params for i, t in enumerate(by_cost) if all(t.value < c.value for c in by_cost[:i])]
    fewest = min(params_of(made)[:14].count(params) for params in front)
    assert trial.params == next(p for p in front if params_of(made)[:14].count(p) == fewest)


@pytest.mark.parametrize("count", [16, slow(25)])
def test_a_front_of_one_member_is_not_repeated_for_ever(count: int) -> None:
    """At equal cost one trial is the whole front."""
    made = study(CarbsSampler(seed=0, centers=CENTER))
    train(made, count, lambda at: 0.0 if at == CENTER else 1.0 + at["lr"], cost=None)

    assert [why(made.trials[i]) for i in (4, 9)] == ["resample"] * 2
    assert [params for params in params_of(made) if params == CENTER] == [CENTER] * 3
    assert len({repr(params) for params in params_of(made)}) == count - 2


@pytest.mark.parametrize("count", [25, slow(40)])
def test_the_search_goes_on_below_the_cost_of_its_centre(count: int) -> None:
    made = study(CarbsSampler(seed=0, centers=CENTER | {"width": 128}))
    train(made, count)

    front = pareto_front(made)

    assert front[0].cost < 128 / 4
    assert front[-1].cost > 128


def test_suggestions_spread_over_costs_where_cost_does_not_help() -> None:
    """The cheapest settings alone gain most there: all known ones cost 32 and more."""
    rng = np.random.default_rng(0)
    drawn = rng.uniform([5, -4, 0], [8, -2, 0.8], (16, 3))
    known = [{"width": int(2**w), "lr": 10**lr, "dropout": off} for w, lr, off in drawn]
    trials = [ended(p, 1 + 0.01 * rng.normal(), cost=float(p["width"])) for p in known]
    makes = [CarbsSampler(seed=seed, resample_every=0) for seed in range(10)]

    widths = [study(make, trials).ask(SPACE).params["width"] for make in makes]

    assert sum(width < 32 for width in widths) >= 4
    assert sum(width >= 40 for width in widths) >= 2


def test_the_search_steps_farther_as_trials_grow() -> None:
    """All settings perform alike, so only the distance to what is known counts."""
    space = {name: FloatDistribution(-20.0, 20.0) for name in ("x", "y")}
    spaces = {"x": LinearSpace(), "y": LinearSpace()}
    known = np.random.default_rng(0).uniform(-1, 1, (5, 2))

    def distance(repeats: int) -> float:
        points = np.repeat(known, repeats, axis=0)
        trials = [ended({"x": x, "y": y}, 1.0, space=space, cost=1.0) for x, y in points]
        found = []
        for seed in range(6):
            made = study(CarbsSampler(seed=seed, spaces=spaces, resample_every=0), trials)
            asked = made.ask(space).params
            found.append(np.hypot(*(known - [asked["x"], asked["y"]]).T).min())
        return float(np.mean(found))

    assert distance(12) > 2.2 * distance(1)


@pytest.mark.parametrize("count", [10, slow(15)])
def test_nothing_is_repeated_without_resampling(count: int) -> None:
    made = after(count, resample_every=0)

    assert len({repr(params) for params in params_of(made)}) == count


def test_a_failure_that_is_not_the_parameters_fault_is_tried_again() -> None:
    made = after(6)
    failed = []
    for _ in range(3):
        trial = made.ask(SPACE)
        failed.append(trial.params)
        trial.set_user_attr("unrelated_failure", True)
        made.tell(trial, state=TrialState.FAIL)

    assert failed[0] == failed[1] == failed[2]
    assert made.ask(SPACE).params != failed[0]  # given up


@pytest.mark.parametrize(
    "state", slow_but([TrialState.FAIL, TrialState.PRUNED, TrialState.COMPLETE], TrialState.FAIL)
)
def test_the_search_keeps_away_from_failures(state: TrialState) -> None:
    space = {"x": FloatDistribution(-2.0, 2.0), "y": FloatDistribution(-2.0, 2.0)}
    value = math.inf if state == TrialState.COMPLETE else None
    rng = np.random.default_rng(0)
    points = [{"x": x, "y": y} for x, y in rng.uniform(-1, 1, (30, 2))]
    # The result is better the larger x is, where nothing succeeds.
    trials = [
        ended(p, value, state, space) if p["x"] > 0 else ended(p, -p["x"], space=space, cost=1.0)
        for p in points
    ]

    def asked(history: list[Any]) -> list[float]:
        found = []
        for seed in range(8):
            made = study(CarbsSampler(seed=seed, resample_every=0), history)
            found.append(float(made.ask(space).params["x"]))
        return found

    assert np.mean(asked(trials)) < np.mean(asked([t for t in trials if t.params["x"] <= 0])) - 0.05


@pytest.mark.parametrize(("count", "predicted"), [(14, 9), slow(25, 20)])
def test_no_suggestion_costs_more_than_the_limit(count: int, predicted: int) -> None:
    made = after(count, max_cost=40.0)

    costs = [
        t.system_attrs["carbs:suggestion"]["cost"]
        for t in made.trials
        if "cost" in t.system_attrs.get("carbs:suggestion", {})
    ]
    assert len(costs) >= predicted
    assert max(costs) <= 40.0
    # The cost is the width.
    assert max(t.params["width"] for t in made.trials) <= 44


@pytest.mark.parametrize("count", [8, slow(12)])
def test_a_predicted_cost_holds_the_limit_from_the_start(count: int) -> None:
    made = after(count, max_cost=20.0, cost_prior=lambda params: params["width"])

    assert max(t.params["width"] for t in made.trials[1:]) <= 20
    found = made.trials[6].system_attrs["carbs:suggestion"]["cost"]
    assert found == pytest.approx(made.trials[6].params["width"], rel=0.01)


@pytest.mark.slow
def test_a_front_is_found_at_less_cost_than_at_random() -> None:
    """Random points are no better at twice the cost."""

    def area(made: optuna.Study, budget: float) -> float:
        """Of the best loss at each cost, from the centre's on: its mean over log cost."""
        spent, points = 0.0, []
        for trial in made.trials:
            spent += trial.user_attrs["cost"]
            if spent > budget:
                break
            points.append((trial.user_attrs["cost"], abs(trial.value)))  # type: ignore[arg-type]  # it has one
        costs = np.geomspace(CENTER["width"], 512, 50)
        best = [min([v for c, v in points if c <= cost], default=2.0) for cost in costs]
        return float(np.mean(best))

    ours, random = [], []
    for seed in range(2):
        made = study(CarbsSampler(seed=seed, centers=CENTER))
        train(made, 30)
        spent = sum(trial.user_attrs["cost"] for trial in made.trials)
        ours.append(area(made, spent))
        made = study(optuna.samplers.RandomSampler(seed=seed))
        train(made, 100)
        random.append(area(made, 2 * spent))

    assert max(ours) < min(random) - 0.02, (ours, random)


def test_larger_is_better_mirrors_smaller_is_better() -> None:
    up = study(CarbsSampler(seed=0, centers=CENTER), direction="maximize")
    train(up, 8)

    assert params_of(up) == params_of(after(8))


def test_points_on_a_curve_count_as_shorter_runs() -> None:
    from noisescale.lab.tune.carbs.dimensions import dimensions_of
    from noisescale.lab.tune.carbs.observations import observe

    space = {"steps": IntDistribution(10, 1000, log=True)}
    curve = [[10.0, 0.9], [50.0, 0.5], [99.0, math.nan]]
    trials = [ended({"steps": 500}, 0.3, space=space, cost=100.0, curve=curve)]
    # One that was stopped early has to say how long its points are.
    pruned = [[10.0, 0.8, 51], [20.0, 0.7]]
    trials.append(ended({"steps": 500}, None, TrialState.PRUNED, space, curve=pruned))
    bad = [ended({"steps": 500}, 0.3, space=space, cost=1.0, curve=[[0.0, 1.0]])]
    options: dict[str, Any] = {"cost": "cost", "length": "steps", "before": 9, "attempts": 3}

    seen = observe(trials, dimensions_of(space, {"steps": LogSpace()}), sign=-1, **options)

    assert (10 ** seen.points[:, 0]).round(6).tolist() == [500, 50, 250, 51]
    assert seen.costs.tolist() == [100, 10, 50, 10]
    assert seen.outputs.tolist() == [-0.3, -0.9, -0.5, -0.8]
    assert seen.whole == (True, False, False, False)
    assert len(seen.failures) == 1
    made = study(CarbsSampler(seed=0, n_startup_trials=1, length="steps"), trials)
    assert 10 <= made.ask(space).params["steps"] <= 1000
    with refused("length"):
        study(CarbsSampler(seed=0), trials).ask(space)
    with refused("curve"):
        study(CarbsSampler(seed=0, length="steps"), bad).ask(space)


def test_powers_of_two_also_among_choices() -> None:
    space: dict[str, Any] = {
        "batch": IntDistribution(8, 4096, log=True),
        "micro": CategoricalDistribution([8, 16, 32, 64]),
        "optimizer": CategoricalDistribution(["sgd", "adam", None]),
    }
    spaces = {"batch": PowerOfTwoSpace(), "micro": PowerOfTwoSpace()}
    made = study(CarbsSampler(seed=0, spaces=spaces))
    train(made, 12, lambda at: float(at["micro"] / at["batch"]), space, None)

    found = params_of(made)
    assert {math.log2(params["batch"]) % 1 for params in found} == {0}
    assert len({params["batch"] for params in found}) > 3
    assert {type(params["batch"]) for params in found} == {int}
    assert len({params["optimizer"] for params in found}) == 3
    assert all(params["micro"] in (8, 16, 32, 64) for params in found)


def test_a_wide_distribution_is_searched_without_ends() -> None:
    """Steps are in the space's unit, however wide the distribution is."""
    space: dict[str, Any] = {"x": FloatDistribution(-1e9, 1e9)}
    made = study(CarbsSampler(seed=0, centers={"x": 3.0}, spaces={"x": LinearSpace(scale=2.0)}))
    train(made, 25, lambda at: float((at["x"] - 7.0) ** 2), space, None)

    assert abs(made.trials[1].params["x"] - 3.0) < 1.5
    assert abs(made.best_params["x"] - 7.0) < 0.5


@pytest.mark.parametrize(
    ("argument", "got"),
    [("seed", -1), ("max_cost", 0), ("resample_every", 1.5), ("n_startup_trials", 0)],
)
def test_arguments_out_of_range_are_refused(argument: str, got: float) -> None:
    with refused(argument, got=str(got)):
        CarbsSampler(**{argument: got})


@pytest.mark.parametrize("center", [0.9, -1.0, "much"])
def test_a_centre_outside_the_range_is_refused(center: Any) -> None:
    with refused("centers", requirement="'dropout'", got=repr(center)):
        study(CarbsSampler(centers={"dropout": center})).ask(SPACE)


def test_a_parameter_outside_its_space_is_refused() -> None:
    space = {"x": FloatDistribution(0.0, 1.0)}
    history = [ended({"x": 0.0}, 1.0, space=space, cost=1.0)]
    spaces = {"x": LogSpace()}

    with refused("spaces", requirement="'x'", got="0.0 in trial 0 for a LogSpace"):
        study(CarbsSampler(spaces=spaces), history).ask(space)
    with refused("spaces", requirement="'x'"):
        study(CarbsSampler(spaces=spaces)).ask({"x": FloatDistribution(-2.0, -1.0)})
    with refused("spaces", requirement="'x'", error=TypeError):
        study(CarbsSampler(spaces=spaces)).ask({"x": CategoricalDistribution(["a", "b"])})


def test_a_study_of_cost_and_loss_is_refused() -> None:
    with refused("study", got="2 directions"):
        study(CarbsSampler(), directions=["minimize", "minimize"]).ask(SPACE)


@pytest.mark.parametrize("predicted", [0.0, math.nan, None])
def test_a_predicted_cost_that_is_none_is_refused(predicted: Any) -> None:
    made = after(6)
    made.sampler = CarbsSampler(cost_prior=lambda params: predicted)

    with refused("cost_prior"):
        made.ask(SPACE)


def test_a_study_in_which_all_failed_goes_on_around_the_centre() -> None:
    made = study(CarbsSampler(seed=0, centers=CENTER))
    for _ in range(8):
        made.tell(made.ask(SPACE), state=TrialState.FAIL)

    assert len({repr(params) for params in params_of(made)}) == 8
    assert all(t.params["width"] < 128 for t in made.trials)
    assert pareto_front(made) == []


@pytest.mark.parametrize("count", [12, slow(20)])
def test_duplicates_in_a_small_space_do_no_harm(count: int) -> None:
    space: dict[str, Any] = {"x": IntDistribution(1, 2), "y": CategoricalDistribution(["a", "b"])}
    made = study(CarbsSampler(seed=0))
    train(made, count, lambda at: float(at["x"]), space, "x")

    assert len({repr(params) for params in params_of(made)}) == 4


@pytest.mark.parametrize("package", ["optuna", "sklearn"])
def test_the_sampler_names_the_extra_that_it_needs(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "noisescale.lab.tune.carbs.sampler")
    monkeypatch.delitem(vars(noisescale), "CarbsSampler", raising=False)

    with pytest.raises(MissingExtraError, match=package) as missing:
        noisescale.CarbsSampler  # noqa: B018

    assert "noisescale[tune]" in str(missing.value)


def test_a_loss_is_what_the_tests_say() -> None:
    assert loss({"width": 16, "lr": 10**-2.150515, "dropout": 0.3}) == pytest.approx(0.25)
