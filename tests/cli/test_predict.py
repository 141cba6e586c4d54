# SPDX-License-Identifier: Apache-2.0
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from logged_runs import log_run
from program import ended, run

from noisescale import predict
from noisescale.history.reading import read_run
from noisescale.step_time import DeviceTimes, StepTiming


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs") / "lightning_logs/version_0"
    log_run(folder)
    return folder.parent


@pytest.mark.slow
def test_tables_of_a_run_are_printed_by_the_installed_script(logged: Path) -> None:
    script = Path(sys.executable).with_name("noisescale")
    options = ["--price-per-device-hour", "2", "--details"]

    done = subprocess.run(
        [script, "predict", logged, *options], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"Critical batch size +192 examples \(95 % interval 154 to 250\)", done.stdout)
    assert "cost" in done.stdout
    assert "kappa = 1" in done.stdout


def test_every_option_reaches_the_prediction_and_json_is_what_the_package_predicts(
    tmp_path: Path,
) -> None:
    log_run(tmp_path)
    log_run(tmp_path, optimizer=1, monitor="wide", noise_scale=50.0)
    timings = (StepTiming(b, 1, 2, 1, 0.01 + b / 1000) for b in (16, 32, 64, 256))
    DeviceTimes(tuple(timings), "cpu", "2.9").write(times := tmp_path / "times.json")
    options = {
        "batch_sizes": [64, 512],
        "devices": [2, 16],
        "price_per_device_hour": 2.5,
        "calibration": 1.5,
        "step_times": times,
        "max_device_batch_size": 256.0,
        "devices_per_node": 4,
        "unit": "sequences",
    }
    words = [
        word
        for name, value in options.items()
        for word in (
            f"--{name.replace('_', '-')}",
            ",".join(map(str, value)) if isinstance(value, list) else value,
        )
    ]

    output = run("predict", tmp_path, "--monitor", "wide", "--optimizer", 1, *words, "--json")

    expected = predict(read_run(tmp_path, optimizer=1, monitor="wide"), **options)  # type: ignore[arg-type]
    assert json.loads(output) == json.loads(expected.to_json())
    row = next(row for row in json.loads(output)["rows"][::-1] if row["devices"] == 2)
    assert (row["device_batch_size"], row["accumulation"]) == (256, 1)
    assert row["hours"]["value"] * 3600 == pytest.approx(row["steps"]["value"] * 0.266, rel=0.01)


def test_a_report_with_figures_is_written(logged: Path, tmp_path: Path) -> None:
    output = run("predict", logged, "--html", tmp_path / "report.html", "--unit", "sequences")

    assert f"{tmp_path}/report.html" in output
    page = (tmp_path / "report.html").read_text()
    assert "192 sequences" in page
    assert "DecompressionStream" in page


def test_a_sweep_and_branches_calibrate(logged: Path, tmp_path: Path) -> None:
    """Of branches with two named orders the second one is worse by 0.05 throughout."""
    sweep, branches, named = (tmp_path / f"{name}.csv" for name in ("sweep", "branches", "named"))
    rows = [f"{size},{100 * (1 + 400 / size)}" for size in (16, 64, 256, 1024, 4096)]
    sweep.write_text("\n".join(["batch_size,steps", *rows]))
    losses = [f"{size},{2 + size / (size + 256)}" for size in (64, 128, 256, 512)]
    branches.write_text("\n".join(["batch_size,loss", *losses]))
    sizes, lags = (16, 64, 256, 1024), {"a": 0.0, "b": 0.05}
    orders = [f"{b},{2 + b / (b + 100) + lag},{o}" for o, lag in lags.items() for b in sizes]
    named.write_text("\n".join(["batch_size,loss,order", *orders]))

    fitted = run("predict", logged, "--sweep", sweep, "--json")
    branched, paired = (
        json.loads(run("predict", logged, "--branches", file, "--branch-step", 500, "--json"))
        for file in (branches, named)
    )

    assert json.loads(fitted)["critical_batch_size"]["value"] == pytest.approx(400)
    assert "5 batch sizes" in json.loads(fitted)["assumptions"][1]
    kappa = branched["calibration"]["kappa"]["value"]
    assert kappa == pytest.approx(256 / 192, rel=1e-3)
    (source,) = [said for said in paired["assumptions"] if "losses of branches" in said]
    assert "scatter of 0.0001" in source


def test_a_warning_is_one_line_that_names_no_place_in_the_sources(tmp_path: Path) -> None:
    log_run(tmp_path, rows=4)
    file = tmp_path / "noise_scale.jsonl"
    file.write_bytes(file.read_bytes()[:-5])

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        _, _, errors = ended("predict", tmp_path)

    assert errors.startswith(f"noisescale: {file} ends within line 6")
