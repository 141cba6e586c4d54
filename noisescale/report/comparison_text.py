# SPDX-License-Identifier: Apache-2.0
"""A comparison of trials in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from noisescale.report.comparison_tables import comparison_tables, headline_of
from noisescale.report.text import Section, listed, pairs, plain
from noisescale.time_to_result.comparison import Comparison


def comparison_report(c: Comparison, *, every_trial: bool = False, more: str = "") -> Group:
    """Return all parts in reading order: answers, tables, warnings.

    Args:
        c: The comparison.
        every_trial: Whether to add a table of all runs.
        more: How to get that table, if it is left out: "add --details".
    """
    found: list[RenderableType] = [pairs(headline_of(c))]
    found += map(Section, comparison_tables(c, every_trial=every_trial))
    if c.warnings:
        found += listed("Warnings", c.warnings, "! ", "bold")
    runs = sum(len(standing.outcomes) for standing in c.standings)
    if more and not every_trial and runs > len(c.standings):
        found.append(Text(f"\nA table of all {runs:,} runs: {more}", "dim"))
    return Group(*found)


def comparison_as_text(c: Comparison, width: int = 100, *, every_trial: bool = False) -> str:
    """Return the comparison as plain text, `width` characters wide."""
    return plain(comparison_report(c, every_trial=every_trial), width)
