# SPDX-License-Identifier: Apache-2.0
"""The figures of a comparison: what they draw of it, and when there is nothing to draw."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from courses import sweep, trial
from drawn import colours_in, trace

from noisescale.bounded import Bounded
from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare_trials import compare_trials
from noisescale.lab.compare.comparison import ComparisonRecord
from noisescale.lab.compare.figures import figures_of
from noisescale.lab.compare.figures.curves_of_trials import MOST_CURVES, MOST_POINTS, curves_figure
from noisescale.lab.compare.figures.learning_rates import learning_rates_figure
from noisescale.lab.compare.figures.profile_of_workloads import profile_figure
from noisescale.lab.compare.figures.steps_against_batch import steps_figure
from noisescale.lab.compare.figures.useful_batch_sizes import useful_batch_sizes_figure
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.tables import tables_of
from noisescale.report.colours import BANDS, DARK, SERIES, SHADES
from noisescale.report.numbers import with_bounds
from noisescale.tradeoff.regime_marks import border_text, spans_of
from noisescale.tradeoff.regimes import find_regimes

GOAL = Goal.read("loss<=0.1")
SIZES = [8 * 2**k for k in range(9)]


WIDE = [8 * 2**k for k in range(14)]


def law(critical: float, least: float = 100, sizes: Sequence[int] = SIZES) -> dict[float, float]:
    """Steps at batch sizes, rounded to the evaluations of `courses`."""
    return {size: round(least * (1 + critical / size), -1) for size in sizes}


def drawn(figure: go.Figure | None) -> go.Figure:
    assert figure is not None
    return figure


def curves(c: ComparisonRecord, workload: str = "") -> go.Figure:
    return drawn(curves_figure(c, workload))


def steps(c: ComparisonRecord, workload: str = "") -> go.Figure:
    return drawn(steps_figure(c, workload))


def rates(c: ComparisonRecord, workload: str = "") -> go.Figure:
    return drawn(learning_rates_figure(c, workload))


def caption(figure: go.Figure) -> str:
    return str(figure.layout.meta["caption"])


def finding(figure: go.Figure) -> str:
    return str(figure.layout.meta["finding"])


def measured(name: str, at: Any, values: Any, **where: Any) -> Trial:
    return Trial(measurements=Measurements(at, values), name=name, **where)


# All curves


def test_curves_are_the_measurements_and_the_goal_is_marked_where_it_was_reached() -> None:
    c = compare_trials([trial(100, submission="sgd"), trial(40, submission="adam")], GOAL)

    figure = curves(c)

    sgd = trace(figure, "sgd: 100 steps")
    assert list(sgd.x) == list(range(10, 111, 10))
    assert list(sgd.y) == [0.9 - 0.2 * x / 110 for x in range(10, 100, 10)] + [0.1, 0.1]
    reached = trace(figure, "adam", mode="markers")
    assert (list(reached.x), list(reached.y)) == ([40], [0.1])
    goal = trace(figure, "goal: loss &lt;= 0.1")
    assert (list(goal.x), list(goal.y)) == ([0, 110], [0.1, 0.1])
    assert finding(figure) == "adam reaches loss &lt;= 0.1 after 40 steps, sgd after 100 steps"
    assert (sgd.line.color, reached.marker.color) == SERIES[:2]


def test_seconds_are_drawn_in_the_unit_of_the_tables() -> None:
    figure = curves(compare_trials([trial(100, seconds=36.0, submission="sgd")], GOAL))

    # 100 steps of 36 seconds are an hour, and up to two hours are given in minutes.
    line = trace(figure, "sgd: 60.0 minutes")
    assert list(line.x) == pytest.approx([6 * k for k in range(1, 12)])
    assert figure.layout.xaxis.title.text == "time (minutes)"


def test_runs_that_do_not_stand_for_their_submission_are_thin_and_pale() -> None:
    trials = [
        trial(at, submission="sgd", learning_rate=0.1, name=f"seed {at}") for at in (100, 120, 140)
    ]
    trials.append(trial(200, submission="sgd", learning_rate=1.0, name="other"))

    figure = curves(compare_trials(trials, GOAL))

    looks = {t.text: (t.line.width, t.opacity) for t in figure.data if t.text}
    assert looks["seed 120"] == (2.5, 1)
    assert looks["seed 100"] == looks["seed 140"] == (1.5, 0.75)
    assert looks["other"] == (1, 0.3)
    assert [t.name for t in figure.data if t.showlegend is not False and t.text] == [
        "sgd: 120 steps"
    ]


def test_of_many_runs_the_best_are_drawn_and_the_caption_says_it() -> None:
    trials = [
        trial(100 + 10 * k, submission="sgd", learning_rate=float(k + 1), name=f"run {k}")
        for k in range(MOST_CURVES + 10)
    ]

    figure = curves(compare_trials(reversed(trials), GOAL))

    assert {t.text for t in figure.data if t.text} == {f"run {k}" for k in range(MOST_CURVES)}
    assert f"Drawn are the best {MOST_CURVES} of {MOST_CURVES + 10} runs." in caption(figure)


def test_a_long_curve_is_drawn_by_its_ends_and_extremes() -> None:
    at = np.arange(1, 20_001)
    values = 1.0 - at / 25_000
    values[7_000], values[12_000] = 5.0, 0.05
    values[[1, 2, -2, -3]] = 1.1, 0.9, 0.3, 0.1  # more extreme than the ends

    line = trace(curves(compare_trials([measured("a", at, values)], GOAL)), "a: 12,001 steps")

    assert len(line.x) <= MOST_POINTS
    assert (line.x[0], line.x[-1]) == (1, 20_000)
    assert (max(line.y), min(line.y)) == (5.0, 0.05)


@pytest.mark.parametrize(
    ("goal", "values", "kind"),
    [
        ("loss<=0.1", [1.0, 0.09], "log"),
        ("loss<=0.5", [1.0, 0.4], None),
        ("loss<=-0.1", [1.0, -0.2], None),
        ("accuracy>=0.9", [0.01, 0.95], None),
    ],
)
def test_only_a_positive_metric_that_falls_far_is_logarithmic(
    goal: str, values: list[float], kind: str | None
) -> None:
    figure = curves(compare_trials([measured("a", [1, 2], values)], Goal.read(goal)))

    assert figure.layout.yaxis.type == kind
    low, high = figure.layout.yaxis.range
    ends = [10**low, 10**high] if kind else [low, high]
    assert ends[0] < min(values)
    assert ends[1] > max(values)


def test_where_the_fastest_run_would_be_lost_times_are_logarithmic() -> None:
    c = compare_trials([trial(100, until=10_000, submission="a"), trial(50, submission="b")], GOAL)

    figure = curves(c)

    low, high = (10**end for end in figure.layout.xaxis.range)
    assert figure.layout.xaxis.type == "log"
    assert low < 10 < 10_000 < high
    assert trace(figure, "goal").x[0] == pytest.approx(low)


def test_a_run_that_does_not_count_does_not_widen_the_axis() -> None:
    high = measured("high", [10, 20], [50.0, 0.1], submission="sgd", learning_rate=1.0)
    fast = measured("fast", [10], [0.1], submission="sgd", learning_rate=0.1)

    figure = curves(compare_trials([high, fast, trial(100, submission="adam")], GOAL))

    assert figure.layout.yaxis.range[1] < 1


def test_a_diverged_run_ends_in_a_cross_at_the_edge_and_does_not_widen_the_axis() -> None:
    bad = measured("bad", [10, 20, 30], [0.9, 1e6, math.nan], submission="bad")

    figure = curves(compare_trials([trial(100, submission="sgd"), bad], GOAL))

    cross = trace(figure, "diverged or failed")
    assert list(cross.x) == [20]
    top = figure.layout.yaxis.range[1]
    assert list(cross.y) == pytest.approx([top])
    assert top < 2
    assert "the last number is 1,000,000" in cross.hovertext[0]


def test_where_nothing_was_reached_curves_are_drawn_by_a_clock_that_is_known() -> None:
    c = compare_trials([trial(math.inf, submission="sgd")], GOAL)

    figure = curves(c)

    assert finding(figure) == "loss &lt;= 0.1 is not reached"
    assert len(trace(figure, "sgd: not reached").x) == 100
    assert figure.layout.xaxis.title.text == "optimizer steps"


def test_runs_without_the_clock_or_the_metric_are_left_out_and_counted() -> None:
    trials = [
        trial(100, seconds=1.0, submission="a"),
        trial(math.inf, submission="b"),
        measured("c", [10], [math.nan], submission="c"),
    ]

    figure = curves(compare_trials(trials, GOAL))

    assert [t.name for t in figure.data if t.text] == ["a: 100 seconds"]
    assert "2 runs are left out: the metric or its seconds is not known." in caption(figure)
    assert curves_figure(compare_trials(trials[2:], GOAL), "") is None


def test_names_from_elsewhere_are_text_and_short() -> None:
    figure = curves(compare_trials([trial(100, submission="<b>a</b>" + 50 * "x")], GOAL))

    assert trace(figure, "&lt;b&gt;a", mode="lines").name == (
        f"&lt;b&gt;a&lt;/b&gt;{12 * 'x'}...{20 * 'x'}: 100 steps"
    )


def test_quotes_are_left_as_they_are() -> None:
    """Plotly shows `&quot;` as it is written."""
    figure = curves(compare_trials([trial(100, submission="\"a\" & 'b'")], GOAL))

    assert trace(figure, '"a" &amp;', mode="lines").name == "\"a\" &amp; 'b': 100 steps"


def test_an_axis_ends_though_values_are_as_large_as_numbers_can_be() -> None:
    huge = Trial("huge", Measurements([10, 20], [1.7e308, -1.7e308]))

    figure = curves(compare_trials([huge], Goal.read("loss<=-5")))

    assert np.isfinite(figure.layout.yaxis.range).all()


# Steps against batch size


def one_sweep(**changes: Any) -> ComparisonRecord:
    return compare_trials(sweep(law(128), submission="sgd", **changes), GOAL)


def test_one_sweep_is_drawn_with_its_points_its_curve_and_perfect_scaling() -> None:
    c = one_sweep()

    figure = steps(c)

    points = trace(figure, "runs at the best setting")
    assert list(points.x) == SIZES
    assert list(points.y) == list(law(128).values())
    found = find_regimes(SIZES, list(law(128).values()))
    curve = trace(figure, "fitted curve")
    assert (curve.x[0], curve.x[-1]) == pytest.approx((8, 2048))
    assert list(curve.y) == pytest.approx([found.steps(x) for x in curve.x])
    line = trace(figure, "perfect scaling: half the steps")
    assert [x * y for x, y in zip(line.x, line.y, strict=True)] == pytest.approx(
        [found.min_examples.value] * 2
    )


def test_the_curve_has_a_band_of_its_bounds_within_the_axes() -> None:
    figure = steps(one_sweep())

    found = find_regimes(SIZES, list(law(128).values()))
    band = trace(figure, "bounds of the curve")
    half = len(band.x) // 2
    assert list(band.x[:half]) == pytest.approx(list(reversed(band.x[half:])))
    assert (band.x[0], band.x[half]) == pytest.approx((8, 2048))
    for k in (0, 30, half - 1):
        bounds = found.steps_with_bounds(band.x[k])
        assert (band.y[k], band.y[-1 - k]) == pytest.approx((bounds.low, bounds.high))
        assert band.y[k] < trace(figure, "fitted curve").y[k] < band.y[-1 - k]
    low, high = (10**end for end in figure.layout.yaxis.range)
    assert low < min(band.y) < max(band.y) < high
    assert min(figure.layout.yaxis.tickvals) <= 2 * min(band.y)
    assert band.fillcolor == BANDS[0]
    assert "Band: where the curve may lie at each batch size (95 %)." in caption(figure)
    first = trace(figure, "runs at the best setting").hovertext[0]
    fitted = with_bounds(found.steps_with_bounds(8))
    assert first.endswith(f"1,700 steps<br>fitted curve: {fitted}")


def test_a_band_is_wider_where_learning_rates_were_not_searched() -> None:
    by_rule = [
        trial(at, batch_size=size, learning_rate=0.1, submission="sgd")
        for size, at in law(128).items()
    ]

    figure = steps(compare_trials(by_rule, GOAL))

    narrow, wide = (trace(f, "bounds of the curve").y for f in (steps(one_sweep()), figure))
    assert wide[-1] / wide[0] > 1.5 * narrow[-1] / narrow[0]
    low, high = (10**end for end in figure.layout.yaxis.range)
    assert low < min(wide) < max(wide) < high
    said = "Better learning rates may need fewer steps: they were not searched."
    assert said in caption(figure)
    assert said not in caption(steps(one_sweep()))


def test_without_a_curve_there_is_no_band() -> None:
    figure = steps(compare_trials(sweep({8: 100, 16: math.inf}, submission="sgd"), GOAL))

    assert not [each for each in figure.data if each.fill == "toself"]
    assert "Band" not in caption(figure)


def test_regimes_of_one_sweep_are_shaded_and_their_borders_have_bounds() -> None:
    wide = law(512, sizes=WIDE)

    figure = steps(compare_trials(sweep(wide, submission="sgd"), GOAL))

    found = find_regimes(list(wide), list(wide.values()))
    perfect, maximal = found.perfect_up_to, found.maximal_from
    shaded = [s for s in figure.layout.shapes if s.type == "rect"]
    assert [s.fillcolor for s in shaded] == list(SHADES)
    assert [s.x0 for s in shaded[1:]] == pytest.approx([perfect.value, maximal.value])
    texts = [a.text.replace("<br>", " ") for a in figure.layout.annotations]
    assert texts == ["perfect scaling", "diminishing returns", "maximal data parallelism"]
    for name, border in (("perfect scaling up to", perfect), ("maximal data", maximal)):
        line = trace(figure, name)
        assert list(line.x) == pytest.approx([border.value, border.low, border.high])
        assert list(line.marker.symbol[1:]) == ["line-ns-open"] * 2
    assert finding(figure) == (
        "Scaling is perfect up to a batch size of about 104. Beyond about 2,584 larger batches save"
        " few steps"
    )


def test_borders_lie_below_all_points_and_names_above() -> None:
    figure = steps(one_sweep())

    low, high = (10**end for end in figure.layout.yaxis.range)
    borders = [t.y[0] for t in figure.data if (t.name or "").startswith(("perfect s", "maximal"))]
    borders = [y for y in borders if y < 100]
    assert len(borders) == 2
    assert low < min(borders) < max(borders) < min(figure.layout.yaxis.tickvals)
    assert max(borders) < 100 < 1700 < high
    assert min(figure.layout.yaxis.tickvals) >= 50


def test_batch_sizes_with_a_single_learning_rate_are_hollow_and_named() -> None:
    by_chance = [
        trial(60, batch_size=size, learning_rate=rate, submission="sgd")
        for size, rate in ((4096.0, 0.5), (8192.0, 0.1), (16384.0, 0.8))
    ]
    c = compare_trials([*sweep(law(128), submission="sgd"), *by_chance], GOAL)

    figure = steps(c)

    symbols = trace(figure, "runs at the best setting").marker.symbol
    assert list(symbols) == ["circle"] * len(law(128)) + ["circle-open"] * 3
    assert "Hollow: not counted, at most one learning rate is known." in caption(figure)
    rates = learning_rates_figure(c, "")
    assert rates is not None
    assert "Hollow: only one is known." in caption(rates)
    (table,) = [t for t in tables_of(c) if t.title.startswith("Steps to")]
    shown = [line.cells[3].text for line in table.lines]
    assert shown[-2:] == ["0.1 (the only one)", "0.8 (the only one)"]


def test_batch_sizes_that_do_not_count_are_hollow_and_missed_ones_are_crosses_at_the_top() -> None:
    at_the_edge = {**law(128), 2048: math.inf}
    trials = sweep(at_the_edge, submission="sgd")
    # Without the highest learning rate, the best one of batch size 1,024 is at the edge.
    trials = [t for t in trials if not (t.batch_size == 1024 and t.learning_rate > 0.15)]

    figure = steps(compare_trials(trials, GOAL))

    symbols = trace(figure, "runs at the best setting").marker.symbol
    assert list(symbols) == ["circle"] * 7 + ["circle-open"]
    missed = trace(figure, "sgd")
    top = 10 ** figure.layout.yaxis.range[1]
    assert list(missed.x) == [2048]
    assert 1700 < missed.y[0] < top
    assert missed.hovertext[0].endswith("goal not reached")
    assert "Hollow" in caption(figure)
    assert "Crosses: goal not reached." in caption(figure)


def test_every_repetition_is_a_point() -> None:
    trials = [
        trial(at, batch_size=float(size), learning_rate=0.1, name=f"{size} {at}", submission="sgd")
        for size, of in ((8, (900, 910, 920)), (16, (500, 510)))
        for at in of
    ]

    points = trace(steps(compare_trials(trials, GOAL)), "runs at the best setting")

    assert sorted(zip(points.x, points.y, strict=True)) == [
        (8, 900),
        (8, 910),
        (8, 920),
        (16, 500),
        (16, 510),
    ]


def test_several_sweeps_have_colours_and_borders_of_their_own_and_no_shades() -> None:
    trials = sweep(law(64), submission="sgd") + sweep(law(256, 90), submission="adam")

    figure = steps(compare_trials(trials, GOAL))

    assert not [s for s in figure.layout.shapes if s.type == "rect"]
    for name, colour in zip(("sgd", "adam"), SERIES, strict=False):
        own = [t for t in figure.data if t.name == name]
        assert len(own) == 5  # perfect scaling is named otherwise
        (band,) = [t for t in own if t.fill == "toself"]
        assert band.fillcolor == BANDS[SERIES.index(colour)]
        assert {t.line.color or t.marker.color for t in own if t is not band} == {colour}
        assert [t.showlegend for t in own].count(None) == 1
    assert finding(figure) == (
        "Fewest steps: 100 with sgd at batch size 2,048, 100 with adam at batch size 2,048"
    )


def test_a_border_whose_end_is_not_seen_has_an_arrow() -> None:
    few = {size: at for size, at in law(4096).items() if size <= 256}

    figure = steps(compare_trials(sweep(few, submission="sgd"), GOAL))

    line = trace(figure, "maximal data parallelism from at least")
    assert line.marker.symbol[-1] == "arrow-right"
    assert line.x[-1] < 10 ** figure.layout.xaxis.range[1]


def test_a_sweep_without_regimes_is_joined_by_a_thin_line() -> None:
    only = {8: 900, 16: math.inf}

    figure = steps(compare_trials(sweep(only, submission="sgd"), GOAL))

    assert finding(figure) == "The goal is reached at batch size 8 alone"
    assert list(trace(figure, "fitted curve").x) == [8]
    assert not figure.layout.shapes


def test_batch_sizes_have_ticks_that_stay_level() -> None:
    axis = steps(one_sweep()).layout.xaxis

    assert list(axis.ticktext) == ["8", "16", "32", "64", "128", "256", "512", "1,024", "2,048"]
    assert axis.tickangle == 0


def test_of_batch_sizes_close_together_not_all_have_a_tick() -> None:
    near = dict.fromkeys(range(100, 200, 2), 1000.0)

    axis = steps(compare_trials(sweep(near, submission="sgd"), GOAL)).layout.xaxis

    assert 5 <= len(axis.tickvals) <= 11


# The regimes


def test_a_bend_too_sharp_for_diminishing_returns_has_two_regimes_that_meet_at_b_crit() -> None:
    corner = find_regimes(SIZES, [max(100.0, 12_800 / size) for size in SIZES], scatter=0.01)

    spans = spans_of(corner, 4, 4096)

    assert [span.name for span in spans] == ["perfect scaling", "maximal data parallelism"]
    assert spans[1].left == pytest.approx(corner.critical_batch_size.value)


def test_a_short_regime_has_its_name_below_the_others() -> None:
    found = find_regimes(SIZES, list(law(128).values()))

    spans = spans_of(found, found.perfect_up_to.value / 1.2, 4096)

    assert [(span.row, span.anchor) for span in spans] == [
        (1, "left"),
        (0, "center"),
        (0, "center"),
    ]


def test_borders_that_no_sweep_shows_have_no_regimes() -> None:
    found = find_regimes([8, 16], [1000, 700])

    spans = spans_of(found, 4, 32)

    assert [span.name for span in spans] == ["not resolved"]


def test_borders_are_written_as_far_as_they_are_known() -> None:
    (each,) = one_sweep().sweeps

    texts = [
        border_text(Bounded(*border), each.ends)
        for border in (
            (20.0, 10.0, 40.0),
            (20.0, 10.0, math.inf),
            (20.0, 0.0, 40.0),
            (math.inf, 10.0, math.inf),
        )
    ]

    assert texts == [
        "20.0 (10.0 to 40.0)",
        "20.0 (at least 10.0)",
        "20.0 (at most 40.0)",
        "at least 10.0",
    ]


# Learning rates


def test_the_best_learning_rate_lies_in_the_range_that_was_tried() -> None:
    best: Mapping[float, float] = {8: 0.1, 32: 0.2, 128: 0.4}

    figure = rates(compare_trials(sweep({8: 900, 32: 400, 128: 200}, best, submission="sgd"), GOAL))

    line = trace(figure, "best learning rate")
    assert (list(line.x), list(line.y)) == ([8, 32, 128], [0.1, 0.2, 0.4])
    tried = trace(figure, "sgd")
    assert list(tried.x) == [8, 8, 8, None, 32, 32, 32, None, 128, 128, 128, None]
    assert list(tried.y[:4]) == pytest.approx([0.05, 0.1, 0.2, None])
    linear, root = trace(figure, "linear rule"), trace(figure, "square root rule")
    for rule, power in ((linear, 1), (root, 0.5)):
        # Both go through the first point.
        ratio = [y / 0.1 / (x / 8) ** power for x, y in zip(rule.x, rule.y, strict=True)]
        assert ratio == pytest.approx([1, 1])
    assert finding(figure) == (
        "From batch size 8 to 128 the best learning rate goes from 0.1 to 0.4: power 0.50"
    )


def test_the_power_of_the_learning_rate_is_fitted_to_all_batch_sizes() -> None:
    best: Mapping[float, float] = {8: 0.1, 16: 0.2, 32: 0.1, 64: 0.4}

    figure = rates(compare_trials(sweep({8: 900, 16: 500, 32: 300, 64: 200}, best), GOAL))

    # Powers of two at -1.5, -0.5, 0.5 and 1.5: 0, 1, 0 and 2. (-0.5 + 3)/5
    assert finding(figure).endswith("power 0.50")


def test_a_learning_rate_that_stays_has_a_power_without_a_sign() -> None:
    figure = rates(compare_trials(sweep({64: 900, 128: 500, 256: 300, 512: 250, 1024: 200}), GOAL))

    assert finding(figure).endswith("power 0.00")


def test_a_rule_that_gave_the_learning_rates_is_no_finding() -> None:
    """Of three searched ones beside it, the power is theirs."""
    by_rule = [
        trial(steps, batch_size=size, learning_rate=0.1 * size / 8, submission="sgd")
        for size, steps in {8: 900, 16: 500, 32: 300, 64: 200}.items()
    ]
    edges = [trial(999, batch_size=8.0, learning_rate=0.05, submission="sgd")]
    searched = sweep({8: 900, 32: 300}, {8: 0.1, 32: 0.2}, submission="sgd")

    assert learning_rates_figure(compare_trials(by_rule, GOAL), "") is None
    assert finding(rates(compare_trials([*by_rule, *edges], GOAL))) == (
        "At no batch size is the best learning rate known"
    )
    one = rates(compare_trials([*by_rule, *edges, *searched[:3]], GOAL))
    assert finding(one) == "At batch size 8 the best learning rate is 0.1"
    symbols = trace(one, "best learning rate").marker.symbol
    assert list(symbols) == ["circle", *3 * ["circle-open"]]
    assert "Hollow: only one is known. The rules begin at the first filled point." in caption(one)
    later = rates(compare_trials([*by_rule[:2], *by_rule[3:], *searched[3:]], GOAL))
    rule = trace(later, "linear rule")
    assert rule.y[0] == pytest.approx(0.2 * rule.x[0] / 32)
    two = rates(compare_trials([*by_rule[:1], *by_rule[3:], *searched], GOAL))
    assert finding(two).endswith("goes from 0.1 to 0.2: power 0.50")


def test_diverged_learning_rates_are_crosses_and_best_ones_at_the_edge_are_hollow() -> None:
    trials = sweep({8: 900, 16: 500}, submission="sgd")
    trials = [t for t in trials if not (t.batch_size == 16 and t.learning_rate > 0.15)]
    nan = Measurements([10, 20], [0.9, math.nan])
    trials.append(Trial("bad", nan, "sgd", batch_size=8.0, learning_rate=0.8))

    figure = rates(compare_trials(trials, GOAL))

    cross = trace(figure, "diverged or failed")
    assert (list(cross.x), list(cross.y)) == ([8], [0.8])
    assert list(trace(figure, "best learning rate").marker.symbol) == ["circle", "circle-open"]


def test_submissions_stand_beside_each_other() -> None:
    trials = sweep({8: 900, 16: 500}, submission="sgd")
    trials += sweep({8: 800, 16: 400}, {8: 0.1, 16: 0.2}, submission="adam")

    figure = rates(compare_trials(trials, GOAL))

    sgd, adam = (trace(figure, name, showlegend=None) for name in ("sgd", "adam"))
    assert sgd.x[0] < 8 < adam.x[0]
    assert adam.x[0] / sgd.x[0] == pytest.approx(1.05)
    assert finding(figure) == (
        "The best learning rate goes with the batch size to the power 0.00 (sgd), 1.00 (adam)"
    )


def test_without_learning_rates_or_without_a_goal_reached_there_is_no_figure_of_them() -> None:
    unknown = [trial(at, batch_size=float(size)) for size, at in ((8, 900), (16, 500))]
    missed = sweep({8: math.inf, 16: math.inf})

    assert learning_rates_figure(compare_trials(unknown, GOAL), "") is None
    assert learning_rates_figure(compare_trials(missed, GOAL), "") is None


# The largest useful batch sizes


def two_sweeps(first: Mapping[float, float], second: Mapping[float, float]) -> ComparisonRecord:
    return compare_trials(sweep(first, submission="sgd") + sweep(second, submission="adam"), GOAL)


def test_the_largest_useful_batch_sizes_are_points_with_their_bounds() -> None:
    c = two_sweeps(law(32), law(4096))

    figure = drawn(useful_batch_sizes_figure(c))

    sgd, adam = (each.largest_useful_batch_size for each in c.sweeps)
    closed, opened = trace(figure, "sgd"), trace(figure, "adam: at least")
    assert list(closed.x) == pytest.approx([sgd.value, sgd.low, sgd.high])
    assert math.isinf(adam.high)
    assert opened.marker.symbol[-1] == "arrow-right"
    assert min(opened.x) == pytest.approx(adam.low)
    assert closed.y[0] > opened.y[0]
    tried = trace(figure, "batch sizes that were tried")
    assert list(tried.x) == [8, 2048, None] * 2
    assert finding(figure) == (f"Larger batches are useful up to about {sgd.value:.0f} with sgd")


def test_largest_useful_batch_sizes_that_may_be_the_same_are_said_to_overlap() -> None:
    near, far = (
        finding(
            drawn(
                useful_batch_sizes_figure(
                    two_sweeps(law(32, sizes=WIDE), law(critical, sizes=WIDE))
                )
            )
        )
        for critical in (40, 2000)
    )

    assert near.endswith("with sgd: their bounds overlap")
    assert far.endswith("with sgd")


def test_one_sweep_has_no_figure_of_useful_batch_sizes() -> None:
    assert useful_batch_sizes_figure(one_sweep()) is None
    assert useful_batch_sizes_figure(two_sweeps(law(32), {8: 900, 16: math.inf})) is None


# Several workloads


def on_workloads(**times: tuple[float, ...]) -> ComparisonRecord:
    return compare_trials(
        [
            trial(at, submission=name, workload=f"workload {k}", until=1000)
            for name, of in times.items()
            for k, at in enumerate(of)
        ],
        GOAL,
    )


def test_a_profile_rises_at_the_ratios_to_the_fastest() -> None:
    c = on_workloads(sgd=(100, 200, 900, math.inf), adam=(200, 100, 100, 100))

    figure = drawn(profile_figure(c))

    # The ratios of sgd are 1, 2, 9 and infinite, those of adam 2, 1, 1 and 1.
    sgd, adam = trace(figure, "sgd: score 0.4167"), trace(figure, "adam: score 0.9167")
    assert (list(sgd.x), list(sgd.y)) == ([1, 1, 2, 4], [0, 25, 50, 50])
    assert (list(adam.x), list(adam.y)) == ([1, 1, 1, 1, 2, 4], [0, 25, 50, 75, 100, 100])
    assert sgd.line.shape == "hv"
    assert sgd.line.dash != adam.line.dash
    assert finding(figure) == (
        "adam has the highest score, 0.9167: the fastest on 3 of 4 workloads"
    )


def test_a_profile_of_nothing_reached_says_so() -> None:
    figure = drawn(profile_figure(on_workloads(a=(math.inf,) * 2, b=(math.inf,) * 2)))

    assert finding(figure) == "No submission reaches the goal of a workload that counts"
    assert list(trace(figure, "a: score 0.0000").y) == [0, 0]


# All of them


def test_each_workload_has_its_figures_and_ids_of_its_own() -> None:
    trials = [
        each
        for workload in ("mnist", "wmt")
        for name, critical in (("sgd", 64), ("adam", 256))
        for each in sweep(law(critical), submission=name, workload=workload)
    ]

    figures = figures_of(compare_trials(trials, GOAL))

    assert [(figure.id, figure.heading) for figure in figures] == [
        ("profile", "All workloads together"),
        ("curves", "loss along the runs: mnist"),
        ("steps", "Steps to the goal against batch size: mnist"),
        ("learning-rates", "The best learning rate of each batch size: mnist"),
        ("curves-1", "loss along the runs: wmt"),
        ("steps-1", "Steps to the goal against batch size: wmt"),
        ("learning-rates-1", "The best learning rate of each batch size: wmt"),
        ("useful-batch-sizes", "How large a batch is useful"),
    ]


def test_a_sweep_that_reached_nothing_has_its_curves_alone() -> None:
    c = compare_trials(sweep({8: math.inf, 16: math.inf}), GOAL)

    assert [figure.id for figure in figures_of(c)] == ["curves"]


def test_every_colour_of_the_figures_has_one_for_dark_pages() -> None:
    few = [t for k in range(7) for t in sweep(law(2.0 ** (k + 3)), submission=f"{k}")]
    several = compare_trials([*few, Trial("bad", Measurements([1], [math.nan]), "7")], GOAL)
    figures = [
        *figures_of(several),
        *figures_of(one_sweep()),
        *figures_of(on_workloads(a=(100, 200), b=(200, 100))),
    ]

    used = colours_in([figure.drawing for figure in figures])

    assert used <= set(DARK)
    assert set(SERIES) <= used


def test_figures_can_be_written_as_json_without_nan() -> None:
    for figure in figures_of(two_sweeps(law(64), {**law(256), 2048: math.inf})):
        text = go.Figure(figure.drawing).to_json()
        assert text is not None
        assert "NaN" not in text
        assert "Infinity" not in text
