# SPDX-License-Identifier: Apache-2.0
"""A comparison of trials in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.comparison_answers import headline_of
from noisescale.lab.compare.comparison_tables import comparison_tables, standings_tables
from noisescale.report.text import Section, bullets, pairs, plain


def comparison_report(c: Comparison, *, details: bool = False, more: str = "") -> Group:
    """Return all parts in reading order: answers, tables, warnings.

    Args:
        c: The comparison.
        details: Whether to add the tables of batch sizes and of all runs.
        more: How to get those tables, if they are left out: "add --details".
    """
    found: list[RenderableType] = [pairs(headline_of(c))]
    found += map(Section, comparison_tables(c) if details else standings_tables(c))
    if c.warnings:
        found += bullets("Warnings", c.warnings, "! ", "bold")
    runs = sum(len(standing.outcomes) for standing in c.standings)
    if more and not details and runs > len(c.standings):
        batch_sizes = "batch sizes, and of " if c.sweeps else ""
        found.append(Text(f"\nTables of {batch_sizes}all {runs:,} runs: {more}", "dim"))
    return Group(*found)


def comparison_as_text(c: Comparison, width: int = 100, *, details: bool = True) -> str:
    """Return the comparison as plain text, `width` characters wide."""
    return plain(comparison_report(c, details=details), width)
