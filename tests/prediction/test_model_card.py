# SPDX-License-Identifier: Apache-2.0
"""The line for a model card."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import numpy as np
import pytest
from reported_runs import history

from noisescale import History, collectors, predict
from noisescale._version import __version__
from noisescale.bounded import Bounded
from noisescale.collectors.collector import Collector
from noisescale.history.history import as_history
from noisescale.history.run_law import RunLaw
from noisescale.prediction import model_card

END = f"**Measured by**: noisescale {__version__}."


def card(run: Any = None, **options: Any) -> str:
    return predict(history() if run is None else run, **options).model_card


def test_it_says_batch_size_critical_batch_size_steps_version_and_way() -> None:
    run = as_history(history())
    run.way = "Ddp"

    said = card(run, unit="sequences")

    assert said == (
        "**Batch size**: 64 sequences on 2 devices. **Critical batch size**: 100 sequences (95 %"
        " interval 80.0 to 125), by the noise scale of all 2,000 steps. **Measured by**: noisescale"
        f" {__version__}, which compared devices."
    )


def test_a_run_that_accumulated_compared_micro_batches() -> None:
    end_of_epoch = np.repeat([1.0, 4.0], [1, 39])
    ends = (1, "halves of batches"), (4, "micro-batches"), (end_of_epoch, "micro-batches")

    for accumulation, compared in ends:
        run = as_history(history(accumulation=accumulation))
        run.way = "Halves"
        assert card(run).endswith(f"which compared {compared}.")


def test_it_says_no_more_than_the_bounds() -> None:
    said = card(history(unresolved=40))

    assert "**Critical batch size**: at least 80.0 examples, only a lower bound yet, by" in said
    p = predict(history(unresolved=40))
    law = RunLaw.with_critical_batch_size(p.run, Bounded(float("nan"), 0.0, float("inf")))
    nothing = replace(p, law=law).model_card
    assert "**Critical batch size**: not known from all 2,000 steps." in nothing
    unknown = {name: x for name, x in history().items() if name != "devices"}
    assert "64 examples on devices not known." in card(unknown)
    assert said.endswith(END)


def test_it_says_which_part_of_the_training_and_by_what_else() -> None:
    run = as_history(history())
    run.planned_steps = 8000.0
    assert "by the noise scale of the first 2,000 of 8,000 steps." in card(run)
    run.planned_steps, run.under_way = float("nan"), True
    assert "the first 2,000 steps." in card(run)
    assert "with kappa = 2 (given), by the noise scale" in card(calibration=2.0)
    other = history(batch_size=256.0, rows=20)
    assert "by two runs to the ends of both runs." in card(second_run=other)
    grown = history()
    grown["batch_size"] = np.repeat([64.0, 128.0], 20)
    grown["examples"] = np.cumsum(50 * grown["batch_size"])
    assert "64 to 128 examples, last 128, on 2 devices" in card(grown)
    grown["examples"] -= 64.0  # a short batch in the first row is none of its batch sizes
    assert "64 to 128 examples, last 128, on 2 devices" in card(grown)


def test_a_unit_of_several_lines_stays_one_line() -> None:
    assert "\n" not in card(unit="rows\nof text")


def test_it_is_the_end_of_the_text_can_be_copied_from_the_page_and_is_in_json(
    tmp_path: Path,
) -> None:
    pytest.importorskip("plotly")
    p = predict(History.from_columns(history()))

    assert p.to_text(60).endswith(f"\nFor a model card\n{p.model_card}\n")
    assert f"<h2>For a model card</h2>\n<pre>{p.model_card}</pre>" in (
        p.to_html(tmp_path / "page.html").read_text()
    )
    assert f">{p.model_card}</pre>" in p._repr_html_()
    assert p.to_dict()["model_card"] == p.model_card


def test_every_way_of_measuring_has_words() -> None:
    for module in walk_packages(collectors.__path__, "noisescale.collectors."):
        import_module(module.name)

    def classes(of: type) -> set[type]:
        return {of}.union(*map(classes, of.__subclasses__()))

    ours = [each for each in classes(Collector) if each.__module__.startswith("noisescale.")]
    ways = {each.__name__.removesuffix("Collector") for each in ours}

    assert ways - {"", "Rounds"} == set(model_card._COMPARED)
