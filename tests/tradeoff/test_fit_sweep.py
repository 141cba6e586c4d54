# SPDX-License-Identifier: Apache-2.0
"""`fit`: what it finds in a file, and what it says."""

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from noisescale.report.numbers import bounds, number
from noisescale.report.records import finite
from noisescale.tradeoff.fit import TradeoffFit, fit_tradeoff
from noisescale.tradeoff.fit_sweep import FittedSweep, fit

SIZES, STEPS = [16, 32, 64, 128, 256], [720, 405, 242, 168, 131]


def written(folder: Path, sizes: Sequence[float], steps: Sequence[float]) -> Path:
    path = folder / "sweep.csv"
    lines = [f"{size},{step}" for size, step in zip(sizes, steps, strict=True)]
    path.write_text("\n".join(["batch_size,steps", *lines]))
    return path


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return written(tmp_path, SIZES, STEPS)


@pytest.fixture
def by_hand() -> TradeoffFit:
    return fit_tradeoff(SIZES, STEPS)


def test_a_record_has_bands_around_its_values(sweep: Path, by_hand: TradeoffFit) -> None:
    record = json.loads(fit(sweep).to_json(), parse_constant=pytest.fail)

    found = by_hand.regimes()
    for name in ("min_steps", "min_examples", "critical_batch_size", "sharpness"):
        assert record[name] == finite(dataclasses.asdict(getattr(found, name)))
        assert record[name]["value"] == pytest.approx(getattr(by_hand, name))
    assert record["sweep"][2]["fitted_steps"] == pytest.approx(
        242 / math.exp(record["sweep"][2]["log_residual"])
    )


def test_unit_and_overhead_are_as_asked_for(sweep: Path, by_hand: TradeoffFit) -> None:
    plain = fit(sweep).to_dict()
    asked = fit(sweep, unit="sequences", optimal_batch_size=16).to_dict()

    assert (plain["unit"], plain["overhead_batch_size"]) == ("examples", None)
    assert asked["unit"] == "sequences"
    assert asked["overhead_batch_size"] == by_hand.overhead_batch_size(0.2, 16)


def test_two_points_leave_the_law_open_and_another_bend_than_the_theorys_is_a_doubt(
    tmp_path: Path,
) -> None:
    found = fit(written(tmp_path, SIZES[:2], STEPS[:2]))

    assert found.to_dict()["critical_batch_size"]["high"] is None
    assert found.to_dict()["min_steps"]["low"] == 0
    assert "112 examples" in found.document().headline
    sizes, steps = [16, 32, 64, 128, 256, 512, 1024], [1000, 510, 260, 220, 219, 218, 218]
    (doubt,) = fit(written(tmp_path, sizes, steps)).document().doubts
    assert "sharply" in doubt  # another bend than the theory's


def test_the_answers_have_their_intervals_and_the_table_its_residuals(
    sweep: Path, by_hand: TradeoffFit
) -> None:
    said = fit(sweep, optimal_batch_size=16).document()

    critical = by_hand.regimes().critical_batch_size
    assert number(critical.value) in said.headline
    assert bounds(critical) in said.headline
    assert said.next[0].endswith(f"predict RUN --sweep {shlex.quote(str(sweep))}")
    found = {one.bounds: one.sentence for one in said.answers}
    for name in ("min_steps", "min_examples", "sharpness"):
        band = getattr(by_hand.regimes(), name)
        assert found[band].startswith(number(band.value))
    overhead = number(by_hand.overhead_batch_size(0.2, 16))
    assert any(one.sentence.startswith(f"{overhead} examples") for one in said.answers)
    size, measured, fitted, residual = (cell.text for cell in said.tables[0].lines[2].cells)
    assert (size, measured, fitted) == ("64", "242", f"{by_hand.steps(64.0):.0f}")
    assert residual.startswith("-1.")


def test_several_curves_have_their_names(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    lines = [f"{m},{b},{s}" for m in "ab" for b, s in zip(SIZES, STEPS, strict=True)]
    path.write_text("\n".join(["model,batch_size,steps", *lines]))

    found: FittedSweep = fit(path, by="model")

    assert [one.label for one in found.document().answers] == ["a", "b"]
    assert found.document().headline == "Critical batch sizes of 2 curves"
    assert [*found.to_dict()["curves"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "value"), [("by", "model"), ("optimal_batch_size", -1.0), ("confidence", 1.5)]
)
def test_bad_options_are_refused_by_name(sweep: Path, name: str, value: Any) -> None:
    with refused(name):
        fit(sweep, **{name: value})
