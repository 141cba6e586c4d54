# SPDX-License-Identifier: Apache-2.0
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from drawn import colours_in, trace
from hypothesis import given
from hypothesis import strategies as st
from reported_runs import history

from noisescale.prediction.predict import predict
from noisescale.prediction.prediction import Prediction
from noisescale.report.colours import DARK, RUNS
from noisescale.report.numbers import with_bounds
from noisescale.step_time import FittedStepTime, StepTiming, fit_step_time

if TYPE_CHECKING:
    import plotly.graph_objects as go

INPUTS = Path(__file__).parents[1] / "goldens" / "inputs"
UNTIMED = math.nan
NAMES = ("savings", "noise-scale", "front", "speed-up")


def draw(name: str, p: Prediction) -> "go.Figure":
    from noisescale.prediction.figures import FIGURES

    return FIGURES[name][1](p)


def overlaid(runs: list[tuple[str, Prediction, int]], **options: Any) -> "go.Figure":
    from noisescale.prediction.figures.noise_along_runs import noise_of_runs_figure

    return noise_of_runs_figure(runs, **options)


@functools.cache
def times() -> FittedStepTime:
    return fit_step_time(
        [StepTiming(b, 1, n, 1, 0.3 + b / 160 + n / 100) for b in (16, 64) for n in (1, 2, 4, 8)]
    )


def names(figure: "go.Figure") -> str:
    return "; ".join(t.name or "" for t in figure.data)


@pytest.mark.parametrize(("unresolved", "seconds"), [(0, 0.5), (15, UNTIMED), (40, 0.5)])
@pytest.mark.parametrize("name", NAMES)
def test_every_run_can_be_drawn_and_tells_its_finding(
    name: str, unresolved: int, seconds: float
) -> None:
    figure = draw(name, predict(history(unresolved=unresolved, seconds=seconds)))

    assert len(figure.layout.title.text) > 20
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.type == "log"
    assert "NaN" not in figure.to_json()


def test_points_of_the_front_are_the_rows_and_what_nothing_else_beats_is_emphasised() -> None:
    p = predict(history(), [16, 32, 64, 128, 256], [1, 2, 4, 8], step_times=times())
    priced = predict(history(), [64, 128], [2, 4], price_per_device_hour=3.0)

    figure = draw("front", p)

    for devices in (2, 4):
        drawn, rows = trace(figure, f"{devices} devices"), p.rows_for(devices)
        # 2,000 steps of half a second: the column is in minutes.
        assert list(drawn.x) == pytest.approx([60 * row.device_hours.value for row in rows])
        assert list(drawn.y) == pytest.approx([60 * row.hours.value for row in rows])
        assert f"batch size 128 on {devices} devices" in drawn.hovertext[3]
    assert figure.layout.xaxis.title.text == "compute (device-minutes)"
    in_money = trace(draw("front", priced), "4 devices")
    assert list(in_money.x) == pytest.approx([row.cost.value for row in priced.rows_for(4)])
    points = {(60 * row.device_hours.value, 60 * row.hours.value) for row in p.rows}
    beaten = {
        (x, y) for x, y in points if any((a, b) != (x, y) and a <= x and b <= y for a, b in points)
    }
    front = trace(figure, "Pareto-optimal")
    assert set(zip(front.x, front.y, strict=True)) == points - beaten
    assert 0 < len(points - beaten) < len(points)
    fastest = min(p.rows, key=lambda row: row.hours.value)
    assert f"{fastest.batch_size:.0f} on {fastest.devices}" in front.text


PLACES = st.tuples(*[st.sampled_from([1.0, 2.0, 3.0, 4.0, math.nan, math.inf])] * 2)


@given(st.lists(PLACES, max_size=12))
def test_the_front_is_what_comparing_all_pairs_leaves(places: list[tuple[float, float]]) -> None:
    rows: list[Any] = list(places)  # any object is a row to it

    from noisescale.prediction.figures.time_compute_front import pareto

    front = pareto(rows, lambda row: cast(tuple[float, float], row))

    known = [(x, y) for x, y in places if math.isfinite(x) and math.isfinite(y)]
    beaten = {(x, y) for x, y in known for u, v in known if u <= x and v <= y and (u, v) != (x, y)}
    assert list(front) == sorted(one for one in known if one not in beaten)


def test_without_seconds_the_front_is_examples_against_steps_and_their_least() -> None:
    p = predict(history(seconds=UNTIMED), [16, 64, 256])

    figure = draw("front", p)

    # Noise scale 100, 2,000 steps of 64: S_min = 2000/(1 + 100/64), E_min = 100·S_min.
    least = 2000 / (1 + 100 / 64)
    shapes = figure.layout.shapes
    assert [shape.y0 for shape in shapes if shape.y0 == shape.y1] == pytest.approx([least])
    assert [shape.x0 for shape in shapes if shape.x0 == shape.x1] == pytest.approx([100 * least])
    labelled = next(t for t in figure.data if t.mode == "markers+text")
    assert list(labelled.text) == ["16", "64", "256"]
    assert list(labelled.y) == pytest.approx([least * (1 + 100 / b) for b in (16, 64, 256)])
    assert list(labelled.x) == pytest.approx([b * least * (1 + 100 / b) for b in (16, 64, 256)])
    # The band runs along the lower and back along the upper bounds.
    band = trace(figure, "between the bounds")
    for size, at in ((16, 0), (256, len(band.x) // 2 - 1)):
        steps, back = p.law.steps(size), len(band.x) - 1 - at
        assert (band.x[at], band.y[at]) == pytest.approx((steps.low * size, steps.low))
        assert (band.x[back], band.y[back]) == pytest.approx((steps.high * size, steps.high))


@pytest.mark.parametrize("name", ["front", "speed-up"])
@pytest.mark.parametrize("seconds", [0.5, UNTIMED])
def test_what_is_likely_lies_within_the_bounds_and_around_the_line(
    name: str, seconds: float
) -> None:
    timed = None if math.isnan(seconds) else times()
    p = predict(history(seconds=seconds), [16, 64, 256], [2], step_times=timed)

    figure = draw(name, p)

    bounds, likely = (trace(figure, area) for area in ("between the bounds", "likely"))
    half = len(bounds.y) // 2
    least, low, high, most = np.array(
        [bounds.y[:half], likely.y[:half], likely.y[: half - 1 : -1], bounds.y[: half - 1 : -1]]
    )
    apart = most > least * 1.01  # not at the run's own batch size
    assert apart.any()
    assert (least[apart] < low[apart]).all()
    assert (low[apart] < high[apart]).all()
    assert (high[apart] < most[apart]).all()


def test_run_recommendation_and_critical_batch_size_are_marked() -> None:
    p = predict(history(seconds=UNTIMED, noise_scale=400.0), [64, 128])

    figure = draw("front", p)

    assert "this run: 64 on 2 devices" in names(figure)
    assert "recommended: 128 on 2 devices" in names(figure)
    critical = trace(figure, "critical: 400 (320 to 500)")
    assert critical.y[0] == pytest.approx(2 * p.law.middle.min_steps)


@pytest.mark.parametrize("seconds", [0.5, UNTIMED])
def test_an_unresolved_front_has_bounds_and_the_run_but_no_centre(seconds: float) -> None:
    timed = None if math.isnan(seconds) else times()
    p = predict(history(unresolved=40, seconds=seconds), step_times=timed)

    figure = draw("front", p)

    assert "only bounds yet: between" in names(figure)
    assert "Pareto" not in names(figure)
    assert "critical" not in names(figure)
    run = trace(figure, "this run")
    assert run.y[0] == pytest.approx(2000 if timed is None else 2000 * 0.52 / 60, rel=1e-4)


def test_noise_scale_batch_size_and_critical_one_are_drawn_as_they_are() -> None:
    figure = draw("noise-scale", predict(history(rows=3)))

    line = trace(figure, "noise scale")
    assert list(line.x) == [50, 100, 150]
    assert list(line.y) == [100, 100, 100]
    size = trace(figure, "batch size of the run")
    assert (size.line.shape, list(size.x), set(size.y)) == ("vh", [0, 50, 100, 150], {64})
    critical = trace(figure, "critical batch size 100 (80.0 to 125)")
    assert list(critical.y) == pytest.approx([100, 100])
    band = trace(figure, "95 % interval")
    assert list(band.x) == [0, 50, 100, 150, 150, 100, 50, 0, None]
    assert list(band.y) == pytest.approx([80] * 4 + [125] * 4 + [None])
    assert "100 (80.0 to 125) examples, 1.56 times" in figure.layout.title.text


@pytest.mark.parametrize("run", ["accumulated", "transformers", "skipping"])
def test_the_noise_scale_is_drawn_as_it_was_shown_and_the_title_is_its_last_point(run: str) -> None:
    """These runs end with a value, with a lower bound alone, and with nothing measured."""
    p = predict(INPUTS / run)
    value, low, high = (p.history[name] for name in ("noise_scale", "low", "high"))
    was_known = np.isfinite(value) & np.isfinite(high)

    figure = draw("noise-scale", p)

    now, title = p.noise_scale_now, figure.layout.title.text
    assert (with_bounds(now) if now.known else "Noise scale not measured") in title
    lines = [one for one in figure.data if one.name == "noise scale"]
    expected = np.where(was_known, value, None).tolist()
    assert [list(line.y) for line in lines] == ([expected] if was_known.any() else [])
    areas = {
        name: outline(figure, name) for name in ("95 % interval", "only a lower bound yet: above")
    }
    bottom, top = (10**end for end in figure.layout.yaxis.range)
    for step, least, most, known in zip(p.history["step"], low, high, was_known, strict=True):
        ends = areas["95 % interval" if known else "only a lower bound yet: above"].get(step, [])
        assert not least > bottom or least in ends
        assert not most < top or most in ends


def outline(figure: "go.Figure", name: str) -> dict[float, list[float]]:
    """The heights of an area at each place of its outline."""
    found: dict[float, list[float]] = {}
    for one in (one for one in figure.data if one.name == name):
        for x, y in zip(one.x, one.y, strict=True):
            found.setdefault(x, []).append(y)
    return found


def test_where_it_is_not_resolved_the_noise_scale_is_open_upwards() -> None:
    figure = draw("noise-scale", predict(history(rows=4, unresolved=2)))

    assert list(trace(figure, "noise scale").y) == [None, None, 100, 100]
    hatched = trace(figure, "only a lower bound yet: above")
    top = 10 ** figure.layout.yaxis.range[1]
    assert hatched.fillpattern.shape == "/"
    assert list(hatched.x) == [0, 50, 100, 100, 0, None]
    assert list(hatched.y[:3]) == pytest.approx([80, 80, 80])
    assert min(hatched.y[3:5]) > top
    assert min(x for x in trace(figure, "95 % interval").x if x is not None) == 100
    nowhere = draw("noise-scale", predict(history(rows=4, unresolved=4)))
    assert "noise scale" not in [t.name for t in nowhere.data]
    assert "critical batch size at least 80.0" in names(nowhere)


def test_a_long_history_is_drawn_by_its_extremes() -> None:
    columns = history(rows=10_000)
    columns["noise_scale"][[3_000, 7_000, -2, -1]] = 81.0, 124.0, 101.0, 99.9
    columns["noise_scale"][-3] = 99.8

    line = trace(draw("noise-scale", predict(columns)), "noise scale")

    assert len(line.x) <= 2000
    assert (max(line.y), min(line.y), line.y[-1]) == (124, 81, 99.9)
    assert list(line.x) == sorted(line.x)


def edges_of(figure: "go.Figure") -> list[float]:
    return [s.x0 for s in figure.layout.shapes if s.type == "line"]


def regimes_of(figure: "go.Figure") -> list[str]:
    return [a.text.replace("<br>", " ") for a in figure.layout.annotations]


def test_speed_up_follows_the_law_and_regimes_meet_at_a_fifth_and_five_times_b_crit() -> None:
    figure = draw("speed-up", predict(history(seconds=UNTIMED)))

    steps = trace(figure, "in steps")
    law = (1 + 100 / 64) / (1 + 100 / np.array(steps.x))
    assert list(steps.y) == pytest.approx(law.tolist())
    assert edges_of(figure) == pytest.approx([20, 500])
    assert len(regimes_of(figure)) == 3
    ideal = trace(figure, "ideal")
    assert [y / x for x, y in zip(ideal.x, ideal.y, strict=True)] == pytest.approx([1 / 64] * 2)
    # Twice the devices: (1 + 100/64)/(1 + 100/128)
    assert "1.44 times" in figure.layout.title.text


def test_speed_up_in_hours_is_that_of_the_plan_on_so_many_devices() -> None:
    p = predict(history(), [64, 128], [2, 4], step_times=times())

    hours = trace(draw("speed-up", p), "in hours, with bounds")

    drawn = dict(zip(hours.x, hours.y, strict=True))
    speed_up = p.rows_for(2)[0].hours.value / p.rows_for(4)[1].hours.value
    assert (drawn[64], drawn[128]) == pytest.approx((1, speed_up))


def test_an_unresolved_speed_up_has_bounds_alone() -> None:
    figure = draw("speed-up", predict(history(unresolved=40)))

    assert "in steps" not in names(figure)
    band = trace(figure, "only bounds yet: between them")
    half = len(band.x) // 2
    size = np.array(band.x[:half])
    slow = (1 + 80 / 64) / (1 + 80 / size)
    assert list(band.y[:half]) == pytest.approx(np.minimum(slow, size / 64).tolist())
    assert regimes_of(figure) == ["perfect scaling", "not resolved"]
    assert edges_of(figure) == pytest.approx([16])


def test_a_run_that_changed_its_batch_size_is_drawn_with_its_steps() -> None:
    size = np.repeat([64, 192], 20)
    p = predict(history(batch_size=size, examples=np.cumsum(50 * size)))

    size = trace(draw("noise-scale", p), "batch size of the run")
    run = trace(draw("speed-up", p), "this run")

    assert set(size.y) == {64, 192}
    assert list(run.x) == [128]
    assert "times the batch size" not in draw("noise-scale", p).layout.title.text


def test_every_colour_has_one_for_dark_pages() -> None:
    runs = [history(), history(unresolved=40), history(seconds=math.nan)]
    predicted = [predict(run) for run in runs]
    drawn = [draw(name, p) for p in predicted for name in NAMES]
    assert {figure.id for figure in predicted[0].document().figures()} == {*NAMES}
    drawn.append(overlaid([(str(k), p, k) for k, p in enumerate(predicted)]))

    used = set().union(*(colours_in(figure.to_plotly_json()) for figure in drawn))

    assert used <= set(DARK)
    assert len(used) > 10


def test_savings_are_those_of_the_law_with_marks_at_what_decides() -> None:
    p = predict(history(noise_scale=400.0))

    figure = draw("savings", p)

    steps, examples = (next(t for t in figure.data if t.name == x) for x in ("steps", "examples"))
    size = np.array(steps.x)
    expected = (1 + 400 / size) / (1 + 400 / 64)
    assert list(steps.y) == pytest.approx(expected.tolist())
    assert list(examples.y) == pytest.approx((expected * size / 64).tolist())
    assert "suggested: 128" in names(figure)
    areas = {trace.name: max(trace.y) for trace in figure.data if ": " in (trace.name or "")}
    assert max(examples.y) < areas["examples: likely"] < areas["examples: between the bounds"]
    assert "costly from: 400" in names(figure)
    unresolved = draw("savings", predict(history(unresolved=40)))
    assert "steps: between" in names(unresolved)
    assert not {"steps", "examples"} & {line.name for line in unresolved.data}


def test_batch_sizes_have_ticks_at_doublings_of_the_run_and_no_labels_in_a_crowd() -> None:
    own, changed = predict(history(batch_size=20.0)), predict(history(batch_size=19.5))
    wide = history(rows=3)
    for name in ("noise_scale", "low", "high"):
        wide[name] *= np.array([0.04, 40.0, 4e4])

    savings, mean = (draw("savings", p).layout.xaxis for p in (own, changed))
    along, far = (draw("noise-scale", p).layout.yaxis for p in (own, predict(wide)))

    assert list(savings.ticktext) == ["5", "10", "20", "40", "80", "160"]
    assert set(along.tickvals) <= {5 * 2**k for k in range(9)}
    assert list(mean.tickvals) == [8, 16, 32, 64, 128]
    assert {math.log2(size / 64) % 2 for size in far.tickvals} == {0}
    assert 64 in far.tickvals


def test_a_page_writes_the_title_itself() -> None:
    from noisescale.report.drawing import place_figure

    drawn = draw("front", predict(history()))
    height, legend = drawn.layout.height, drawn.layout.legend.y * drawn.layout.height

    figure = place_figure("front", "Time against compute", drawn)

    layout = figure.drawing["layout"]
    assert figure.finding.startswith("Batch size ")
    assert "title" not in layout
    assert layout["height"] < height
    assert layout["legend"]["y"] * layout["height"] == pytest.approx(legend)


def listed(figure: "go.Figure") -> list[Any]:
    """Traces with a name in the legend."""
    return [t for t in figure.data if t.showlegend is not False]


def test_several_runs_are_overlaid_in_colours_of_their_own() -> None:
    runs = [("a", predict(history()), 0), ("b", predict(history(unresolved=15)), 1)]

    figure = overlaid(runs)
    at_examples = overlaid(runs, across="examples")

    assert [t.name for t in listed(figure)] == ["a", "b"]
    assert [t.line.color for t in listed(figure)] == list(RUNS[:2])
    assert {t.legendgroup for t in figure.data} == {"a", "b"}
    (bound,) = (t for t in figure.data if "at least" in (t.hovertemplate or ""))
    assert (bound.legendgroup, bound.line.dash) == ("b", "dot")
    assert sum(t.fill == "toself" for t in figure.data) == 2
    assert figure.layout.meta["finding"].endswith("from 100 (a) to 100 examples (b)")
    assert at_examples.layout.xaxis.title.text == "examples processed"
    assert listed(at_examples)[0].x[-1] == 128_000


def test_many_runs_are_lines_that_never_look_the_same_and_a_long_name_keeps_both_ends() -> None:
    p = predict(history())
    runs = [("a<" + 100 * "x" + "<b>1", p, 0), *((str(k), p, k) for k in range(1, 12))]

    figure = overlaid(runs)

    assert not [t for t in figure.data if t.fill]
    assert len({(t.line.color, t.line.dash) for t in listed(figure)}) == 12
    assert listed(figure)[0].name == f"a&lt;{18 * 'x'}...{16 * 'x'}&lt;b&gt;1"
