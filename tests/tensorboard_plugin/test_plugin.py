# SPDX-License-Identifier: Apache-2.0
"""The page's server, on TensorBoard's own reading of a folder of logs."""

import gzip
import json
import math
import tomllib
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from logged_runs import log_run
from scripts import run
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from torch.utils.tensorboard import SummaryWriter
from werkzeug.test import Client
from werkzeug.wrappers import Response

from noisescale import predict
from noisescale.history.reading import read_run
from noisescale.prediction.figures import FIGURES
from noisescale.report.colours import RUNS
from noisescale.report.records import finite
from noisescale.tensorboard_plugin.loader import NoiseScaleLoader
from noisescale.tensorboard_plugin.logged_runs import LoggedRuns, Measured
from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin


def plugin_of(logs: Path, *, files: bool = True) -> NoiseScalePlugin:
    """The plugin, on TensorBoard's machine with the files or on another."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logs)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logs))
    return NoiseScaleLoader().load(
        TBContext(data_provider=provider, logdir=str(logs) if files else "gs://a/b")
    )


def get(plugin: NoiseScalePlugin, route: str, **query: Any) -> Response:
    return Client(plugin.get_plugin_apps()[route]).get(f"{route}?{urlencode(query)}")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    log_run(folder / "one")
    log_run(folder / "gan/version_0")
    log_run(folder / "gan/version_0", optimizer=1, noise_scale=20.0)
    log_run(folder / "two monitors", monitor="wide", noise_scale=30.0)
    log_run(folder / "two monitors", monitor="wide", optimizer=1, noise_scale=40.0)
    log_run(folder / "transformers", noise_scale=50.0, before="train/")
    log_run(folder / "unresolved", resolved=False)
    log_run(folder / "with adam", optimizer_kind=3)
    with SummaryWriter(str(folder / "without")) as writer:
        writer.add_scalar("loss", 1.0, 0)
    return folder


@pytest.fixture(scope="module")
def plugin(logs: Path) -> NoiseScalePlugin:
    return plugin_of(logs)


def test_runs_with_the_monitor_are_listed_with_their_monitors_and_optimizers(
    plugin: NoiseScalePlugin,
) -> None:
    assert plugin.is_active()
    runs = json.loads(get(plugin, "/runs").data)
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


def test_a_monitor_with_a_name_alone_shows_the_tab(tmp_path: Path) -> None:
    log_run(tmp_path, monitor="wide")

    assert plugin_of(tmp_path).is_active()


def test_a_run_is_answered_with_what_the_package_predicts(
    logs: Path, plugin: NoiseScalePlugin
) -> None:
    answer = json.loads(get(plugin, "/prediction", run="one", price=2, worth=30).data)

    expected = predict(read_run(logs / "one"), price_per_device_hour=2, hour_worth=30)
    lines = {one["label"]: one["sentence"] for one in answer["answers"]}
    assert f"{expected.recommended_batch_size:.0f} on " in lines["Cheapest with waiting"]
    assert answer["headline"] == expected.document().headline
    assert answer["summary"]["headings"] == ["batch size", "steps", "examples", "time"]
    assert answer["next"] == list(expected.document().next)
    assert "192 examples (95 % interval 154 to 250)" in lines["Critical batch size"]
    assert [figure["id"] for figure in answer["figures"]] == [*FIGURES]
    assert answer["figures"][2]["finding"].startswith("Batch size ")
    assert answer["name"] == "one"
    assert "cost with waiting" in answer["tables"][0]["headings"]
    assert answer["assumptions"] == list(expected.assumptions)
    assert answer["last_step"] == 1000


def test_controls_change_the_answer(plugin: NoiseScalePlugin) -> None:
    def critical(**query: Any) -> str:
        answers = json.loads(get(plugin, "/prediction", **query).data)["answers"]
        return next(str(x["sentence"]) for x in answers if x["label"] == "Critical batch size")

    assert critical(run="one", kappa=2).startswith("384 examples")
    assert critical(run="gan/version_0", optimizer=1).startswith("20.0 examples")
    assert critical(run="two monitors", monitor="wide").startswith("30.0 examples")
    assert critical(run="two monitors", monitor="wide", optimizer=1).startswith("40.0 examples")
    assert critical(run="transformers").startswith("50.0 examples")
    assert critical(run="unresolved").startswith("at least 154 examples, not resolved")
    assert critical(run="with adam").startswith(
        "307 examples (with the theory's error 76.2 to 1,319)"
    )
    devices = json.loads(get(plugin, "/prediction", run="one", devices="1, 3").data)["tables"][1]
    assert [line["cells"][0][0] for line in devices["lines"]] == ["1", "3"]


def compare(plugin: NoiseScalePlugin, *ids: str, **query: Any) -> dict[str, Any]:
    asked = urlencode([*(("of", each) for each in ids), *query.items()])
    response = Client(plugin.get_plugin_apps()["/comparison"]).get(f"/comparison?{asked}")
    return dict(json.loads(response.data))


def test_runs_are_compared_in_one_figure_and_one_table(plugin: NoiseScalePlugin) -> None:
    answer = compare(plugin, "run=one", "run=gan%2Fversion_0&optimizer=1", across="examples")

    (figure,) = answer["figures"]
    lines = [t for t in figure["drawing"]["data"] if t.get("showlegend") is not False]
    assert [t["name"] for t in lines] == ["one", "gan/version_0, optimizer 1"]
    # A run has the colour that the list of runs has for it.
    runs = {run["id"]: run["colours"][0] for run in json.loads(get(plugin, "/runs").data)}
    assert [t["line"]["color"] for t in lines] == [
        runs["run=one"],
        runs["run=gan%2Fversion_0&optimizer=1"],
    ]
    assert figure["drawing"]["layout"]["xaxis"]["title"]["text"] == "examples processed"
    cells = [[text for text, _ in line["cells"]] for line in answer["table"]["lines"]]
    assert [row[0] for row in cells] == ["one", "gan/version_0, optimizer 1"]
    assert [row[5] for row in cells] == ["192", "20.0"]
    assert answer["warnings"] == []


def test_a_run_without_an_answer_is_named_beside_those_that_are_compared(
    plugin: NoiseScalePlugin,
) -> None:
    answer = compare(plugin, "run=gone", "run=one")

    assert [line["cells"][0][0] for line in answer["table"]["lines"]] == ["gone", "one"]
    assert answer["warnings"] == ["gone: Not found: `run` must have the noise scale, got 'gone'."]
    assert len(answer["figures"]) == 1


@pytest.mark.parametrize(
    ("ids", "query", "message"),
    [
        (["run=one"], {"price": "-2"}, "`price` must be positive and finite, got -2.0."),
        (["run=one", "run=unresolved"], {"kappa": "x"}, "`kappa` must be a number, got 'x'."),
        (["run=one"], {"across": "hours"}, "`across` must be one of step, examples, got 'hours'."),
        ([], {}, "`of` must name a run, got none. Choose one run or more."),
        (31 * ["run=one"], {}, "`of` must name at most 30 runs, got 31. Choose fewer runs."),
        (["optimizer=x"], {}, "`optimizer` must be a whole number, 0 or more, got 'x'."),
    ],
)
def test_a_bad_comparison_is_answered_with_one_line(
    plugin: NoiseScalePlugin, ids: list[str], query: dict[str, str], message: str
) -> None:
    assert compare(plugin, *ids, **query)["error"].startswith(message)


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        (
            {"price": "-2"},
            400,
            "`price` must be positive and finite, got -2.0. Leave it out if it is unknown.",
        ),
        (
            {"price": "two"},
            400,
            "`price` must be a number, got 'two'. Write, for example, 2.5.",
        ),
        (
            {"devices": "0"},
            400,
            "`devices` must be whole numbers from 1 to 1,000,000, got [0.0]. Give for instance"
            " [1, 2, 4, 8].",
        ),
        (
            {"devices": "1,,2"},
            400,
            "`devices` must be numbers with commas between them, got ''."
            " Write, for example, 1, 2, 4.",
        ),
        (
            {"optimizer": "-1"},
            400,
            "`optimizer` must be a whole number, 0 or more, got '-1'. Write, for example, 1.",
        ),
        (
            {"devices": "1 2"},
            400,
            "`devices` must be numbers with commas between them, got '1 2'."
            " Write, for example, 1, 2, 4.",
        ),
        (
            {"kappa": "1e300"},
            400,
            "`kappa` must be from 1e-06 to 1e+06, got 1e+300. Pass 1 for the uncalibrated theory.",
        ),
        (
            {"devices": ",".join(map(str, range(1, 3001)))},
            400,
            "`devices` must be at most 64 values, got more. Give fewer at once: each adds to every"
            " table and figure.",
        ),
        (
            {"price": "1", "worth": "1e300"},
            400,
            "`worth` must be from 1e-12 to 1e+12, got 1e+300. Leave it out if it is unknown, or"
            " give it in another unit.",
        ),
        (
            {"worth": "30"},
            400,
            "`worth` must come with `price`, got 30.0 and None. Give the price of a device-hour"
            " too: the two are weighed against each other.",
        ),
        (
            {"optimizer": 5000 * "1"},
            400,
            f"`optimizer` must be a whole number, 0 or more, got '{80 * '1'}...'."
            " Write, for example, 1.",
        ),
        ({"price": "2,50"}, 400, "`price` must be a number, got '2,50'. Write, for example, 2.5."),
        ({"kappa": "inf"}, 400, "`kappa` must be a number, got 'inf'. Write, for example, 2.5."),
        ({"run": "gone"}, 404, "Not found: `run` must have the noise scale, got 'gone'."),
        (
            {"optimizer": "1"},
            404,
            "Not found: `run` must have the noise scale of optimizer 1, got 'one'.",
        ),
        (
            {"monitor": "wide"},
            404,
            "Not found: `run` must have the noise scale by monitor 'wide', got 'one'.",
        ),
    ],
)
def test_bad_values_are_answered_with_one_line(
    plugin: NoiseScalePlugin, query: dict[str, str], status: int, message: str
) -> None:
    response = get(plugin, "/prediction", **{"run": "one", **query})

    assert response.status_code == status
    assert json.loads(response.data) == {"error": message}


def test_a_long_run_is_read_from_its_files_and_not_from_the_points_that_tensorboard_keeps(
    tmp_path: Path,
) -> None:
    rows = 3000
    log_run(tmp_path / "long", rows=rows)

    plugin = plugin_of(tmp_path)
    logged = LoggedRuns(plugin._provider, RequestContext(), "", plugin._logdir)

    assert len(logged.history(Measured("long"))["step"]) == rows


def test_runs_whose_files_are_elsewhere_say_where_to_predict(logs: Path) -> None:
    response = get(plugin_of(logs, files=False), "/prediction", run="one")

    assert response.status_code == 400
    assert json.loads(response.data)["error"] == (
        "`logdir` must be a folder of this machine, with the file noise_scale.jsonl of each run,"
        " got gs://a/b. TensorBoard reads what loggers wrote, which is not all of it. Run"
        " `noisescale predict` where the folder of the run is, or start TensorBoard there with"
        " `--logdir`."
    )


def test_the_page_stays_away_where_nothing_was_measured(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 1.0, 0)

    plugin = plugin_of(tmp_path)

    assert not plugin.is_active()
    assert plugin.data_plugin_names() == ()
    assert json.loads(get(plugin, "/runs").data) == []


def test_plotlys_script_is_the_installed_one_compressed(plugin: NoiseScalePlugin) -> None:
    response = get(plugin, "/plotly.js")

    assert response.headers["Content-Encoding"] == "gzip"
    assert b"plotly.js v" in gzip.decompress(response.data)[:200]
    assert len(response.data) < 2_000_000


@pytest.mark.parametrize("route", ["/index.js", "/figures.js", "/style.css", "/plotly.js"])
def test_what_a_browser_has_is_not_sent_again(plugin: NoiseScalePlugin, route: str) -> None:
    client = Client(plugin.get_plugin_apps()[route])

    first = client.get(route)
    again = client.get(route, headers={"If-None-Match": first.headers["ETag"]})

    assert first.headers["Cache-Control"] == "no-cache"
    assert (first.status_code, again.status_code, again.data) == (200, 304, b"")


def test_tensorboard_finds_the_loader_by_its_entry_point() -> None:
    (found,) = entry_points(group="tensorboard_plugins", name="noise_scale")

    assert found.load() is NoiseScaleLoader
    project = Path(__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(project.read_text())["project"]["entry-points"]["tensorboard_plugins"]
    assert declared == {"noise_scale": found.value}


def test_what_tensorboard_imports_at_its_start_is_light() -> None:
    script = (
        "import sys, noisescale.tensorboard_plugin.loader; at_start = set(sys.modules);"
        "import noisescale.tensorboard_plugin.plugin; later = set(sys.modules);"
        "print({'plotly', 'scipy', 'rich'} & at_start, {'torch', 'lightning'} & later)"
    )

    assert run("-c", script) == "set() set()\n"


def row(step: int, weight: float | None) -> dict[str, float]:
    """A row of a monitor. One that says an earlier row again has no increments."""
    logged = {"simple": 50.0, "step": step, "examples": 64 * step, "batch_size": 64}
    logged |= {"simple_high": 80.0, "lower_bound": 40.0}
    if weight is not None:
        s, q = 20.0 + 30 * math.sin(step), 0.5 + 0.2 * math.sin(2 * step)
        logged |= {
            "increment_measured_steps": 4 * (weight > 0),
            "increment_weight": weight,
            "increment_sq_weight": weight**2 / 4,
            "increment_noise_trace": weight * s,
            "increment_grad_sq_norm": weight * q,
            "increment_noise_trace_squares": weight**2 * 9,
            "increment_products": 0.0,
            "increment_grad_sq_norm_squares": weight**2 * 0.01,
        }
    return logged


def test_a_resumed_run_reads_in_the_tab_as_in_predict_and_as_one_that_was_not(
    tmp_path: Path,
) -> None:
    """It ended at step 300 (the last row measured nothing), and once more at 400, and went on."""
    first = [(k, k - 7, 64.0 * 50) for k in range(50, 301, 50)]
    ended = [(300, 300, 0.0)]
    again = [(320, 293, None), (350, 343, 64.0 * 50), (400, 393, 64.0 * 50), (400, 400, 0.0)]
    later = [(320, 293, None), (340, 336, 64.0 * 43), (390, 386, 64.0 * 50), (440, 436, 64.0 * 50)]
    never = [*first, *ended, *later[1:]]
    for name, fits in {"resumed": [first + ended, again, later], "whole": [never]}.items():
        for number, fit in enumerate(fits):
            with SummaryWriter(str(tmp_path / name), filename_suffix=f".{number}") as writer:
                for logged_at, step, weight in fit:
                    for tag, value in row(step, weight).items():
                        writer.add_scalar(f"noise_scale/{tag}", value, logged_at - 1)

    runs = plugin_of(tmp_path)
    provided = [read_run(tmp_path / x) for x in ("resumed", "whole")]
    answers = [json.loads(get(runs, "/prediction", run=x).data) for x in ("resumed", "whole")]

    assert provided[0]["step"].tolist() == [step for _, step, _ in never]
    for name in provided[1]:
        np.testing.assert_array_equal(provided[0][name], provided[1][name])
    assert answers[0]["answers"] == answers[1]["answers"]
    said = [asdict(one) for one in predict(provided[0]).document().answers]
    assert json.loads(json.dumps(finite(said))) == answers[0]["answers"]
