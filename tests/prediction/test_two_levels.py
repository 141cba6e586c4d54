# SPDX-License-Identifier: Apache-2.0
"""What a prediction says of groups and rows: from columns of a run to the sentence."""

import math
from typing import Any

import pytest
from refused import refused
from reported_runs import history

from noisescale import History, Prediction, predict
from noisescale.history.history import as_history
from noisescale.prediction.two_levels import steps_at

BETWEEN, WITHIN, N, PROMPTS = 5.0, 200.0, 4, 16
B = PROMPTS * N
NOISE_SCALE = N * (BETWEEN + WITHIN / N)


def run(**changed: Any) -> History:
    """A run at 64 completions, of 16 prompts, whose levels are known."""
    levels = {"between": BETWEEN, "within": WITHIN, "balance": WITHIN / BETWEEN}
    columns = {}
    for name, value in levels.items():
        columns |= {name: value, f"{name}_low": value / 1.5, f"{name}_high": value * 1.5}
    counts = {"groups": PROMPTS, "rows_per_group": N, "still": 0.25}
    found = history(noise_scale=NOISE_SCALE, batch_size=B, **{**columns, **counts, **changed})
    return as_history({name: column for name, column in found.items() if name != "window"})


def said(p: Prediction) -> tuple[str, list[str]]:
    (statement,) = (x for x in p.document().answers if " or " in x.label and x.label[0] in "GP")
    return statement.sentence, [f"{part.label}: {part.sentence}" for part in statement.parts]


def test_steps_are_those_of_the_noise_between_and_within() -> None:
    p = predict(run())
    levels = p.levels
    assert levels is not None

    def noise(prompts: float, n: float) -> float:
        """Relative to |G|², from scratch."""
        return (BETWEEN + WITHIN / n) / prompts

    for prompts, n in ((2, 1), (1, 2), (0.5, 2), (1, 0.5)):
        expected = (1 + noise(PROMPTS * prompts, N * n)) / (1 + noise(PROMPTS, N))
        found = steps_at(p, levels, prompts, n)
        assert found.value == pytest.approx(expected, rel=0.02)
        assert found.low <= found.value <= found.high
    assert steps_at(p, levels, 2, 1).value == pytest.approx(p.position.steps(2 * B).value)


def test_noise_within_centred_groups_goes_as_one_over_the_others() -> None:
    """By brute force: see benchmarks/accuracy/two_levels.py."""
    centred = run()
    centred.loop = "trl"
    p = predict(centred)
    assert p.levels is not None

    def noise(prompts: float, n: float) -> float:
        return (BETWEEN + WITHIN / N * (N - 1) / (n - 1)) / prompts

    for prompts, n in ((2, 1), (1, 2), (0.5, 2), (1, 0.5)):
        expected = (1 + noise(PROMPTS * prompts, N * n)) / (1 + noise(PROMPTS, N))
        assert steps_at(p, p.levels, prompts, n).value == pytest.approx(expected, rel=0.02)
    assert p.levels.noise_scale(8, centred=True) == pytest.approx(noise(1, 8))
    assert p.levels.noise_scale(1, centred=True) == math.inf


def test_the_sentence_weighs_groups_against_rows() -> None:
    p = predict(run())

    sentence, parts = said(p)

    assert sentence.startswith("doubling the groups likely takes 0.")
    assert "doubling the rows of each 0." in sentence
    assert "Rows beyond about 40 (27 to 60) a group waste them" in sentence
    assert "25 % of the groups have no gradient" in sentence
    assert parts[0] == "Noise scale between groups: 5.0 (3.3 to 7.5) groups"
    assert parts[1] == "Noise scale within groups: 200 (130 to 300) rows"


def test_more_rows_than_the_balance_waste_them() -> None:
    few = {"balance": 2.0, "balance_low": 1.5, "balance_high": 3.0}
    sentence, _ = said(predict(run(**few)))
    assert "More than about 2.0 (1.5 to 3.0) rows of a group waste them: you take 4" in sentence


def test_the_words_are_those_of_trl() -> None:
    of_trl = run()
    of_trl.loop = "trl"
    sentence, parts = said(predict(of_trl))
    assert "doubling the prompts" in sentence
    best = 1 + math.sqrt(WITHIN * (N - 1) / N / BETWEEN)  # of n·(between + w/(n - 1))
    assert f"For as many completions a step about {best:.1f} (" in sentence
    assert parts[1].startswith("Noise scale within prompts: 200")


def test_costs_give_the_best_number_of_generations() -> None:
    p = predict(run(), cost_per_prompt=10, cost_per_generation=1)

    assert p.best_rows_per_group is not None
    assert p.best_rows_per_group.value == pytest.approx(math.sqrt(10 * WITHIN / BETWEEN))
    assert said(p)[1][2].startswith("Best rows: 20 (16 to 24) rows of each group have the least")
    record = p.to_dict()["levels"]
    assert record["between"] == pytest.approx({"value": 5, "low": 5 / 1.5, "high": 7.5})
    assert record["best_rows_per_group"]["value"] == pytest.approx(20)
    assert (record["groups"], record["rows_per_group"], record["still"]) == (16, 4, 0.25)
    assert predict(run()).to_dict()["levels"]["best_rows_per_group"] is None


def test_costs_of_a_run_without_groups_say_why_they_change_nothing() -> None:
    p = predict(as_history(history()), cost_per_prompt=1, cost_per_generation=1)
    assert any("`cost_per_prompt`" in one and "`group_fn`" in one for one in p.warnings)


def test_one_row_is_the_least() -> None:
    few = {"balance": 0.2, "balance_low": 0.1, "balance_high": 0.4}
    p = predict(run(**few), cost_per_prompt=1, cost_per_generation=1)
    assert "More than about 1.0 rows of a group waste them" in said(p)[0]
    assert p.best_rows_per_group is not None
    assert p.best_rows_per_group.high == 1.0


def test_costs_are_given_together_and_positive() -> None:
    with refused("cost_per_prompt", requirement="come with `cost_per_generation`"):
        predict(run(), cost_per_prompt=1)
    with refused("cost_per_generation", requirement="be positive"):
        predict(run(), cost_per_prompt=1, cost_per_generation=-1)


def test_what_is_not_known_is_said_so() -> None:
    nan = math.nan
    sentence, _ = said(predict(run(balance=nan, balance_low=3.0, balance_high=nan)))
    assert sentence.startswith(
        "not known yet: the noise between groups cannot be distinguished from zero"
    )
    without = dict.fromkeys(("groups", "between", "within", "balance"), nan)
    p = predict(run(**without))
    assert p.levels is None
    assert p.to_dict()["levels"] is None


def test_the_last_row_that_has_levels_counts_and_a_withheld_run_has_none() -> None:
    steps = [WITHIN] * 39 + [math.nan]
    groups = [PROMPTS] * 39 + [math.nan]
    found = predict(run(within=steps, groups=groups)).levels
    assert found is not None
    assert found.within.value == WITHIN
    withheld = run()
    withheld.withhold("rows are alike")
    assert all(math.isnan(x) for x in withheld["groups"])


def test_the_figure_stands_only_where_levels_are_known() -> None:
    pytest.importorskip("plotly")
    figures = {figure.id: figure for figure in predict(run()).document().figures()}
    names = [trace.get("name") for trace in figures["rows"].drawing["data"]]
    assert {"2 rows a group", "4 rows a group", "8 rows a group"} <= {*names}
    assert "this run: 16 groups of 4" in names
    assert figures["rows"].finding.startswith("Twice the rows: likely 0.")
    without = predict(as_history(history())).document().figures()
    assert "rows" not in [figure.id for figure in without]
