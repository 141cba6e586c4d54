# SPDX-License-Identifier: Apache-2.0
"""Published rules of the batch size, against numbers that their authors and others published."""

import csv
import math
import os
from pathlib import Path
from typing import Any

import program
import pytest
from refused import refused

from noisescale import horizon
from noisescale.rules.batch_size_rules import MEANINGS, RULES, Setting

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


def test_outside_of_what_it_was_fitted_on_a_rule_is_marked() -> None:
    inside = {one.rule.name: one.inside for one in horizon(10e9, 300e6).answers}
    far = {one.rule.name: one.inside for one in horizon(1e14, 1e12).answers}

    assert inside["Step Law"]
    assert inside["Schaipp"] is None  # its range is not known
    assert not far["Step Law"]
    assert not far["Zhang"]
    outside, unknown, second_hand = horizon(1e14, 1e12).document().doubts
    assert ": Step Law" in outside
    assert "Schaipp" in unknown
    assert "papers" in second_hand


def test_the_command() -> None:
    text = program.run(
        "horizon", "--tokens", "10B", "--parameters", "300M", "--sequence-length", "2048"
    )

    assert "1,963 sequences" in text


@pytest.mark.parametrize("words", [["--tokens", "ten"], ["--parameters", "-3"], ["--loss", "1.2"]])
def test_the_command_names_its_flags(words: list[str]) -> None:
    given = ["--tokens", "10B", "--parameters", "300M", *words]

    assert program.refused("horizon", *given).startswith(f"`{words[0]}`")


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", 0), ("loss", math.inf), ("sequence_length", 0)]
)
def test_bad_input(name: str, value: float) -> None:
    with refused(name, got=f"{value}"):
        horizon(**{"tokens": 1e9, "parameters": 1e8, name: value})
