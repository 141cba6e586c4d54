# SPDX-License-Identifier: Apache-2.0
"""How a command shows its answer: as text, JSON or a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from noisescale.extras import need
from noisescale.printable import printable_json
from noisescale.refusal import rename_arguments
from noisescale.report.answer import Answer

Details = Annotated[
    bool, typer.Option("--details", help="Also print the tables and the assumptions.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write a report with figures to this file.")
]


def check_html(html: Path | None) -> None:
    """Refuse `--html` before anything is computed if plotly is not installed."""
    if html is not None:
        need("plotly", "`--html`")


def show(
    answer: Answer, *, details: bool = True, as_json: bool = False, html: Path | None = None
) -> None:
    """Print an answer, and write its page if a file is given.

    Args:
        answer: What a function of the package returned.
        details: Whether to print the tables of details and the assumptions, too.
        as_json: Print JSON instead of text.
        html: The file of the page.
    """
    if html is not None:
        with rename_arguments({"path": "--html"}):
            answer.to_html(html)
    if as_json:
        print(printable_json(answer.to_json()))
        return
    from rich.console import Console

    from noisescale.report.text import print_document, text_of

    document = answer.document()
    if html is not None:
        document = replace(document, written=[*document.written, f"Report: {html}"])
    said = text_of(document, details=details, more="add --details")
    print_document(Console(highlight=False), said)
