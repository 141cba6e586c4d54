# SPDX-License-Identifier: Apache-2.0
"""Published rules of the batch size, against numbers that their authors and others published."""

import csv
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import program
import pytest
from refused import refused
from reported_runs import history

from noisescale import History, horizon
from noisescale.rules.batch_size_rules import MEANINGS, RULES, TRIALS, Setting

DATA = Path(os.environ.get("NOISESCALE_DATA", Path(__file__).parents[3] / "shared/data"))


def sizes(tokens: float, parameters: float, **options: Any) -> dict[str, float]:
    return {one.rule.name: one.tokens for one in horizon(tokens, parameters, **options).answers}


def test_rules_are_those_that_reviews_restate() -> None:
    """At 10 billion tokens and 300 million parameters, in millions of tokens."""
    found = {name: round(x / 1e6, 2) for name, x in sizes(10e9, 300e6).items()}

    assert found == {
        "Step Law": 0.30,
        "Schaipp": 0.30,
        "Power Lines": 0.42,
        "DeepSeek": 0.58,
        "nanochat": 1.05,
        "Zhang": 0.89,
        "Power Lines, critical": 4.02,
    }


@pytest.mark.parametrize(("tokens", "critical"), [(10e9, 4.0e6), (20e9, 5.5e6), (100e9, 11.7e6)])
def test_zhang_and_power_lines_agree_where_both_mean_the_critical_size(
    tokens: float, critical: float
) -> None:
    """1.2 x 256 + 0.2 x the critical one, in sequences of 512, is Zhang's size."""
    found = sizes(tokens, 300e6)

    assert found["Power Lines, critical"] == pytest.approx(critical, rel=0.02)
    by_zhang = 512 * (5 * found["Zhang"] / 512 - 6 * 256)
    assert by_zhang == pytest.approx(critical, rel=0.15)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data in {DATA}")
def test_zhangs_rule_fits_the_sweeps_that_it_was_fitted_to() -> None:
    """Three models, each trained on 20 tokens for a parameter."""
    with (DATA / "critical_batch_size/reference_fits.csv").open() as file:
        rows = list(csv.DictReader(file))

    assert len(rows) == 3
    for row in rows:
        parameters = float(row["params"])
        found = sizes(20 * parameters, parameters)["Zhang"] / 512
        assert found == pytest.approx(float(row["published_cbs_20pct_overhead"]), rel=0.05)


def test_rules_by_the_loss_are_asked_where_there_is_one() -> None:
    without, with_loss = sizes(10e9, 300e6), sizes(10e9, 300e6, loss=2.9)

    assert with_loss.keys() - without.keys() == {"MiniCPM", "Kaplan"}
    assert with_loss["Kaplan"] == pytest.approx(2e8 / 2.9 ** (1 / 0.21))
    assert "--loss" in horizon(10e9, 300e6).to_text()


def test_every_rule_has_a_meaning_and_grows_with_the_horizon() -> None:
    small, large = Setting(1e9, 1e8, 3.5), Setting(1e12, 1e8, 2.5)

    for rule in RULES:
        assert rule.meaning in MEANINGS
        assert 1e3 < rule.batch_size(small) < rule.batch_size(large) < 1e9


def test_rules_come_by_the_evidence_that_there_is_for_them() -> None:
    """Of Step Law's runs two rules were near the best in 15 of 17, and two in less than half."""
    found = horizon(10e9, 300e6)

    ranked = [one.rule.name for one in found.answers if one.rule.meaning == "lowest loss"]
    assert ranked == ["Step Law", "Schaipp", "Power Lines", "DeepSeek", "nanochat"]
    inside = {one.rule.name: one.is_inside for one in found.answers}
    assert [name for name, there in inside.items() if not there] == ["DeepSeek", "nanochat"]
    assert (found.take.value, found.take.low) == (pytest.approx(2.98e5, rel=0.01),) * 2
    assert found.take.high == pytest.approx(4.24e5, rel=0.01)
    assert "take a batch of 298k tokens; 2 of 5 rules are outside" in found.document().headline


SWEPT = {
    46_006_272: (32_768, 65_536, 65_536, 131_072),
    109_051_904: (32_768, 65_536, 131_072, 131_072),
    368_050_176: (65_536, 65_536, 131_072, 131_072),
    872_415_232: (65_536, 65_536, 131_072, 131_072),
}
"""The best batch sizes of Lingle's models after 128 to 1,024 million tokens."""


def test_rules_against_swept_optima_are_as_far_off_as_the_table_says() -> None:
    swept = dict(TRIALS[1].results)
    off: dict[str, list[float]] = {name: [] for name in swept}
    for parameters, best in SWEPT.items():
        for doublings, batch_size in enumerate(best):
            found = sizes(127_991_808.0 * 2**doublings, parameters)
            for name in off:
                off[name].append(math.log(found[name] / batch_size))

    medians = {name: math.exp(np.median(ratios)) for name, ratios in off.items()}
    for name, result in swept.items():
        numbers = [float(x) for x in re.findall(r"[0-9.]+", result.text)]
        assert 0.97 * min(numbers) < medians[name] < 1.05 * max(numbers), name
        assert result.holds == (abs(math.log2(medians[name])) <= 1)
    assert sorted(medians, key=lambda name: abs(math.log(medians[name]))) == list(swept)


def test_where_other_rules_did_better_these_are_taken() -> None:
    found = horizon(0.5e9, 100e6, sequence_length=2048)

    first, *_ = found.answers
    assert (first.rule.name, first.standing.text) == ("Power Lines", "1.3 to 1.6 x the best")
    assert (found.take.value, found.take.high) == (first.tokens, first.tokens)
    assert found.take.low == pytest.approx(sizes(0.5e9, 100e6)["Step Law"])


def test_at_sequences_of_128_every_rule_is_outside_of_its_evidence() -> None:
    """Kaplan and MiniCPM were 13 and 16 x off there."""
    found = horizon(0.5e9, 30e6, loss=3.5, sequence_length=128)

    said = {one.rule.name: (one.is_inside, one.standing.text) for one in found.answers}
    assert said["Kaplan"] == (False, "13 x off")
    assert said["MiniCPM"] == (False, "16 x off")
    assert not any(inside for inside, _ in said.values())
    assert "all rules are outside of their evidence" in found.document().headline
    take, *_ = found.document().answers
    assert take.sentence.startswith("outside of all evidence, by rules that held elsewhere")
    inside = {one.rule.name: one.is_inside for one in horizon(0.5e9, 30e6, loss=3.5).answers}
    assert inside["Kaplan"]
    assert inside["MiniCPM"]


@pytest.mark.parametrize(
    ("rule", "asked", "options", "outside"),
    [
        ("Step Law", (1e14, 1e12), {}, "tokens, parameters"),
        ("Zhang", (10e9, 300e6), {"sequence_length": 2048}, "sequence length"),
        ("Power Lines", (10e9, 300e6), {"optimizer": "muon"}, "optimizer"),
        ("Power Lines", (2e9, 200e6), {}, "tokens per parameter"),
        ("DeepSeek", (2e9, 200e6), {}, "fitted there, but 4 of 17 within 0.25 % of the best loss"),
    ],
)
def test_a_rule_says_in_what_it_is_outside(
    rule: str, asked: tuple[float, float], options: dict[str, Any], outside: str
) -> None:
    said = {one.rule.name: one.standing for one in horizon(*asked, **options).answers}

    assert not said[rule].has_evidence
    assert said[rule].text.startswith(outside)


def test_with_muon_the_rule_that_was_fitted_with_it_is_taken() -> None:
    found = horizon(5e9, 300e6, optimizer="Muon")

    assert [one.rule.name for one in found.answers if one.is_inside] == ["nanochat"]
    assert found.take.low == found.take.high == sizes(5e9, 300e6)["nanochat"]


def test_json_has_the_batch_size_to_take_and_the_evidence() -> None:
    found = horizon(10e9, 300e6, sequence_length=2048).to_dict()

    assert (found["take_by"], found["outside"]) == ("Step Law", False)
    assert found["take"]["value"] == pytest.approx(2.98e5, rel=0.01)
    assert found["rules"][0]["evidence"].startswith("15 of 17")
    assert found["rules"][1]["fitted"] is None  # Schaipp: not known here


def test_sources_are_given_of_rules_and_of_the_trainings_they_were_held_against() -> None:
    found = " ".join(horizon(10e9, 300e6, loss=2.9).to_text(details=True).split())

    for trial in TRIALS:
        assert trial.evidence.source in found
        assert set(trial.results) <= {rule.name for rule in RULES}
    assert "were read in papers" in found
    assert "arXiv 2401.02954" in found


def test_the_command() -> None:
    text = program.run(
        "horizon", "--tokens", "10B", "--parameters", "300M", "--sequence-length", "2048"
    )

    assert "1,963 sequences" in text


@pytest.mark.parametrize(
    ("words", "remedied"),
    [
        (["--tokens", "ten"], ["--tokens", "10B"]),
        (["--tokens", "nan"], ["--tokens", "10B"]),
        (["--tokens", "10"], ["--tokens", "10e9"]),
        (["--tokens", "0"], ["--tokens", "10e9"]),
        (["--parameters", "-3"], ["--parameters", "300M"]),
        (["--parameters", "1e40"], ["--parameters", "300e6"]),
        (["--loss", "1.2"], []),
        (["--loss", "nan"], []),
        (["--sequence-length", "0"], ["--sequence-length", "2048"]),
        (["--optimizer", "sgd"], ["--optimizer", "adamw"]),
    ],
)
def test_the_command_names_its_flags_and_a_remedy_that_works(
    words: list[str], remedied: list[str]
) -> None:
    given = ["--tokens", "10B", "--parameters", "300M"]

    said = program.refused("horizon", *given, *words)

    assert said.startswith(f"`{words[0]}` must")
    assert all(word in said for word in remedied[1:])
    program.run("horizon", *given, *remedied)


def test_the_command_needs_tokens_and_parameters() -> None:
    assert "'--parameters'" in program.refused("horizon", "--tokens", "10B")
    assert "'--tokens'" in program.refused("horizon", "--parameters", "1B")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tokens", x) for x in (0, -1e9, math.nan, math.inf, 1e17, 1e5, "10B")),
        *(("parameters", x) for x in (0, -1e9, math.nan, math.inf, 1e15, 10.0, None)),
        *(("loss", x) for x in (math.inf, math.nan, 1.0, 25.0, "2")),
        *(("sequence_length", x) for x in (0, -1, math.nan, 0.5, 2e9)),
        *(("optimizer", x) for x in ("lion", 3)),
    ],
)
def test_bad_input(name: str, value: Any) -> None:
    large = isinstance(value, float) and math.isfinite(value) and name in ("tokens", "parameters")
    with refused(name, got=f"{value:g}" if large and value > 0 else repr(value)):
        horizon(**{"tokens": 1e9, "parameters": 1e8, name: value})


def test_a_sequence_longer_than_the_training_is_refused() -> None:
    with refused("sequence_length", got="2000000 > 1e+06", remedy="one sequence"):
        horizon(1e6, 1e8, sequence_length=2_000_000)


def test_a_run_stands_beside_the_rules_if_it_counts_tokens_or_sequences() -> None:
    def run(unit: str) -> History:
        return History.from_columns(history(noise_scale=100.0), unit=unit)

    def measured(unit: str, length: int | None = None) -> float:
        found = horizon(1e9, 1e8, run=run(unit), sequence_length=length).measured
        assert found is not None
        return found.value

    assert measured("tokens") == pytest.approx(100)
    assert measured("sequences", 512) == pytest.approx(51_200)
    both = ("run", "sequence_length")
    with refused(*both, got="sequences and None", remedy="Give the tokens in a sequence"):
        measured("sequences")
    with refused(*both, got="examples and 512", remedy="Leave `run` out"):
        measured("examples", 512)
