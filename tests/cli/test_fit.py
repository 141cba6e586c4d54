# SPDX-License-Identifier: Apache-2.0
import json
import re
from pathlib import Path

import pytest
from program import run

from noisescale import fit_tradeoff

ROWS = [(8, 1350), (32, 412), (128, 178), (512, 119), (2048, 105)]
"""S_min 100, B_crit 100, with a little scatter."""


def csv(path: Path, rows: list[tuple[object, ...]], names: str = "batch_size,steps") -> Path:
    path.write_text("\n".join([names, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def test_a_sweep_is_fitted_with_its_errors(tmp_path: Path) -> None:
    scattered = [(size, steps * (1.5 if k % 2 else 0.7)) for k, (size, steps) in enumerate(ROWS)]

    output = run("fit", csv(tmp_path / "s.csv", ROWS), "--optimal-batch-size", 16)
    doubtful = run("fit", csv(tmp_path / "s.csv", scattered))

    assert re.search(r"^Critical batch size: \d+\.?\d* examples \(95 % interval ", output)
    assert "20 %" in output
    assert re.search(r"2,048 +105", output)
    assert doubtful.count("scatter by") == 1  # as a doubt, and not in a warning's line too


def test_columns_and_confidence_are_those_that_are_asked_for(tmp_path: Path) -> None:
    rows = [(size, steps, 2 * size, 3 * steps) for size, steps in ROWS]
    path = csv(tmp_path / "s.csv", rows, "batch_size,steps,batch_size_tokens,steps_to_last")
    columns = ("--batch-size-column", "batch_size_tokens", "--steps-column", "steps_to_last")

    found = json.loads(run("fit", path, *columns, "--confidence", 0.5, "--json"))
    text = run("fit", path, *columns, "--confidence", 0.5)

    fit = fit_tradeoff([2 * size for size, _ in ROWS], [3 * steps for _, steps in ROWS])
    band = fit.critical_batch_size_band(0.5)
    assert found["critical_batch_size"] == pytest.approx(
        {"value": band.value, "low": band.low, "high": band.high}
    )
    assert found["min_steps"]["value"] == pytest.approx(fit.min_steps)
    assert "50 % interval" in text


def test_json_of_several_curves_is_keyed_by_their_names(tmp_path: Path) -> None:
    rows = [(name, *row) for name in ("small", "large") for row in ROWS]
    path = csv(tmp_path / "s.csv", rows, "model,batch_size_sequences,steps_to_goal")

    options = ("--unit", "sequences", "--optimal-batch-size", 16)
    output = run("fit", path, "--by", "model", "--json", *options)

    fits = json.loads(output)["curves"]
    assert fits["large"]["unit"] == "sequences"
    assert fits["large"]["overhead_batch_size"] == pytest.approx(1.2 * 16 + 0.2 * 100, rel=0.1)
    assert fits.keys() == {"small", "large"}
    assert fits["small"]["critical_batch_size"]["value"] == pytest.approx(100, rel=0.1)
