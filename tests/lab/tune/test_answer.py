# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from noisescale.lab.jobs.job_progress import JobProgress
from noisescale.lab.jobs.workers import Place
from noisescale.lab.parameters import choice_parameter, range_parameter
from noisescale.lab.tune.answer import Tune, progress_sentence, statements_of
from noisescale.lab.tune.cost_front import CostFront, TunedTrial
from noisescale.lab.tune.figures import figures_of, front_figure, parameter_figure
from noisescale.lab.tune.tables import front_table, tables_of

RATE = range_parameter("lr", 0.001, 1)
WIDTH = range_parameter("width", 8, 512, whole=True)


def search(maximize: bool = False, powers: float = 0.5) -> CostFront:
    """Six trainings along a front, the own one, one that diverged and one that crashed."""
    sign = -1 if maximize else 1
    trials = [TunedTrial(0, {"lr": 0.1, "width": 64, "act": "relu"}, 50.0, sign * 0.65)]
    for k in range(6):
        cost = 4.0**k
        parameters = {"lr": 0.05, "width": round(8 * cost**powers), "act": "tanh"}
        trials.append(TunedTrial(k + 1, parameters, cost, sign * (1.0 - 0.1 * k)))
    lost = {"lr": 1.0, "width": 8, "act": "relu"}
    trials.append(TunedTrial(7, lost, 0.5, math.nan, "diverged"))
    trials.append(TunedTrial(8, lost, math.nan, math.nan, "failed", "ValueError: <b>no</b>"))
    searched = (RATE, WIDTH, choice_parameter("act", ["relu", "tanh"]))
    return CostFront("val_loss", maximize, searched, tuple(trials))


def found_in(front: CostFront, *doubts: str, finished: bool = True) -> Tune:
    progress = JobProgress(Place("tune", "a.journal"), "tune", (), (), 0.5, finished)
    return Tune(progress, front, None, 9, doubts)


def lines_of(front: CostFront) -> dict[str, tuple[str, list[str]]]:
    return {s.label: (s.sentence, [p.sentence for p in s.parts]) for s in statements_of(front)}


def test_the_answers_say_what_is_best_and_what_as_good_costs_less() -> None:
    cheap = search()
    own = TunedTrial(0, cheap.trials[0].parameters, 50.0, 0.85)

    found = lines_of(cheap)
    cheaper = lines_of(CostFront("val_loss", False, cheap.searched, (own, *cheap.trials[1:])))

    assert found == {
        "Best": ("val_loss 0.5 for 1,024 device-seconds", ["lr 0.05, width 256, act tanh"]),
        "Your own settings": ("val_loss 0.65 for 50.0 device-seconds", []),
    }
    assert cheaper["As good for less"] == (
        "3.1 times less cost: 0.8 for 16.0 device-seconds",
        ["lr 0.05, width 32, act tanh"],
    )


def test_a_search_under_way_says_how_far_it_is() -> None:
    found = found_in(search(), "A doubt.", finished=False).document()

    assert found.status == "under way"
    assert found.headline.startswith("7 of 9 trainings done, 2 without a result, 0 under way, 0.5 ")
    more = replace(found_in(search(), finished=False), most_trials=6)
    assert progress_sentence(more).startswith("7 trainings done, 2 without a result")
    assert found.headline.endswith("val_loss: 0.5 for 1,024 device-seconds")
    assert len(found.tables) == 2
    assert found.tables[1].title.startswith("0 workers")
    assert found.doubts == ("A doubt.",)
    (join,) = found.next
    assert join.endswith("noisescale work --storage a.journal --name tune")


def test_the_tables_have_the_front_the_laws_and_the_failures() -> None:
    front, laws, failures = tables_of(search())

    costs = [line.cells[0].text for line in front.lines]
    assert costs == ["1.00", "4.00", "16.0", "50.0", "256", "1,024"]
    assert [bool(line.marks) for line in front.lines] == [k == 3 for k in range(6)]  # its own
    assert laws.lines[1].cells[0].text == "width"
    assert laws.lines[1].cells[3].text.startswith("grows")
    assert "not resolved" in laws.lines[0].cells[3].text
    assert [line.cells[-1].text for line in failures.lines] == ["diverged", "ValueError: <b>no</b>"]
    assert front_table(search(), 2).notes[-1].startswith("4 cheaper")


def test_a_parameter_with_one_value_on_the_front_has_no_law() -> None:
    found = search()
    trials = [
        replace(each, parameters=each.parameters | {"width": 8, "lr": 0.01 * each.number})
        for each in found.trials
        if each.number
    ]
    front, laws, _ = tables_of(replace(found, trials=tuple(trials)))

    assert len(front.lines) == 6
    name, power, interval, said = (cell.text for cell in laws.lines[1].cells)
    assert (name, power, interval) == ("width", "", "")
    assert "the same" in said


def test_a_search_without_a_result_says_so_and_is_not_to_go_on(tmp_path: Path) -> None:
    none, front = CostFront("val_loss", False, (RATE,), ()), search()
    failed = CostFront("val_loss", False, front.searched, front.trials[-2:])

    assert list(lines_of(none)) == ["Best"]
    assert (tables_of(none), figures_of(none)) == ([], [])
    assert "No training has a result" in found_in(none).to_html(tmp_path / "a.html").read_text()
    assert replace(found_in(failed), most_trials=2).document().next == []


def test_the_figure_of_the_front_has_all_trainings() -> None:
    drawn = front_figure(search())

    by_name = {trace.name: trace for trace in drawn.data}
    others = ["on the front", "your own settings", "without a result"]
    assert list(by_name) == ["not on the front", *others]
    assert list(by_name["not on the front"].x) == [64]
    assert list(by_name["on the front"].x) == [1, 4, 16, 50, 256, 1024]
    assert by_name["on the front"].line.shape == "hv"
    assert list(by_name["your own settings"].y) == [0.65]
    assert list(by_name["without a result"].x) == [0.5]  # the one that crashed has no cost
    low, high = drawn.layout.yaxis.range
    assert low < by_name["without a result"].y[0] < high
    assert by_name["without a result"].y[0] > 1.0
    risen = {t.name: t for t in front_figure(search(maximize=True)).data}
    assert risen["without a result"].y[0] < -1.0


def test_the_figure_of_a_parameter_has_its_law_and_that_of_a_choice_has_none() -> None:
    width, act = parameter_figure(search(), WIDTH), parameter_figure(search(), search().searched[2])

    names = [trace.name for trace in width.data]
    assert "interval" in names[0]
    assert names[1].endswith("power 0.50")
    assert width.layout.yaxis.type == "log"
    assert act.layout.yaxis.type == "category"
    assert "interval" not in str([trace.name for trace in act.data])
    assert "power 0.50" in width.layout.meta["finding"]


def test_the_page_is_whole_and_escapes_what_it_shows(tmp_path: Path) -> None:
    text = found_in(search(), "A doubt.").to_html(tmp_path / "tune.html").read_text()

    for shown in (
        "Best val_loss of 9 trainings: 0.5",
        "ValueError: &lt;b&gt;no&lt;/b&gt;",
        "A doubt.",
        "val_loss against cost",
        "width along the front",
        "Scaling laws",
    ):
        assert shown in text
    with pytest.raises(FileNotFoundError):
        found_in(search()).to_html(tmp_path / "none" / "tune.html")


@pytest.mark.parametrize(
    ("limits", "options"),
    [
        ({"most_trials": None}, None),
        ({"most_trials": 9}, "--trials 18"),
        ({"most_trials": 9, "budget": 0.25}, "--trials 18 --budget 0.5h"),
    ],
)
def test_a_finished_search_goes_on_with_larger_limits(
    limits: dict[str, Any], options: str | None
) -> None:
    found = replace(found_in(search()), **limits).document().next

    assert [text.partition("command and ")[2] for text in found] == ([options] if options else [])
