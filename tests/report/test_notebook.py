# SPDX-License-Identifier: Apache-2.0
import re
from html.parser import HTMLParser

from noisescale.report.notebook import as_fragment
from reported_runs import history

from noisescale.prediction.predict import predict
from noisescale.report.document import headline


class Words(HTMLParser):
    """The text of a fragment, all of whose tags are closed."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(fragment)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)
        self.text += " "

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_the_answers_the_warnings_and_the_batch_sizes() -> None:
    p = predict(history(unresolved=40), [32, 64, 128])

    text = " ".join(Words(p._repr_html_()).text.split())

    for name, said in headline(p):
        assert f"{name.strip()} {said}" in text
    assert p.warnings
    assert all(warning in text for warning in p.warnings)
    assert "On the run's own 2 devices batch size steps" in text
    assert re.search(r" 64 this run, recommended 2,000 128,000 16\.7 16\.0–17\.6 ", text)
    assert "* extrapolated: the batch size is far from the run's" in text


def test_the_fragment_loads_nothing_and_escapes_names() -> None:
    fragment = as_fragment(predict(history(), unit="<script>x</script>"))

    assert "<script" not in fragment
    assert "&lt;script&gt;" in fragment
    assert not re.search(r"http|src=|url\(|color", fragment)


def test_in_a_line_a_prediction_says_what_it_recommends() -> None:
    said = repr(predict(history(), [64, 128], [2]))

    assert said == (
        "<Prediction: recommended batch size 64, critical batch size 100 (80.0 to 125), 2 rows>"
    )
