# SPDX-License-Identifier: Apache-2.0
"""What `noisescale watch` says of a run."""

import math
from pathlib import Path

import numpy as np
import pytest
import reported_runs
from logged_runs import log_run

from noisescale import History, predict
from noisescale.history.following import FollowedRun
from noisescale.history.record import Recorder
from noisescale.prediction.prediction import Prediction
from noisescale.prediction.watching import state_of
from noisescale.report.text import plain

NOW = 1_000_000.0


def followed(history: History | None, tmp_path: Path, age: float = 12.0) -> FollowedRun:
    run = FollowedRun(tmp_path)
    run.run, run.history, run.last_row_at = Path("logs/version_3"), history, NOW - age
    return run


def history(*, resolved: bool = True, seconds: float = 0.1, accumulation: float = 1) -> History:
    """40 steps a row, noise scales of 20, 40, 80 ... examples."""
    rows = np.arange(1.0, 6)
    scale = 10.0 * 2**rows
    ends = {"low": 0.8 * scale, "high": 1.5 * scale} | ({} if resolved else {"high": math.inf})
    same = {"rows": 5, "every": 40, "noise_scale": scale if resolved else math.nan, **ends}
    told = {"accumulation": accumulation, "measured_steps": 10 * rows, "measuring_cost": rows}
    return History.from_columns(reported_runs.history(seconds=seconds, **same, **told))


def said(run: FollowedRun, found: Prediction | ValueError | None, note: str = "") -> str:
    return plain(state_of(run, found, NOW, note), 100)


def test_the_last_row_its_course_and_the_advice_are_shown(tmp_path: Path) -> None:
    of = history()
    run = followed(of, tmp_path)
    run.of_runs, run.path = 3, Path("logs")

    lines = said(run, predict(of), "Press Ctrl-C to end.").splitlines()

    assert lines[:9] == [
        "logs/version_3",
        "The newest of 3 runs in logs",
        "Step                 200 (12,800 examples)",
        "Batch size           64 examples on 2 devices",
        "Noise scale now      320 examples (95 % interval 256 to 480)",
        "  so far             ▁▃▅▇█  20.0 to 320",
        "Step time            100 ms",
        "Measuring took       about 2.4 % of the time (50 of 200 steps)",
        "",
    ]
    advice = " ".join(" ".join(lines[9:]).split())
    assert advice.startswith("Verdict Keep 64. You train at batch size 64 on 2 devices.")
    assert "Measuring took" not in advice
    assert lines[-1] == "The last row came 12 s ago. Press Ctrl-C to end."
    assert len(lines) <= 19


def test_a_last_row_of_an_epochs_short_batch_is_shown_with_the_batch_size_of_the_verdict(
    tmp_path: Path,
) -> None:
    of = history(accumulation=4)
    of.append(step=240, examples=15354, batch_size=58, accumulation=1, devices=2)

    text = said(followed(of, tmp_path), predict(of))

    assert "Batch size           64 examples on 2 devices, 4 micro-batches each" in text
    assert "at batch size 64 on" in text


def test_a_noise_scale_that_is_not_resolved_has_its_lower_bound(tmp_path: Path) -> None:
    of = history(resolved=False, accumulation=4, seconds=2.5)

    text = said(followed(of, tmp_path), predict(of))

    assert "above 256 examples" in text
    assert "so far" not in text
    assert "on 2 devices, 4 micro-batches each" in text
    assert "2.50 s" in text
    assert "newest of" not in text
    of = history()
    of.append(step=240, examples=15360, batch_size=64, noise_scale=900.0, low=300.0, high=math.inf)
    assert "▁▃▅▇█·  20.0 to 320 (· only a lower bound)" in said(followed(of, tmp_path), None)


@pytest.mark.parametrize(
    ("age", "seconds", "last"),
    [
        (100, 0.1, "No new row for 100 s."),
        (10_000, 0.1, "No new row for 2 h."),
        (300_000, 0.1, "No new row for 3 days."),
        (-5, 0.1, "came 0 s ago."),
        (200, 2.0, "came 3 min ago."),  # rows are 80 s apart
        (400, 2.0, "No new row for 6 min."),
        (400, math.nan, "No new row for 6 min."),
    ],
)
def test_a_row_is_overdue_by_how_far_apart_rows_have_been(
    tmp_path: Path, age: float, seconds: float, last: str
) -> None:
    of = history(seconds=seconds)
    of.append(step=201, examples=12864, batch_size=64, seconds_per_step=seconds)  # ahead of time

    assert said(followed(of, tmp_path, age), None).splitlines()[-1].endswith(last)


def test_why_nothing_is_predicted_yet_is_said(tmp_path: Path) -> None:
    refused = ValueError("`history` must have rows.")

    text = said(followed(history(), tmp_path), refused)

    assert "not possible yet: `history` must have rows." in text


def test_a_row_without_a_batch_size_is_shown_as_far_as_it_is_known(tmp_path: Path) -> None:
    of = History()
    of.append(step=40, examples=math.nan)

    lines = said(followed(of, tmp_path), None).splitlines()

    assert "40 (unknown examples)" in lines[1]
    assert "unknown examples" in lines[2]


def test_which_of_several_optimizers_is_shown_is_said_even_if_it_was_refused(
    tmp_path: Path,
) -> None:
    log_run(tmp_path, optimizer=1)
    refused = History()
    refused.why_nothing = "One process trains. Accumulate."
    Recorder(tmp_path).note(refused)

    first, second = (FollowedRun(tmp_path, optimizer=k) for k in (0, 1))

    for run in (first, second):
        assert run.read()
    assert "Optimizer 0 of 0, 1: choose one with --optimizer\nNothing is" in said(first, None)
    assert "Optimizer 1 of 0, 1: choose one with --optimizer\nStep" in said(second, None)


def test_what_is_waited_for_is_said(tmp_path: Path) -> None:
    nothing, unmeasured = (followed(None, tmp_path) for _ in range(2))
    unmeasured.why_nothing = "One process trains. Accumulate."

    first = said(nothing, None, "Press Ctrl-C to end.")

    waiting = "Waiting for the first row of NoiseScaleMonitor. Press Ctrl-C to end.\n"
    assert first == f"logs/version_3\n{waiting}"  # the record is there: so is a monitor
    assert "Nothing is measured. One process trains. Accumulate." in said(unmeasured, None)
    assert "Waiting for a run with NoiseScaleMonitor." in said(FollowedRun(tmp_path), None)


def test_names_from_files_cannot_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    run = followed(None, tmp_path)
    run.run, run.why_nothing = Path("\x1b[31m[red]"), "\x1b]0;title\x07[/]"

    text = said(run, None)

    assert "\x1b" not in text
    assert "[red]" in text
    assert "[/]" in text
