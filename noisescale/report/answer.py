# SPDX-License-Identifier: Apache-2.0
"""The base class of what the functions of the package return: a record that shows itself."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any

from noisescale.extras import is_installed, need
from noisescale.report.document import Document


class Answer(ABC):
    """An answer: a frozen record, with the ways to show it.

    A subclass says what it found, by `document`. What draws is imported when it is first used.
    """

    @abstractmethod
    def document(self) -> Document:
        """Return what the answer says: headline, statements, tables, figures, doubts."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return everything in builtins; None is unknown or unbounded."""

    def to_json(self) -> str:
        """Return `to_dict` as JSON by RFC 8259, without NaN and infinity.

        Under the key `answer` it also has what the document says: headline, status, and statements
        with their bounds, verdict and basis.
        """
        found = {"answer": self.document().to_dict(), **self.to_dict()}
        return json.dumps(found, indent=2, allow_nan=False, ensure_ascii=False)

    def to_text(self, width: int = 100, *, details: bool = False) -> str:
        """Return the answer as a terminal shows it, without colours.

        Args:
            width: Of the terminal, in characters, at least 40.
            details: Whether to add the tables of details and the assumptions.
        """
        from noisescale.report.text import plain, text_of

        return plain(text_of(self.document(), details=details), width)

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write a self-contained page with figures and tables, and return its path.

        Raises:
            MissingExtraError: If plotly is not installed: `pip install "noisescale[report]"`.
            OSError: If the page cannot be written.
        """
        need("plotly", f"`{type(self).__name__}.to_html`")
        from noisescale.report.page import write_page

        return write_page(self.document(), Path(path))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the answers, the doubts and the first table."""
        from noisescale.report.fragment import fragment_of

        return fragment_of(self.document())

    def _ipython_display_(self) -> None:
        """Show the same in Jupyter, and the first figure if plotly is installed.

        In IPython's terminal, where plotly would open a browser, this is as if it were not there.
        """
        from IPython.core.getipython import get_ipython
        from IPython.display import HTML, display

        from noisescale.report.fragment import finding_of

        if not hasattr(get_ipython(), "kernel"):
            raise NotImplementedError("only in Jupyter")
        display(HTML(self._repr_html_()))
        figures = self.document().figures() if is_installed("plotly") else ()
        for first in figures[:1]:
            from plotly.graph_objects import Figure

            display(HTML(finding_of(first)))
            display(Figure(first.drawing))
