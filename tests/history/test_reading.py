# SPDX-License-Identifier: Apache-2.0
"""Other metrics of a run, beside its record."""

from pathlib import Path

import numpy as np
import pytest
from logged_runs import record, write_events
from refused import refused

from noisescale.history.reading import mark_last, read_log, read_metric


@pytest.mark.parametrize("behind", [0, 1])
def test_a_metric_is_read_at_the_steps_of_the_optimizer(tmp_path: Path, behind: int) -> None:
    """A step was logged again, and a value is not a number.

    Lightning logs under the number of the step before, the Trainer of transformers does not.
    """
    steps = np.array([10, 20, 30])
    record(tmp_path, step=steps, examples=32 * steps, batch_size=[32] * 3, behind=[behind, -5, 0])
    rows = [(10, 1.0), (20, 0.5), (20, 0.25), (30, "nan")]
    lines = [f"{at - behind},{value}" for at, value in rows]
    (tmp_path / "metrics.csv").write_text("\n".join(["step,loss", *lines, ""]))

    at, values = read_metric(tmp_path, "loss")

    assert at.tolist() == [10, 20]
    assert values.tolist() == [1.0, 0.25]
    with refused("goal", got="'acc'", remedy="Its metrics: loss."):
        read_metric(tmp_path, "acc")


def test_a_metric_without_a_monitor_has_no_steps_of_the_optimizer(tmp_path: Path) -> None:
    write_events(tmp_path, [(0, {"loss": 1.0})])

    with refused(f"{tmp_path}", word="unrecorded"):
        read_metric(tmp_path, "loss")


def test_half_a_last_line_of_a_table_is_left_out_with_a_word(tmp_path: Path) -> None:
    """A killed run leaves it."""
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.4\n3,0.")

    with pytest.warns(UserWarning, match=r"last line of .*metrics\.csv is not whole"):
        steps, values, _ = read_log(tmp_path).metric("loss")

    assert (steps.tolist(), values.tolist()) == ([1, 2], [0.5, 0.4])


def test_of_steps_that_were_logged_again_the_last_values_count() -> None:
    assert mark_last([1, 2, 3, 2, 4]).tolist() == [True, False, False, True, True]
