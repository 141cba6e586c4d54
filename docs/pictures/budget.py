# SPDX-License-Identifier: Apache-2.0
"""Draw what `benchmarks/scheduling/fixed_budget.py` found: loss against serial steps.

python docs/pictures/budget.py [--browser PATH]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from plotly import graph_objects as go
from plotly.subplots import make_subplots

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))
sys.path.append(str(Path(__file__).parent))
from make import browser, in_both_themes

from benchmarks.lib.results import saved_rows
from benchmarks.scheduling.fixed_budget import BUDGETS, NAME, Budgeted, Runs, starts_of
from noisescale.report.colours import BLUE, NOTHING, ORANGE

COLOURS = {"auto": BLUE, "seesaw": ORANGE}
SHAPES = {"B*/8": "star", "B*/4": "triangle-left", "B*": "circle", "4 B*": "triangle-right"}
COLUMNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="/usr/bin/chromium", help="path of Chromium")
    runs = Runs(saved_rows(NAME), None, lambda: None)
    drawn = [budget for budget in BUDGETS.values() if policies_of(runs, budget)]
    columns = min(COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = make_subplots(
        rows, columns, subplot_titles=[budget.name for budget in drawn], vertical_spacing=0.2 / rows
    )
    for index, budget in enumerate(drawn):
        draw(figure, runs, budget, index // columns + 1, index % columns + 1)
    figure.update_xaxes(type="log", title="serial steps", title_standoff=4, dtick="D2")
    figure.update_yaxes(title="loss over the best, %", title_standoff=4)
    figure.update_layout(
        width=1150,
        height=300 * rows + 150,
        margin={"l": 60, "r": 20, "t": 90, "b": 50},
        legend={"orientation": "h", "y": 1 + 35 / (300 * rows), "yanchor": "bottom", "x": 0},
        paper_bgcolor=NOTHING,
        plot_bgcolor=NOTHING,
        template="none",
    )
    dark = (
        "if (matchMedia('(prefers-color-scheme: dark)').matches) {"
        "document.body.style.background = '#1e2129';"
        "Plotly.relayout(document.querySelector('.plotly-graph-div'), {'font.color': '#ddd'});}"
    )
    with tempfile.TemporaryDirectory() as folder, browser(parser.parse_args().browser) as page:
        path = Path(folder, "budget.html")
        figure.write_html(path)
        page.goto(path.as_uri())
        in_both_themes(page, ".plotly-graph-div", "budget", dark)


def policies_of(runs: Runs, budget: Budgeted) -> list[str]:
    """The policies that were tried."""
    tried = {row["policy"] for row in runs.rows if row["workload"] == budget.name}
    return [policy for policy in COLOURS if policy in tried]


def draw(figure: go.Figure, runs: Runs, budget: Budgeted, row: int, column: int) -> None:
    """Draw the front of fixed batch sizes, and the scheduled runs."""
    front = runs.front(budget)
    least = min(front.values())
    first = row == column == 1

    def over(loss: float) -> float:
        return 100 * (loss / least - 1)

    figure.add_scatter(
        x=[budget.examples / size for size in front],
        y=[over(loss) for loss in front.values()],
        text=[f"{size}" for size in front],
        mode="lines+markers+text",
        textposition="top center",
        marker={"color": "grey", "size": 5},
        line={"color": "grey"},
        name="fixed batch size",
        showlegend=first,
        row=row,
        col=column,
    )
    lowest, highest = -0.5, 4.0
    for policy in policies_of(runs, budget):
        for label, start in starts_of(runs, budget).items():
            lr = runs.best_rate(budget.name, start)
            found = runs.of(budget.name, policy, start, lr) if lr else []
            if not found:
                continue
            name = f"{policy} from {label}"
            height = over(statistics.fmean(one["loss"] or float("nan") for one in found))
            if policy == "auto":
                lowest, highest = min(lowest, height), max(highest, height)  # never cut off
            figure.add_scatter(
                x=[statistics.fmean(one["steps"] for one in found)],
                y=[height],
                mode="markers",
                marker={"color": COLOURS[policy], "size": 11, "symbol": SHAPES[label]},
                name=name,
                showlegend=name not in {trace.name for trace in figure.data},
                row=row,
                col=column,
            )
    figure.update_yaxes(range=[1.2 * lowest, 1.1 * highest], row=row, col=column)


if __name__ == "__main__":
    main()
