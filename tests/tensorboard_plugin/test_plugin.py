# SPDX-License-Identifier: Apache-2.0
"""The page's server, on TensorBoard's own reading of a folder of logs."""

import gzip
import json
import tomllib
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from logged_runs import log_run, write_events
from scripts import run

from noisescale import History, predict
from noisescale.history.optimizers import OptimizerKind
from noisescale.history.reading import read_run
from noisescale.history.record import Recorder
from noisescale.report.colours import RUNS
from noisescale.report.records import finite

if TYPE_CHECKING:
    from werkzeug.wrappers import Response

    from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin


def plugin_of(logs: Path, *, files: bool = True) -> "NoiseScalePlugin":
    """The plugin, on TensorBoard's machine with the files or on another."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.base_plugin import TBContext

    from noisescale.tensorboard_plugin.loader import NoiseScaleLoader

    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logs)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logs))
    return NoiseScaleLoader().load(
        TBContext(data_provider=provider, logdir=str(logs) if files else "gs://a/b")
    )


def get(plugin: "NoiseScalePlugin", route: str, headers: Any = None, **query: Any) -> "Response":
    from werkzeug.test import Client

    asked = urlencode(query, doseq=True)
    return Client(plugin.get_plugin_apps()[route]).get(f"{route}?{asked}", headers=headers)


def got(plugin: "NoiseScalePlugin", route: str, **query: Any) -> Any:
    """What is answered in JSON."""
    return json.loads(get(plugin, route, **query).data)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    log_run(folder / "one")
    log_run(folder / "gan/version_0", rows=20)
    log_run(folder / "gan/version_0", optimizer=1, noise_scale=20.0, rows=20)
    log_run(folder / "two monitors", monitor="wide", noise_scale=30.0, rows=20)
    log_run(folder / "two monitors", monitor="wide", optimizer=1, noise_scale=40.0, rows=20)
    log_run(folder / "transformers", noise_scale=50.0, before="train/", rows=20)
    log_run(folder / "unresolved", resolved=False, rows=20)
    log_run(folder / "with adam", optimizer_kind=OptimizerKind.ADAM, rows=20)
    write_events(folder / "without", [(0, {"loss": 1.0})])
    return folder


@pytest.fixture(scope="module")
def plugin(logs: Path) -> "NoiseScalePlugin":
    return plugin_of(logs)


def test_runs_with_the_monitor_are_listed_with_their_monitors_and_optimizers(
    plugin: "NoiseScalePlugin",
) -> None:
    assert plugin.is_active()
    runs = got(plugin, "/runs")
    assert [(run["id"], run["name"]) for run in runs] == [
        ("run=gan%2Fversion_0", "gan/version_0"),
        ("run=gan%2Fversion_0&optimizer=1", "gan/version_0, optimizer 1"),
        ("run=one", "one"),
        ("run=transformers", "transformers"),
        ("run=two+monitors&monitor=wide", "two monitors, wide"),
        ("run=two+monitors&monitor=wide&optimizer=1", "two monitors, wide, optimizer 1"),
        ("run=unresolved", "unresolved"),
        ("run=with+adam", "with adam"),
    ]
    # TensorBoard gives colours in the order of the runs' first events.
    colours = dict.fromkeys((run["name"].partition(",")[0], run["colours"][0]) for run in runs)
    begun = "one", "gan/version_0", "two monitors", "transformers", "unresolved", "with adam"
    assert {*colours} == {*zip(begun, RUNS, strict=False)}


def test_a_run_is_answered_with_what_the_package_predicts(
    logs: Path, plugin: "NoiseScalePlugin"
) -> None:
    answer = got(plugin, "/prediction", run="one", price=2)

    expected = predict(read_run(logs / "one"), price_per_device_hour=2)
    document = expected.document()
    assert (answer["headline"], answer["lead"]) == (document.headline, document.lead)
    assert answer["summary"]["headings"] == ["batch size", "steps", "examples", "time"]
    assert answer["next"] == list(document.next)
    assert answer["answers"] == json.loads(json.dumps(finite(list(map(asdict, document.answers)))))
    assert [figure["id"] for figure in answer["figures"]] == [x.id for x in document.figures()]
    assert answer["figures"][2]["finding"].startswith("Batch size ")
    assert "cost" in answer["tables"][0]["headings"]
    assert answer["assumptions"] == list(expected.assumptions)
    assert (answer["name"], answer["last_step"]) == ("one", 1000)
    table = got(plugin, "/prediction", run="one", devices="1, 3")["tables"][1]
    assert [line["cells"][0][0] for line in table["lines"]] == ["1", "3"]


@pytest.mark.parametrize(
    ("query", "bounds"),
    [
        ({"run": "one", "kappa": 2}, (384, None)),
        ({"run": "gan/version_0", "optimizer": 1}, (20, None)),
        ({"run": "two monitors", "monitor": "wide"}, (30, None)),
        ({"run": "two monitors", "monitor": "wide", "optimizer": 1}, (40, None)),
        ({"run": "transformers"}, (50, None)),
        ({"run": "unresolved"}, (None, 153.6)),
        ({"run": "with adam"}, (307.2, 76.2)),  # with the error of the theory
    ],
)
def test_each_measured_noise_scale_and_the_form_have_their_answer(
    plugin: "NoiseScalePlugin", query: dict[str, Any], bounds: tuple[float, float]
) -> None:
    answers = {one["label"]: one for one in got(plugin, "/prediction", **query)["answers"]}

    found = answers["Critical batch size"]["bounds"]
    value, low = bounds
    assert found["value"] == (value and pytest.approx(value))
    assert low is None or found["low"] == pytest.approx(low, rel=1e-3)


def test_runs_are_compared_in_one_figure_and_one_table(plugin: "NoiseScalePlugin") -> None:
    ids = ["run=one", "run=gan%2Fversion_0&optimizer=1"]

    answer = got(plugin, "/comparison", of=ids, across="examples")

    (figure,) = answer["figures"]
    lines = [t for t in figure["drawing"]["data"] if t.get("showlegend") is not False]
    assert [t["name"] for t in lines] == ["one", "gan/version_0, optimizer 1"]
    # A run has the colour that the list of runs has for it.
    runs = {run["id"]: run["colours"][0] for run in got(plugin, "/runs")}
    assert [t["line"]["color"] for t in lines] == [runs[each] for each in ids]
    assert figure["drawing"]["layout"]["xaxis"]["title"]["text"] == "examples processed"
    cells = [[text for text, _ in line["cells"]] for line in answer["table"]["lines"]]
    assert [row[5] for row in cells] == ["192", "20.0"]
    assert answer["warnings"] == []
    # One without an answer is named beside those that are compared.
    answer = got(plugin, "/comparison", of=["run=gone", "run=one"])
    assert [line["cells"][0][0] for line in answer["table"]["lines"]] == ["gone", "one"]
    assert [text[:15] for text in answer["warnings"]] == ["gone: Not found"]
    assert len(answer["figures"]) == 1


@pytest.mark.parametrize(
    ("query", "status", "argument", "value"),
    [
        ({"of": "run=one", "price": "-2"}, 400, "price", "-2.0"),
        ({"of": ["run=one", "run=unresolved"], "kappa": "x"}, 400, "kappa", "'x'"),
        ({"of": "run=one", "across": "hours"}, 400, "across", "'hours'"),
        ({}, 400, "of", "none"),
        ({"of": 31 * ["run=one"]}, 400, "of", "31"),
        ({"of": "optimizer=x"}, 400, "optimizer", "'x'"),
        ({"run": "one", "price": "-2"}, 400, "price", "-2.0"),
        ({"run": "one", "kappa": "inf"}, 400, "kappa", "'inf'"),
        ({"run": "one", "devices": "0"}, 400, "devices", "[0.0]"),
        ({"run": "one", "devices": "1,,2"}, 400, "devices", "''"),
        ({"run": "one", "devices": ",".join(map(str, range(1, 66)))}, 400, "devices", "more"),
        ({"run": "one", "optimizer": 5000 * "1"}, 400, "optimizer", f"'{80 * '1'}...'"),
        ({"run": "gone"}, 404, "run", "'gone'"),
        ({"run": "one", "optimizer": "1"}, 404, "run", "'one'"),
        ({"run": 5000 * "x"}, 404, "run", f"'{80 * 'x'}...'"),  # no file can have this name
    ],
)
def test_bad_values_are_answered_with_one_line(
    plugin: "NoiseScalePlugin", query: dict[str, Any], status: int, argument: str, value: str
) -> None:
    response = get(plugin, "/prediction" if "run" in query else "/comparison", **query)

    said = json.loads(response.data)["error"].removeprefix("Not found: ")
    assert response.status_code == status
    assert said.startswith(f"`{argument}` must")
    assert f", got {value}." in said


def test_only_runs_within_the_log_folder_are_read(tmp_path: Path) -> None:
    log_run(tmp_path / "outside", rows=20)
    log_run(tmp_path / "logs/one", rows=20)
    (tmp_path / "logs/link").symlink_to(tmp_path / "outside")
    plugin = plugin_of(tmp_path / "logs")
    outside = ["../outside", "one/../../outside", str(tmp_path / "outside")]

    found = {
        run: get(plugin, "/prediction", run=run).status_code for run in ["one", "link", *outside]
    }

    assert found == {"one": 200, "link": 200} | dict.fromkeys(outside, 404)


def test_a_long_run_is_read_from_its_files_and_not_from_the_points_that_tensorboard_keeps(
    tmp_path: Path,
) -> None:
    from tensorboard.context import RequestContext

    from noisescale.tensorboard_plugin.logged_runs import LoggedRuns, Measured

    log_run(tmp_path / "long", rows=600)

    plugin = plugin_of(tmp_path)
    logged = LoggedRuns(plugin._provider, RequestContext(), "", plugin._logdir)

    kept = plugin._provider._multiplexer.Tensors("long", "noise_scale/batch_size")
    assert len(kept) < 600
    assert len(logged.history(Measured("long"))["step"]) == 600


def test_runs_whose_files_are_elsewhere_say_where_to_predict(tmp_path: Path) -> None:
    log_run(tmp_path / "one", rows=5)

    response = get(plugin_of(tmp_path, files=False), "/prediction", run="one")

    assert response.status_code == 400
    said = json.loads(response.data)["error"]
    assert said.startswith("`logdir` must")
    assert "got gs://a/b" in said


def test_the_page_stays_away_where_nothing_was_measured(tmp_path: Path) -> None:
    write_events(tmp_path / "without", [(0, {"loss": 1.0})])
    log_run(tmp_path / "named", monitor="wide")

    plugin = plugin_of(tmp_path / "without")

    assert plugin_of(tmp_path / "named").is_active()
    assert not plugin.is_active()
    assert plugin.data_plugin_names() == ()
    assert got(plugin, "/runs") == []


def test_a_run_of_which_nothing_could_be_measured_is_listed_and_says_why(tmp_path: Path) -> None:
    write_events(tmp_path / "refused", [(0, {"loss": 1.0})])
    history = History()
    history.why_nothing = "One process trains. Accumulate."
    Recorder(tmp_path / "refused").note(history)

    plugin = plugin_of(tmp_path)

    assert [run["id"] for run in got(plugin, "/runs")] == ["run=refused"]
    response = get(plugin, "/prediction", run="refused")
    assert response.status_code == 400
    assert "One process trains. Accumulate." in json.loads(response.data)["error"]


def test_an_optimizer_that_was_refused_is_named_beside_the_other(tmp_path: Path) -> None:
    log_run(tmp_path / "gan", rows=20)
    history = History()
    history.prefix, history.why_nothing = "noise_scale/optimizer_1/", "It is BFGS. Use another."
    Recorder(tmp_path / "gan").note(history)

    answer = got(plugin_of(tmp_path), "/prediction", run="gan")

    assert answer["warnings"][-1].startswith("Optimizer 1: ")
    assert answer["warnings"][-1].endswith("It is BFGS. Use another.")


def test_what_a_browser_has_is_not_sent_again_and_plotlys_script_is_compressed(
    plugin: "NoiseScalePlugin",
) -> None:
    for route in ("/index.js", "/figures.js", "/style.css", "/plotly.js"):
        first = get(plugin, route)
        again = get(plugin, route, headers={"If-None-Match": first.headers["ETag"]})
        assert first.headers["Cache-Control"] == "no-cache"
        assert (first.status_code, again.status_code, again.data) == (200, 304, b"")
    assert first.headers["Content-Encoding"] == "gzip"
    assert b"plotly.js v" in gzip.decompress(first.data)[:200]


def test_tensorboard_finds_the_loader_by_its_entry_point() -> None:
    from noisescale.tensorboard_plugin.loader import NoiseScaleLoader

    (found,) = entry_points(group="tensorboard_plugins", name="noise_scale")

    assert found.load() is NoiseScaleLoader
    project = Path(__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(project.read_text())["project"]["entry-points"]["tensorboard_plugins"]
    assert declared == {"noise_scale": found.value}


def test_what_tensorboard_imports_at_its_start_is_light() -> None:
    script = (
        "import sys, noisescale.tensorboard_plugin.loader; at_start = set(sys.modules);"
        "import noisescale.tensorboard_plugin.tab; without = set(sys.modules);"
        "import noisescale.tensorboard_plugin.plugin; later = set(sys.modules);"
        "print({'plotly', 'scipy', 'rich'} & at_start, {'plotly'} & without,"
        " {'torch', 'lightning'} & later)"
    )

    assert run("-c", script) == "set() set() set()\n"
