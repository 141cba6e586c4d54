# SPDX-License-Identifier: Apache-2.0
"""The figures of a comparison: what they draw of it, and when there is nothing to draw."""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from courses import SIZES, compared, law, on_workloads, rivals, seeds, sweep, trial
from drawn import colours_in, trace

from noisescale.bounded import Bounded
from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare import compare
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.tables import tables_of
from noisescale.report.colours import BANDS, DARK, SERIES, SHADES
from noisescale.report.numbers import with_bounds
from noisescale.tradeoff.regimes import find_regimes

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from noisescale.report.document import Figure

WIDE = [8 * 2**k for k in range(14)]


def module(name: str = "") -> Any:
    """Of the figures: plotly is imported with it."""
    return import_module(f"noisescale.lab.compare.figures{name}")


def marks() -> Any:
    return import_module("noisescale.tradeoff.regime_marks")


def draws(name: str, function: str, *workload: str) -> "Callable[[Comparison], go.Figure]":
    def drawn(c: Comparison) -> Any:
        figure = getattr(module(name), function)(c, *workload)
        assert figure is not None
        return figure

    return drawn


curves = draws(".curves_of_trials", "curves_figure", "")
steps = draws(".steps_against_batch", "steps_figure", "")
rates = draws(".learning_rates", "learning_rates_figure", "")
profile = draws(".profile_of_workloads", "profile_figure")


def figures_of(c: Comparison) -> "list[Figure]":
    return list(module().figures_of(c))


def caption(figure: "go.Figure") -> str:
    return str(figure.layout.meta["caption"])


def finding(figure: "go.Figure") -> str:
    return str(figure.layout.meta["finding"])


def ends(axis: Any) -> tuple[float, float]:
    """The ends of an axis as values."""
    low, high = axis.range
    return (10**low, 10**high) if axis.type == "log" else (low, high)


def measured(name: str, at: Any, values: Any, **where: Any) -> Trial:
    return Trial(measurements=Measurements(at, values), name=name, **where)


def test_curves_are_the_measurements_and_the_goal_is_marked_where_it_was_reached() -> None:
    figure = curves(compared(rivals({"sgd": 100, "adam": 40})))

    sgd = trace(figure, "sgd: 100 steps")
    assert list(sgd.x) == list(range(10, 111, 10))
    assert list(sgd.y) == [0.9 - 0.2 * x / 110 for x in range(10, 100, 10)] + [0.1, 0.1]
    reached = trace(figure, "adam", mode="markers")
    assert (list(reached.x), list(reached.y)) == ([40], [0.1])
    goal = trace(figure, "goal: loss &lt;= 0.1")
    assert (list(goal.x), list(goal.y)) == ([0, 110], [0.1, 0.1])
    assert finding(figure) == "loss &lt;= 0.1: first reached by adam, after 40 steps"
    assert (sgd.line.color, reached.marker.color) == SERIES[:2]


def test_runs_that_do_not_stand_for_their_submission_are_thin_and_pale() -> None:
    trials = [
        trial(at, submission="sgd", learning_rate=0.1, name=f"seed {at}") for at in (100, 120, 140)
    ]
    trials.append(trial(200, submission="sgd", learning_rate=1.0, name="other"))

    figure = curves(compared(trials))

    looks = {t.text: (t.line.width, t.opacity) for t in figure.data if t.text}
    assert looks["seed 120"] == (2.5, 1)
    assert looks["seed 100"] == looks["seed 140"] == (1.5, 0.75)
    assert looks["other"] == (1, 0.3)
    assert [t.name for t in figure.data if t.showlegend is not False and t.text] == [
        "sgd: 120 steps"
    ]


def test_of_many_runs_the_best_are_drawn_and_the_caption_says_it() -> None:
    most = module(".curves_of_trials").MOST_CURVES
    trials = [
        trial(100 + 10 * k, submission="sgd", learning_rate=float(k + 1), name=f"run {k}")
        for k in range(most + 10)
    ]

    figure = curves(compared(reversed(trials)))

    assert {t.text for t in figure.data if t.text} == {f"run {k}" for k in range(most)}
    assert f"the best {most} of {most + 10} runs." in caption(figure)


def test_a_long_curve_is_drawn_by_its_ends_and_extremes() -> None:
    at = np.arange(1, 20_001)
    values = 1.0 - at / 25_000
    values[7_000], values[12_000] = 5.0, 0.05
    values[[1, 2, -2, -3]] = 1.1, 0.9, 0.3, 0.1  # more extreme than the ends

    line = trace(curves(compared([measured("a", at, values)])), "a: 12,001 steps")

    assert len(line.x) <= module(".curves_of_trials").MOST_POINTS
    assert (line.x[0], line.x[-1]) == (1, 20_000)
    assert (max(line.y), min(line.y)) == (5.0, 0.05)


@pytest.mark.parametrize(
    ("goal", "values", "kind"),
    [
        ("loss<=0.1", [1.0, 0.09], "log"),
        ("loss<=0.5", [1.0, 0.4], None),
        ("loss<=-0.1", [1.0, -0.2], None),
        ("accuracy>=0.9", [0.01, 0.95], None),
        ("loss<=-5", [1.7e308, -1.7e308], None),  # as large as numbers can be
    ],
)
def test_metrics_that_fall_far_are_logarithmic(goal: str, values: list[float], kind: Any) -> None:
    axis = curves(compare([measured("a", [1, 2], values)], Goal.read(goal))).layout.yaxis

    assert axis.type == kind
    low, high = ends(axis)
    assert np.isfinite([low, high]).all()
    assert low < max(min(values), -1e300) < min(max(values), 1e300) < high


def test_where_the_fastest_run_would_be_lost_times_are_logarithmic() -> None:
    trials = [trial(100, until=10_000, submission="a"), trial(50, submission="b")]

    figure = curves(compared(trials))

    low, high = ends(figure.layout.xaxis)
    assert figure.layout.xaxis.type == "log"
    assert low < 10 < 10_000 < high
    assert trace(figure, "goal").x[0] == pytest.approx(low)


def test_runs_that_do_not_count_or_diverged_do_not_widen_the_axis() -> None:
    """A diverged one ends in a cross at the edge."""
    high = measured("high", [10, 20], [50.0, 0.1], submission="sgd", learning_rate=1.0)
    fast = measured("fast", [10], [0.1], submission="sgd", learning_rate=0.1)
    bad = measured("bad", [10, 20, 30], [0.9, 1e6, math.nan], submission="bad")

    uncounted = curves(compared([high, fast, trial(100, submission="adam")]))
    diverged = curves(compared([trial(100, submission="sgd"), bad]))

    cross, top = trace(diverged, "diverged or failed"), diverged.layout.yaxis.range[1]
    assert uncounted.layout.yaxis.range[1] < 1
    assert top < 2
    assert (list(cross.x), list(cross.y)) == ([20], pytest.approx([top]))
    assert "1,000,000" in cross.hovertext[0]


def test_curves_are_drawn_by_a_clock_that_is_known_in_the_unit_of_the_tables() -> None:
    figure = curves(compared([trial(math.inf, submission="sgd")]))
    timed = curves(compared([trial(100, seconds=36.0, submission="sgd")]))

    assert finding(figure).startswith("loss &lt;= 0.1: reached by no run")
    assert len(trace(figure, "sgd: not reached").x) == 100
    assert figure.layout.xaxis.title.text == "optimizer steps"
    # 100 steps of 36 seconds are an hour, and up to two hours are given in minutes.
    assert list(trace(timed, "sgd: 60.0 minutes").x) == pytest.approx([6 * k for k in range(1, 12)])
    assert timed.layout.xaxis.title.text == "time (minutes)"


def test_runs_without_the_clock_or_the_metric_are_left_out_and_counted() -> None:
    trials = [
        trial(100, seconds=1.0, submission="a"),
        trial(math.inf, submission="b"),
        measured("c", [10], [math.nan], submission="c"),
    ]

    figure = curves(compared(trials))

    assert [t.name for t in figure.data if t.text] == ["a: 100 seconds"]
    assert "2 runs are left out" in caption(figure)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<b>a</b>" + 50 * "x", f"&lt;b&gt;a&lt;/b&gt;{12 * 'x'}...{20 * 'x'}"),
        ("\"a\" & 'b'", "\"a\" &amp; 'b'"),  # plotly shows `&quot;` as it is written
    ],
)
def test_names_from_elsewhere_are_text_and_short(name: str, shown: str) -> None:
    figure = curves(compared([trial(100, submission=name)]))

    assert trace(figure, shown, mode="lines").name == f"{shown}: 100 steps"


POINTS = "runs at the best setting"


@cache
def one_sweep() -> Comparison:
    return compared(sweep(law(128), submission="sgd"))


def test_one_sweep_is_drawn_with_its_points_its_curve_its_bounds_and_perfect_scaling() -> None:
    figure = steps(one_sweep())

    points, curve = trace(figure, POINTS), trace(figure, "fitted curve")
    assert list(points.x) == SIZES
    assert list(points.y) == list(law(128).values())
    found = find_regimes(SIZES, list(law(128).values()))
    assert (curve.x[0], curve.x[-1]) == pytest.approx((8, 2048))
    assert list(curve.y) == pytest.approx([found.steps(x) for x in curve.x])
    line = trace(figure, "perfect scaling: half the steps")
    examples = [x * y for x, y in zip(line.x, line.y, strict=True)]
    assert examples == pytest.approx([found.min_examples.value] * 2)
    band = trace(figure, "bounds of the curve")
    half = len(band.x) // 2
    assert list(band.x[:half]) == pytest.approx(list(reversed(band.x[half:])))
    assert (band.x[0], band.x[half]) == pytest.approx((8, 2048))
    for k in (0, 30, half - 1):
        bounds = found.steps_with_bounds(band.x[k])
        assert (band.y[k], band.y[-1 - k]) == pytest.approx((bounds.low, bounds.high))
        assert band.y[k] < curve.y[k] < band.y[-1 - k]
    assert band.fillcolor == BANDS[0]
    assert "(95 %)" in caption(figure)
    fitted = with_bounds(found.steps_with_bounds(8))
    assert points.hovertext[0].endswith(f"1,700 steps<br>fitted curve: {fitted}")


def test_the_band_is_within_the_axes_and_borders_lie_below_all_points_and_names_above() -> None:
    figure = steps(one_sweep())

    axis, band = figure.layout.yaxis, trace(figure, "bounds of the curve").y
    low, high = ends(axis)
    borders = [t.y[0] for t in figure.data if (t.name or "").startswith(("perfect s", "maximal"))]
    borders = [y for y in borders if y < 100]
    assert low < min(band) < max(band) < high
    assert 50 <= min(axis.tickvals) <= 2 * min(band)
    assert len(borders) == 2
    assert low < min(borders) < max(borders) < min(axis.tickvals)
    assert max(borders) < 100 < 1700 < high


def test_a_band_is_wider_where_learning_rates_were_not_searched() -> None:
    by_rule = [
        trial(at, batch_size=size, learning_rate=0.1, submission="sgd")
        for size, at in law(128).items()
    ]

    searched, figure = steps(one_sweep()), steps(compared(by_rule))

    narrow, wide = (trace(each, "bounds of the curve").y for each in (searched, figure))
    assert wide[-1] / wide[0] > 1.5 * narrow[-1] / narrow[0]
    low, high = ends(figure.layout.yaxis)
    assert low < min(wide) < max(wide) < high
    assert "not searched" in caption(figure)
    assert "not searched" not in caption(searched)


def test_a_sweep_without_regimes_has_a_thin_line_and_no_band() -> None:
    figure = steps(compared(sweep({8: 900, 16: math.inf}, submission="sgd")))

    assert not [each for each in figure.data if each.fill == "toself"]
    assert "Band" not in caption(figure)
    assert "fewer than two batch sizes" in finding(figure)
    assert list(trace(figure, "fitted curve").x) == [8]
    assert not figure.layout.shapes


def test_regimes_of_one_sweep_are_shaded_and_their_borders_have_bounds() -> None:
    wide = law(512, sizes=WIDE)

    figure = steps(compared(sweep(wide, submission="sgd")))

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
    assert finding(figure) == f"Critical batch size: {with_bounds(found.critical_batch_size)}"


def test_batch_sizes_with_a_single_learning_rate_are_hollow_and_named() -> None:
    by_chance = [
        trial(60, batch_size=size, learning_rate=rate, submission="sgd")
        for size, rate in ((4096.0, 0.5), (8192.0, 0.1), (16384.0, 0.8))
    ]
    c = compared([*sweep(law(128), submission="sgd"), *by_chance])

    figure = steps(c)

    symbols = trace(figure, POINTS).marker.symbol
    assert list(symbols) == ["circle"] * len(law(128)) + ["circle-open"] * 3
    assert "at most one learning rate" in caption(figure)
    assert "only one is known" in caption(rates(c))
    (table,) = [t for t in tables_of(c) if t.title.startswith("Steps to")]
    shown = [line.cells[3].text for line in table.lines]
    assert shown[-2:] == ["0.1 (the only one)", "0.8 (the only one)"]


def test_batch_sizes_that_do_not_count_are_hollow_and_missed_ones_are_crosses_at_the_top() -> None:
    trials = sweep({**law(128), 2048: math.inf}, submission="sgd")
    # Without the highest learning rate, the best one of batch size 1,024 is at the edge.
    trials = [t for t in trials if not (t.batch_size == 1024 and t.learning_rate > 0.15)]

    figure = steps(compared(trials))

    assert list(trace(figure, POINTS).marker.symbol) == ["circle"] * 7 + ["circle-open"]
    missed = trace(figure, "sgd")
    assert list(missed.x) == [2048]
    assert 1700 < missed.y[0] < ends(figure.layout.yaxis)[1]
    assert missed.hovertext[0].endswith("not reached")
    assert "Hollow" in caption(figure)
    assert "Crosses" in caption(figure)


def test_every_repetition_is_a_point() -> None:
    expected = [(8, 900), (8, 910), (8, 920), (16, 500), (16, 510)]
    trials = [*seeds((900, 910, 920), batch_size=8.0), *seeds((500, 510), batch_size=16.0)]

    points = trace(steps(compared(trials)), POINTS)

    assert sorted(zip(points.x, points.y, strict=True)) == expected


def test_several_sweeps_have_colours_and_borders_of_their_own_and_no_shades() -> None:
    trials = sweep(law(64), submission="sgd") + sweep(law(256, 90), submission="adam")

    figure = steps(compared(trials))

    assert not [s for s in figure.layout.shapes if s.type == "rect"]
    for name, colour, shade in zip(("sgd", "adam"), SERIES, BANDS, strict=False):
        own = [t for t in figure.data if t.name == name]
        assert len(own) == 6
        (band,) = [t for t in own if t.fill == "toself"]
        assert band.fillcolor == shade
        assert {t.line.color or t.marker.color for t in own if t is not band} == {colour}
        assert [t.showlegend for t in own].count(True) == 1
    assert re.sub(r"[\d.]+", "N", finding(figure)) == (
        "Critical batch size: N (N to N) with sgd, N (N to N) with adam"
    )


def test_a_border_whose_end_is_not_seen_has_an_arrow() -> None:
    few = {size: at for size, at in law(4096).items() if size <= 256}

    figure = steps(compared(sweep(few, submission="sgd")))

    assert finding(figure).startswith("Critical batch size: at least")
    line = trace(figure, "maximal data parallelism from at least")
    assert line.marker.symbol[-1] == "arrow-right"
    assert line.x[-1] < ends(figure.layout.xaxis)[1]


def test_batch_sizes_have_ticks_at_each_doubling_and_close_ones_at_round_numbers() -> None:
    near = dict.fromkeys(range(100, 200, 5), 1000.0)

    axis, close = (steps(c).layout.xaxis for c in (one_sweep(), compared(sweep(near))))

    assert list(axis.ticktext) == ["8", "16", "32", "64", "128", "256", "512", "1,024", "2,048"]
    assert axis.tickangle == 0
    assert {"100", "150", "200"} < {*close.ticktext}


def test_a_bend_too_sharp_for_diminishing_returns_has_two_regimes_that_meet_at_b_crit() -> None:
    corner = find_regimes(SIZES, [max(100.0, 12_800 / size) for size in SIZES], scatter=0.01)

    spans = marks().spans_of(corner, 4, 4096)
    unseen = marks().spans_of(find_regimes([8, 16], [1000, 700]), 4, 32)

    assert [span.name for span in spans] == ["perfect scaling", "maximal data parallelism"]
    assert spans[1].left == pytest.approx(corner.critical_batch_size.value)
    assert [span.name for span in unseen] == ["not resolved"]


def test_a_short_regime_has_its_name_below_the_others() -> None:
    found = find_regimes(SIZES, list(law(128).values()))

    spans = marks().spans_of(found, found.perfect_up_to.value / 1.2, 4096)

    shown = [(span.row, span.anchor) for span in spans]
    assert shown == [(1, "left"), (0, "center"), (0, "center")]


@pytest.mark.parametrize(
    ("border", "text"),
    [
        ((20.0, 10.0, 40.0), "20.0 (10.0 to 40.0)"),
        ((20.0, 10.0, math.inf), "20.0 (at least 10.0)"),
        ((20.0, 0.0, 40.0), "20.0 (at most 40.0)"),
        ((math.inf, 10.0, math.inf), "at least 10.0"),
    ],
)
def test_borders_are_written_as_far_as_known(border: tuple[float, float, float], text: str) -> None:
    (found,) = one_sweep().sweeps

    assert marks().border_text(Bounded(*border), found.ends) == text


def test_the_best_learning_rate_lies_in_the_range_that_was_tried() -> None:
    best: Mapping[float, float] = {8: 0.1, 32: 0.2, 128: 0.4}

    figure = rates(compared(sweep({8: 900, 32: 400, 128: 200}, best, submission="sgd")))

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
    assert finding(figure) == ("The best learning rate goes with the batch size to the power 0.50")


@pytest.mark.parametrize(
    ("times", "best", "power"),
    [
        # Powers of two at -1.5, -0.5, 0.5 and 1.5: 0, 1, 0 and 2. (-0.5 + 3)/5
        ({8: 900, 16: 500, 32: 300, 64: 200}, {8: 0.1, 16: 0.2, 32: 0.1, 64: 0.4}, "0.50"),
        ({64: 900, 128: 500, 256: 300, 512: 250, 1024: 200}, None, "0.00"),  # without a sign
    ],
)
def test_the_power_is_fitted_to_all_batch_sizes(times: Any, best: Any, power: str) -> None:
    assert finding(rates(compared(sweep(times, best)))).endswith(f"power {power}")


def test_a_rule_that_gave_the_learning_rates_is_no_finding() -> None:
    """Of three searched ones beside it, the power is theirs."""
    by_rule = [
        trial(at, batch_size=size, learning_rate=0.1 * size / 8, submission="sgd")
        for size, at in {8: 900, 16: 500, 32: 300, 64: 200}.items()
    ]
    edges = [trial(999, batch_size=8.0, learning_rate=0.05, submission="sgd")]
    searched = sweep({8: 900, 32: 300}, {8: 0.1, 32: 0.2}, submission="sgd")

    none = rates(compared([*by_rule, *edges]))
    one = rates(compared([*by_rule, *edges, *searched[:3]]))
    later = rates(compared([*by_rule[:2], *by_rule[3:], *searched[3:]]))
    two = rates(compared([*by_rule[:1], *by_rule[3:], *searched]))

    for figure in (none, one):
        assert finding(figure).endswith("known at fewer than two batch sizes")
    shown = trace(one, "best learning rate")
    assert list(shown.marker.symbol) == ["circle", *3 * ["circle-open"]]
    assert "only one is known" in caption(one)
    assert "first filled point" in caption(one)
    rule = trace(later, "linear rule")
    assert rule.y[0] == pytest.approx(0.2 * rule.x[0] / 32)
    assert finding(two).endswith("power 0.50")


def test_diverged_learning_rates_are_crosses_and_best_ones_at_the_edge_are_hollow() -> None:
    trials = sweep({8: 900, 16: 500}, submission="sgd")
    trials = [t for t in trials if not (t.batch_size == 16 and t.learning_rate > 0.15)]
    where = {"submission": "sgd", "batch_size": 8.0, "learning_rate": 0.8}

    figure = rates(compared([*trials, measured("bad", [10, 20], [0.9, math.nan], **where)]))

    cross = trace(figure, "diverged or failed")
    assert (list(cross.x), list(cross.y)) == ([8], [0.8])
    assert list(trace(figure, "best learning rate").marker.symbol) == ["circle", "circle-open"]


def test_submissions_stand_beside_each_other() -> None:
    trials = sweep({8: 900, 16: 500}, submission="sgd")
    trials += sweep({8: 800, 16: 400}, {8: 0.1, 16: 0.2}, submission="adam")

    figure = rates(compared(trials))

    sgd, adam = (trace(figure, name, showlegend=None) for name in ("sgd", "adam"))
    assert sgd.x[0] < 8 < adam.x[0]
    assert adam.x[0] / sgd.x[0] == pytest.approx(1.05)
    assert finding(figure).endswith("to the power 0.00 (sgd), 1.00 (adam)")


def two_sweeps(first: Mapping[float, float], second: Mapping[float, float]) -> Comparison:
    return compared(sweep(first, submission="sgd") + sweep(second, submission="adam"))


def profiled(**times: tuple[float, ...]) -> Comparison:
    named = {name: {f"workload {k}": at for k, at in enumerate(of)} for name, of in times.items()}
    return compared(on_workloads(named, until=1000))


def test_a_profile_rises_at_the_ratios_to_the_fastest() -> None:
    figure = profile(profiled(sgd=(100, 200, 900, math.inf), adam=(200, 100, 100, 100)))

    # The ratios of sgd are 1, 2, 9 and infinite, those of adam 2, 1, 1 and 1.
    sgd, adam = trace(figure, "sgd: score 0.4167"), trace(figure, "adam: score 0.9167")
    assert (list(sgd.x), list(sgd.y)) == ([1, 1, 2, 4], [0, 25, 50, 50])
    assert (list(adam.x), list(adam.y)) == ([1, 1, 1, 1, 2, 4], [0, 25, 50, 75, 100, 100])
    assert sgd.line.shape == "hv"
    assert sgd.line.dash != adam.line.dash
    assert finding(figure) == "adam has the highest score on 4 workloads: 0.92"


def test_a_profile_of_nothing_reached_says_so() -> None:
    figure = profile(profiled(a=(math.inf,) * 2, b=(math.inf,) * 2))

    assert finding(figure).startswith("No run reached")
    assert list(trace(figure, "a: score 0.0000").y) == [0, 0]


def test_each_workload_has_its_figures_and_ids_of_its_own() -> None:
    trials = [
        each
        for workload in ("mnist", "wmt")
        for name, critical in (("sgd", 64), ("adam", 256))
        for each in sweep(law(critical, sizes=SIZES[::2]), submission=name, workload=workload)
    ]

    assert [(figure.id, figure.heading) for figure in figures_of(compared(trials))] == [
        ("profile", "All workloads together"),
        ("curves", "loss along the runs: mnist"),
        ("steps", "Steps to the goal against batch size: mnist"),
        ("learning-rates", "The best learning rate of each batch size: mnist"),
        ("curves-1", "loss along the runs: wmt"),
        ("steps-1", "Steps to the goal against batch size: wmt"),
        ("learning-rates-1", "The best learning rate of each batch size: wmt"),
    ]


OF_ONE = ["curves", "steps", "learning-rates"]


@pytest.mark.parametrize(
    ("trials", "ids"),
    [
        ([measured("a", [10], [math.nan])], []),
        (sweep({8: math.inf, 16: math.inf}), ["curves"]),
        ([trial(at, batch_size=size) for size, at in ((8, 900), (16, 500))], OF_ONE[:2]),
        ([trial(at, batch_size=at, learning_rate=at) for at in (10, 20)], OF_ONE[:2]),
        (sweep(law(128)), OF_ONE),
        (sweep(law(32), submission="a") + sweep({8: 900, 16: math.inf}, submission="b"), OF_ONE),
    ],
    ids=["no metric", "no goal", "no learning rates", "of a rule", "one sweep", "one of two"],
)
def test_nothing_to_draw_makes_no_figure(trials: list[Trial], ids: list[str]) -> None:
    assert [figure.id for figure in figures_of(compared(trials))] == ids


def test_every_colour_of_the_figures_has_one_for_dark_pages() -> None:
    bad = measured("bad", [1], [math.nan], submission="bad")
    several = compared([*rivals(dict.fromkeys("abcdefg", 100)), bad])
    both = two_sweeps(law(8, sizes=SIZES[::4]), law(64, sizes=SIZES[::4]))
    of_workloads = profiled(a=(100, 200), b=(200, 100))
    figures = [f for c in (several, one_sweep(), both, of_workloads) for f in figures_of(c)]

    used = colours_in([figure.drawing for figure in figures])

    assert used | {*BANDS, *SHADES} <= set(DARK)
    assert set(SERIES) <= used


def test_figures_can_be_written_as_json_without_nan() -> None:
    import plotly.graph_objects as go

    few = SIZES[::3]
    for figure in figures_of(
        two_sweeps(law(64, sizes=few), {**law(256, sizes=few), 999: math.inf})
    ):
        text = str(go.Figure(figure.drawing).to_json())
        assert "NaN" not in text
        assert "Infinity" not in text
