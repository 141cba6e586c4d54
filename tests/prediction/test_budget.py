# SPDX-License-Identifier: Apache-2.0
"""What a run's examples allow, from a loss and a noise scale of known laws."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logged_runs import record
from reported_runs import history

from noisescale import History, predict
from noisescale.history.history import as_history
from noisescale.history.reading import read_run
from noisescale.tradeoff.budget import KAPPA

EXAMPLES = 128_000.0
SHARES = np.arange(1, 41) / 40
R, SLOPE = 2_000.0, 0.1
EXPECTED = math.sqrt(EXAMPLES / 1000 * KAPPA * R / SLOPE)


def run(**changed: Any) -> History:
    """A run of 2,000 steps whose loss falls by a power and whose noise scale rises by the root."""
    middles = SHARES - 1 / 80
    noise_scale = R / 2.1 * np.sqrt(SHARES / 0.1)
    known = {"noise_scale": noise_scale, "high": 1.2 * noise_scale, "low": noise_scale / 1.2}
    losses = 3 * middles**-SLOPE
    losses[:2] *= 2  # before 5 % they fall for other reasons, and after 37 % as the rate falls
    losses[15:] *= 0.9
    return as_history(history(**{**known, "training_loss": losses, **changed}))


def test_it_is_that_of_the_laws_also_from_a_file(tmp_path: Path) -> None:
    record(tmp_path, **{name: column for name, column in run().items() if name != "window"})

    p = predict(read_run(tmp_path))

    best = p.best_batch_size
    assert best.value == pytest.approx(EXPECTED, rel=0.02)
    assert (best.low, best.high) == (best.value / 2, best.value * 2)
    assert p.to_dict()["best_batch_size"]["value"] == best.value


def test_it_stands_beside_the_critical_batch_size_and_in_the_table() -> None:
    p = predict(run())

    labels = [one.label for one in p.document().answers]
    assert labels.index("Best for this budget") == labels.index("Critical batch size") + 1
    (said,) = (x.sentence for x in p.document().answers if x.label == "Best for this budget")
    assert said.startswith("about 280 (140 to 550) examples: ")
    assert "of a run of 128k examples" in said
    marked = [line for line in p.document().tables[0].lines if "best for budget" in line.marks]
    assert [line.cells[0].text for line in marked] == ["256"]
    assert p.decision.headline == predict(run(training_loss=math.nan)).decision.headline


def test_of_two_batch_sizes_near_the_best_one_the_nearest_is_marked() -> None:
    p = predict(run(), batch_sizes=[240, 320])

    lines = p.document().tables[0].lines
    assert [x.cells[0].text for x in lines if "best for budget" in x.marks] == ["320"]


def test_a_run_that_goes_on_has_the_examples_that_were_planned() -> None:
    half = run().until(1000)
    half.planned_steps, half.under_way = 2000.0, True

    assert predict(half).budget.examples == EXAMPLES
    assert predict(half).best_batch_size.value == pytest.approx(EXPECTED, rel=0.02)


FALLING = run()["training_loss"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"training_loss": math.nan}, "no cross-entropy alone"),
        ({"training_loss": FALLING[::-1]}, "does not fall"),
        ({"training_loss": FALLING - 4}, "is not positive"),
        ({"training_loss": np.where(SHARES % 0.2, math.nan, FALLING)}, "too few rows of the log"),
        ({"training_loss": np.where(SHARES > 0.5, FALLING, math.nan)}, "too few rows of the log"),
        ({"high": math.inf}, "there is only a lower bound of the noise scale"),
    ],
)
def test_a_run_that_does_not_tell_it_says_why_in_its_details(
    changed: dict[str, Any], why: str
) -> None:
    p = predict(run(**changed))

    assert not p.best_batch_size.known
    assert p.to_dict()["best_batch_size"]["value"] is None
    assert "Best for this budget" not in p.to_text()
    (said,) = (x for x in p.assumptions if "best batch size" in x)
    assert why in said


@pytest.mark.parametrize(("planned", "why"), [(4000.0, "37 %"), (math.nan, "end of the run")])
def test_a_run_whose_first_third_or_end_is_not_known_does_not_tell_it(
    planned: float, why: str
) -> None:
    begun = run().until(1000)
    begun.planned_steps, begun.under_way = planned, True

    assert why in predict(begun).budget.why_unknown
