# SPDX-License-Identifier: Apache-2.0
"""The performance profiles of submissions over several workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from noisescale.lab.compare.figures.styles import styles_of
from noisescale.lab.compare.profiles import MAX_RATIO, PerformanceProfile
from noisescale.lab.compare.statements import headline_of
from noisescale.report.drawing import DASHES, figure, shown_text, with_legend

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison


def profile_figure(c: Comparison) -> go.Figure | None:
    """Draw on which share of workloads a submission is within a ratio of the fastest.

    References:
        Dolan and Moré 2002; Dahl et al. 2023, arXiv:2306.07179, section 4.3.
    """
    if c.profile is None or c.scores is None:
        return None
    of, scores = styles_of(c), c.scores
    drawn = figure(
        shown_text(headline_of(c)),
        _caption(c, c.profile),
        {
            "title": {"text": "time over the time of the fastest"},
            "range": [1 - 0.03, MAX_RATIO],
            "tickvals": [1, 1.5, 2, 2.5, 3, 3.5, 4],
        },
        {"title": {"text": "share of workloads"}, "range": [-3, 104], "ticksuffix": " %"},
    )
    ranked = sorted(c.profile.submissions, key=lambda name: -scores[name])
    for place, submission in reversed([*enumerate(ranked)]):
        style = of[submission]
        x, y = _course(c.profile, submission)
        drawn.add_scatter(
            x=x,
            y=y,
            name=f"{style.label}: score {scores[submission]:.4f}",
            legendgroup=style.name,
            legendrank=place + 1,
            mode="lines",
            line={
                "color": style.colour,
                "width": 2.5,
                "shape": "hv",
                "dash": DASHES[c.submissions.index(submission) % len(DASHES)],
            },
            text=style.label,
            hovertemplate="%{fullData.text}<br>within %{x:.3~r} times: %{y:.3~r} %<extra></extra>",
        )
    return with_legend(drawn)


def _course(profile: PerformanceProfile, submission: str) -> tuple[list[float], list[float]]:
    """Return the corners of a profile from 1 to the largest ratio, in percent."""
    rises, shares = profile.curve(submission)
    inside = rises <= MAX_RATIO
    heights = [0.0, *(100 * shares[inside]).tolist()]
    return [1.0, *rises[inside].tolist(), MAX_RATIO], [*heights, heights[-1]]


def _caption(c: Comparison, profile: PerformanceProfile) -> str:
    clock = "time" if c.clock == "seconds" else c.clock
    return (
        f"Height at 2: the share of workloads on which a submission needs at most twice the {clock}"
        " of the fastest. The score is the mean height from 1 to 4."
    )
