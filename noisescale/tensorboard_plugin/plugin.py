# SPDX-License-Identifier: Apache-2.0
"""The server behind the tab: the list of runs, and the prediction of one run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, partial
from importlib.resources import files
from typing import Any

import plotly
from tensorboard import errors, plugin_util
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from noisescale.predictor import Prediction, predict
from noisescale.renamed import renamed
from noisescale.report.figures import FIGURES, SETTINGS
from noisescale.report.records import finite
from noisescale.report.tables import headline, tables
from noisescale.tensorboard_plugin.logged_runs import LoggedRuns
from noisescale.tensorboard_plugin.query import index, number, numbers

Application = Callable[..., Any]


class NoiseScalePlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Show what other batch sizes and more devices would cost, for each run with a monitor.

    | route | answer |
    |---|---|
    | `/runs` | the names of runs, their monitors, and the optimizers that each monitor measured |
    | `/prediction?run=&monitor=&optimizer=&devices=&price=&worth=&kappa=` | answers, figures, \
    tables |
    | `/plotly.js` | the script of the installed plotly package |

    The answer to a bad value has the status 400 and is `{"error": ...}`: one line with the remedy.
    """

    plugin_name = "noise_scale"

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._provider = context.data_provider

    def get_plugin_apps(self) -> dict[str, Application]:
        """Return the routes."""
        routes: dict[str, Callable[[wrappers.Request], wrappers.Response]] = {
            "/index.js": partial(_static, "index.js", "text/javascript"),
            "/figure.js": partial(_static, "figure.js", "text/javascript"),
            "/style.css": partial(_static, "style.css", "text/css"),
            "/plotly.js": self._plotly,
            "/runs": self._runs,
            "/prediction": self._prediction,
        }
        return {path: wrappers.Request.application(answer) for path, answer in routes.items()}

    def is_active(self) -> bool:
        """Whether there is a run to show."""
        return LoggedRuns(self._provider, RequestContext(), "").any()

    def data_plugin_names(self) -> tuple[str, ...]:
        """Return none: with "scalars" the tab would appear for every folder of logs."""
        return ()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name of the tab and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Noise scale")

    @cached_property
    def _plotly_script(self) -> bytes:
        """The script, compressed once. TensorBoard would compress it at every request."""
        script = files(plotly).joinpath("package_data", "plotly.min.js").read_bytes()
        return gzip.compress(script, compresslevel=6, mtime=0)

    def _plotly(self, request: wrappers.Request) -> wrappers.Response:
        response = _response(self._plotly_script, "text/javascript")
        response.headers["Content-Encoding"] = "gzip"
        return _kept(response, request)

    def _runs(self, request: wrappers.Request) -> wrappers.Response:
        runs = self._runs_for(request).measured()
        return _answer(
            [
                {
                    "name": run,
                    "monitors": [
                        {"name": monitor, "optimizers": optimizers}
                        for monitor, optimizers in runs[run].items()
                    ],
                }
                for run in sorted(runs)
            ]
        )

    def _prediction(self, request: wrappers.Request) -> wrappers.Response:
        try:
            return _answer(_shown(self._predicted(request)))
        except errors.PublicError as error:  # unknown, or TensorBoard cannot read it
            return _answer({"error": str(error)}, status=error.http_code)
        except ValueError as error:
            return _answer({"error": str(error)}, status=400)

    def _predicted(self, request: wrappers.Request) -> Prediction:
        asked = request.args
        fields = {"price_per_device_hour": "price", "hour_worth": "worth", "history": "run"}
        with renamed(fields):
            return predict(
                self._runs_for(request).history(
                    asked.get("run", ""), index(asked, "optimizer"), asked.get("monitor", "")
                ),
                devices=numbers(asked, "devices"),
                price_per_device_hour=number(asked, "price"),
                hour_worth=number(asked, "worth"),
                calibration=number(asked, "kappa"),
            )

    def _runs_for(self, request: wrappers.Request) -> LoggedRuns:
        environ = request.environ
        experiment = plugin_util.experiment_id(environ)
        return LoggedRuns(self._provider, plugin_util.context(environ), experiment)


def _shown(prediction: Prediction) -> dict[str, Any]:
    return {
        "headline": headline(prediction),
        "figures": [
            {"id": name, "title": title, **draw(prediction).to_plotly_json()}
            for name, (title, draw) in FIGURES.items()
        ],
        "settings": dict(SETTINGS),
        "tables": [asdict(table) for table in tables(prediction)],
        "warnings": prediction.warnings,
        "assumptions": prediction.assumptions,
        "last_step": float(prediction.history["step"][-1]),
    }


def _static(name: str, kind: str, request: wrappers.Request) -> wrappers.Response:
    content = files("noisescale.tensorboard_plugin").joinpath("static", name).read_bytes()
    return _kept(_response(content, kind), request)


def _answer(content: Any, status: int = 200) -> wrappers.Response:
    # Plotly reads null as a gap.
    return _response(json.dumps(finite(content), allow_nan=False), "application/json", status)


def _response(body: str | bytes, kind: str, status: int = 200) -> wrappers.Response:
    response = wrappers.Response(body, status=status, content_type=f"{kind}; charset=utf-8")
    response.headers["X-Content-Type-Options"] = "nosniff"  # TensorBoard asks for it
    return response


def _kept(response: wrappers.Response, request: wrappers.Request) -> wrappers.Response:
    """Let the browser keep a file, and ask each time whether it changed (after an upgrade)."""
    response.headers["Cache-Control"] = "no-cache"
    response.add_etag()
    return response.make_conditional(request)
