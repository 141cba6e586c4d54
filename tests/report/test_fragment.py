# SPDX-License-Identifier: Apache-2.0
import re
import sys
from dataclasses import replace
from html import unescape
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pages import Outline
from reported_runs import history

from noisescale.prediction.predict import predict
from noisescale.report.fragment import fragment_of


def words_of(fragment: str) -> str:
    """The text of a fragment, all of whose tags are closed."""
    assert Outline(fragment).open == []
    return " ".join(unescape(re.sub("<[^>]*>", " ", fragment)).split())


def test_a_notebook_shows_the_answers_the_warnings_and_the_batch_sizes() -> None:
    p = predict(history(unresolved=40), [32, 64, 128])

    text = words_of(p._repr_html_())

    assert text.startswith(p.document().headline)
    for one in p.document().answers:
        assert f"{one.label} {one.sentence}" in text
        assert all(f"{part.label} {part.sentence}" in text for part in one.parts)
    assert p.warnings
    assert all(warning in text for warning in p.warnings)
    assert "batch size steps examples time" in text
    assert re.search(r" 64 this run 2,000 128k 16\.7 minutes, timed ", text)
    assert "On the run's own 2 devices" not in text


def test_the_lead_stands_between_the_headline_and_the_summary() -> None:
    document = replace(predict(history()).document(), lead="At <64> half the steps.")

    text = words_of(fragment_of(document))

    assert text.startswith(f"{document.headline} At <64> half the steps. batch size steps")


def test_the_fragment_loads_nothing_and_escapes_names() -> None:
    fragment = predict(history(), unit="<script>x</script>")._repr_html_()

    assert "<script" not in fragment
    assert "&lt;script&gt;" in fragment
    assert not re.search(r"http|src=|url\(|color", fragment)


def in_ipython(monkeypatch: pytest.MonkeyPatch, **shell: Any) -> list[Any]:
    """Stand in for IPython, which no other test needs, and return what is displayed."""
    shown: list[Any] = []
    getipython, display = ModuleType("IPython.core.getipython"), ModuleType("IPython.display")
    vars(getipython)["get_ipython"] = lambda: SimpleNamespace(**shell)
    vars(display).update(HTML=lambda text: text, display=shown.append)
    for module in (ModuleType("IPython"), ModuleType("IPython.core"), getipython, display):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return shown


def test_jupyter_shows_the_first_figure_below_the_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = in_ipython(monkeypatch, kernel=object())
    p = predict(history(), [32, 64, 128])
    first = p.document().figures()[0]

    p._ipython_display_()

    fragment, finding, figure = shown
    assert fragment == p._repr_html_()
    assert words_of(finding) == f"{first.finding} {first.caption}"
    assert figure.to_plotly_json()["layout"]["height"] == first.height


def test_ipythons_terminal_shows_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = in_ipython(monkeypatch)

    with pytest.raises(NotImplementedError):  # IPython then goes on to the next form
        predict(history())._ipython_display_()

    assert shown == []
