# SPDX-License-Identifier: Apache-2.0
"""The tab's server: which runs there are, how they compare, and what one of them predicts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any
from urllib.parse import parse_qsl

from tensorboard import errors, plugin_util
from werkzeug import wrappers

from noisescale.checks import refuse
from noisescale.prediction.figures.noise_along_runs import ACROSS, noise_of_runs_figure
from noisescale.prediction.predict import predict
from noisescale.prediction.prediction import Prediction
from noisescale.prediction.runs import compare_predictions
from noisescale.refusal import rename_arguments, word_for
from noisescale.report.colours import DARK, RUNS
from noisescale.report.document import Figure
from noisescale.report.drawing import SETTINGS, place_figure
from noisescale.report.numbers import plural
from noisescale.report.page import drawing_script, plotly_gzipped
from noisescale.report.records import finite
from noisescale.tensorboard_plugin.logged_runs import LoggedRuns, Measured
from noisescale.tensorboard_plugin.query import number, numbers
from noisescale.tensorboard_plugin.tab import Tab

Application = Callable[..., Any]

MOST_RUNS = 30
"""The most runs that are compared: each is predicted anew whenever the page looks for news."""


class NoiseScalePlugin(Tab):
    """Show what other batch sizes and more devices would cost, for each run with a monitor.

    | route | answer |
    |---|---|
    | `/runs` | runs with their ids, names and colours; one for each monitor and optimizer |
    | `/comparison?of=&of=&across=` | the noise scales of several runs, and a table of them |
    | `/prediction?run=&monitor=&optimizer=` | answers, figures, tables of one run |
    | `/figures.js`, `/plotly.js` | the report's script and that of the installed plotly package |

    `of` is an id. Both may have `devices`, `price`, `kappa`, as `predict` knows them.

    The answer to a bad value has the status 400 and is `{"error": ...}`: one line with the remedy.
    """

    def get_plugin_apps(self) -> dict[str, Application]:
        """Return the routes."""
        routes: dict[str, Callable[[wrappers.Request], wrappers.Response]] = {
            "/figures.js": partial(_script, drawing_script),
            "/plotly.js": self._plotly,
            "/runs": self._runs,
            "/comparison": partial(_respond, self._comparison),
            "/prediction": partial(_respond, self._prediction),
        }
        for file in files("noisescale.tensorboard_plugin").joinpath("static").iterdir():
            kind = {"js": "text/javascript", "css": "text/css"}[file.name.rpartition(".")[2]]
            routes[f"/{file.name}"] = partial(_file, file, kind)
        return {path: wrappers.Request.application(answer) for path, answer in routes.items()}

    def _plotly(self, request: wrappers.Request) -> wrappers.Response:
        # Compressed once: TensorBoard would compress it at every request.
        response = _response(plotly_gzipped(), "text/javascript")
        response.headers["Content-Encoding"] = "gzip"
        return _revalidate(response, request)

    def _runs(self, request: wrappers.Request) -> wrappers.Response:
        runs = self._runs_for(request)
        places = runs.places()
        colours = [(light, DARK[light]) for light in RUNS]
        return _answer(
            [
                {
                    "id": measured.id,
                    "name": measured.name,
                    "colours": colours[places.get(measured.run, 0) % len(colours)],
                }
                for measured in runs.list_measured()
            ]
        )

    def _prediction(self, request: wrappers.Request) -> dict[str, Any]:
        runs, measured = self._runs_for(request), Measured.of(request.args)
        p = _predict(runs, measured, request.args)
        said = p.document()
        return _drawing_of(said.figures()) | {
            "name": measured.name,
            "headline": said.headline,
            "lead": said.lead,
            "summary": None if said.summary is None else asdict(said.summary),
            "answers": [asdict(one) for one in said.answers],
            "tables": [asdict(table) for table in said.tables],
            "warnings": [*said.doubts, *_unmeasured_optimizers(runs, measured, p)],
            "assumptions": said.assumptions,
            "next": said.next,
            "last_step": float(p.history["step"][-1]),
        }

    def _comparison(self, request: wrappers.Request) -> dict[str, Any]:
        """Compare the chosen runs. Runs of which nothing can be predicted say why."""
        ids, across = request.args.getlist("of"), request.args.get("across", ACROSS[0])
        if across not in ACROSS:
            refuse("across", f"be one of {', '.join(ACROSS)}", repr(across), "Choose one of them.")
        if not ids:
            refuse("of", "name a run", "none", "Choose one run or more.")
        if len(ids) > MOST_RUNS:
            refuse("of", f"name at most {MOST_RUNS} runs", len(ids), "Choose fewer runs.")
        runs = self._runs_for(request)
        places = runs.places()
        drawn: Counter[str] = Counter()
        found: list[tuple[str, Prediction, int]] = []
        lines: list[tuple[str, Prediction | None, str]] = []
        reasons: list[str] = []
        for measured in (Measured.of(dict(parse_qsl(text))) for text in ids):
            try:
                p = _predict(runs, measured, request.args)
            except (errors.PublicError, ValueError) as error:
                reasons.append(str(error))
                lines.append((measured.name, None, word_for(error)))
                continue
            # Of one run they have one colour, and dashes of their own.
            number = places.get(measured.run, len(places)) + drawn[measured.run] * len(RUNS)
            drawn[measured.run] += 1
            found.append((measured.name, p, number))
            lines.append((measured.name, p, ""))
        if not found and len({*reasons}) == 1:
            raise ValueError(reasons[0])
        figures = []
        if found:
            drawn = noise_of_runs_figure(found, across)
            figures.append(place_figure("noise-scales", "The noise scale along the runs", drawn))
        failed = zip((name for name, p, _ in lines if p is None), reasons, strict=True)
        return _drawing_of(figures) | {
            "table": asdict(
                compare_predictions(f"{plural(len(lines), 'run')} beside each other", lines)
            ),
            "warnings": [f"{name}: {reason}" for name, reason in failed],
        }

    def _runs_for(self, request: wrappers.Request) -> LoggedRuns:
        environ = request.environ
        experiment = plugin_util.experiment_id(environ)
        return LoggedRuns(self._provider, plugin_util.context(environ), experiment, self._logdir)


def _predict(runs: LoggedRuns, measured: Measured, asked: Mapping[str, str]) -> Prediction:
    fields = {"price_per_device_hour": "price", "calibration": "kappa"}
    with rename_arguments(fields):
        return predict(
            runs.history(measured),
            devices=numbers(asked, "devices"),
            price_per_device_hour=number(asked, "price"),
            calibration=number(asked, "kappa"),
        )


def _unmeasured_optimizers(runs: LoggedRuns, measured: Measured, p: Prediction) -> Iterator[str]:
    """Yield why further optimizers of a run were not measured: they are in no list."""
    for optimizer in sorted({*p.history.optimizers} - {measured.optimizer}):
        try:
            runs.history(measured._replace(optimizer=optimizer))
        except ValueError as reason:
            yield f"Optimizer {optimizer}: {reason}"


def _drawing_of(figures: Sequence[Figure]) -> dict[str, Any]:
    """Return what the page needs to draw figures."""
    return {
        "figures": [figure._asdict() for figure in figures],
        "settings": dict(SETTINGS),
        "dark": dict(DARK),
    }


def _respond(
    question: Callable[[wrappers.Request], dict[str, Any]], request: wrappers.Request
) -> wrappers.Response:
    try:
        return _answer(question(request))
    except errors.PublicError as error:  # unknown, or TensorBoard cannot read it
        return _answer({"error": str(error)}, status=error.http_code)
    except ValueError as error:
        return _answer({"error": str(error)}, status=400)


def _file(file: Traversable, kind: str, request: wrappers.Request) -> wrappers.Response:
    return _revalidate(_response(file.read_bytes(), kind), request)


def _script(text: Callable[[], str], request: wrappers.Request) -> wrappers.Response:
    return _revalidate(_response(text(), "text/javascript"), request)


def _answer(content: Any, status: int = 200) -> wrappers.Response:
    # Plotly reads null as a gap.
    return _response(json.dumps(finite(content), allow_nan=False), "application/json", status)


def _response(body: str | bytes, kind: str, status: int = 200) -> wrappers.Response:
    response = wrappers.Response(body, status=status, content_type=f"{kind}; charset=utf-8")
    response.headers["X-Content-Type-Options"] = "nosniff"  # TensorBoard asks for it
    return response


def _revalidate(response: wrappers.Response, request: wrappers.Request) -> wrappers.Response:
    """Let the browser keep a file, and ask each time whether it changed (after an upgrade)."""
    response.headers["Cache-Control"] = "no-cache"
    response.add_etag()
    return response.make_conditional(request)
