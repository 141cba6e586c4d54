# SPDX-License-Identifier: Apache-2.0
"""The page's server: which runs there are, and what one of them predicts."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from functools import cached_property
from importlib.resources import files
from typing import Any

import numpy as np
import plotly
from tensorboard import context as tb_context
from tensorboard import errors, plugin_util
from tensorboard.data.provider import RunTagFilter
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from noisescale.history import COLUMNS, History
from noisescale.logged_tags import HOSTS, prefix_of
from noisescale.prediction import Prediction, predict
from noisescale.report.figures import FIGURES, SETTINGS
from noisescale.report.tables import headline, tables
from noisescale.runs import history_from_scalars
from noisescale.tensorboard_plugin.query import index, number, numbers
from noisescale.tensorboard_plugin.sampled import on_common_steps

MOST_POINTS = 1000
"""Of each tag. TensorBoard keeps as many at random itself, the last one always."""

MOST_OPTIMIZERS = 8
"""So many optimizers of a run are looked for."""

TAGS = ("simple", "simple_high", "lower_bound", *COLUMNS)
"""What is read; columns that are logged under another name are just not found."""

Application = Callable[..., Any]


class NoiseScalePlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """What other batch sizes and more devices would cost, for each run with the monitor in it.

    | route | answers |
    |---|---|
    | `/runs` | names of runs and the optimizers measured in them |
    | `/prediction?run=&optimizer=&devices=&price=&worth=&kappa=` | answers, figures, tables |
    | `/plotly.js` | the script of the installed plotly package |

    A bad value is answered by status 400 and `{"error": ...}`, one line with the remedy.
    """

    plugin_name = "noise_scale"

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._provider = context.data_provider

    def get_plugin_apps(self) -> dict[str, Application]:
        """Return the routes."""
        return {
            "/index.js": self._static("index.js", "text/javascript"),
            "/style.css": self._static("style.css", "text/css"),
            "/plotly.js": self._plotly,
            "/runs": self._runs,
            "/prediction": self._prediction,
        }

    def is_active(self) -> bool:
        """Whether any run has something to show."""
        return bool(self._optimizers_of_runs(tb_context.RequestContext(), ""))

    def data_plugin_names(self) -> tuple[str, ...]:
        """Return none: with "scalars" the page would show for every folder of logs."""
        return ()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name of the tab and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Noise scale")

    def _static(self, name: str, kind: str) -> Application:
        @wrappers.Request.application
        def serve(_: wrappers.Request) -> wrappers.Response:
            content = files("noisescale.tensorboard_plugin").joinpath("static", name).read_bytes()
            return _response(content, kind)

        return serve

    @cached_property
    def _plotly_script(self) -> bytes:
        """Compressed once: TensorBoard's own way would do it at every request."""
        script = files(plotly).joinpath("package_data", "plotly.min.js").read_bytes()
        return gzip.compress(script, compresslevel=6)

    @property
    def _plotly(self) -> Application:
        @wrappers.Request.application
        def serve(_: wrappers.Request) -> wrappers.Response:
            response = _response(self._plotly_script, "text/javascript")
            response.headers["Content-Encoding"] = "gzip"
            response.headers["Cache-Control"] = "max-age=86400"
            return response

        return serve

    @property
    def _runs(self) -> Application:
        @wrappers.Request.application
        def serve(request: wrappers.Request) -> wrappers.Response:
            runs = self._optimizers_of_runs(*_asked(request))
            return _answer([{"name": name, "optimizers": runs[name]} for name in sorted(runs)])

        return serve

    @property
    def _prediction(self) -> Application:
        @wrappers.Request.application
        def serve(request: wrappers.Request) -> wrappers.Response:
            try:
                return _answer(_shown(self._predicted(request)))
            except errors.PublicError as error:  # unknown, or TensorBoard cannot read it
                return _answer({"error": str(error)}, status=error.http_code)
            except ValueError as error:
                return _answer({"error": str(error)}, status=400)

        return serve

    def _optimizers_of_runs(
        self, ctx: tb_context.RequestContext, experiment: str
    ) -> dict[str, list[int]]:
        wanted = {
            f"{host}{prefix_of(number)}step": number
            for number in range(MOST_OPTIMIZERS)
            for host in HOSTS
        }
        found = self._provider.list_scalars(
            ctx,
            experiment_id=experiment,
            plugin_name="scalars",
            run_tag_filter=RunTagFilter(tags=list(wanted)),
        )
        return {run: sorted(wanted[tag] for tag in tags) for run, tags in found.items() if tags}

    def _predicted(self, request: wrappers.Request) -> Prediction:
        run, optimizer = request.args.get("run", ""), index(request.args, "optimizer")
        return predict(
            self._history(request, run, optimizer),
            devices=numbers(request.args, "devices"),
            price_per_device_hour=number(request.args, "price"),
            hour_worth=number(request.args, "worth"),
            calibration=number(request.args, "kappa"),
        )

    def _history(self, request: wrappers.Request, run: str, optimizer: int) -> History:
        ctx, experiment = _asked(request)
        prefixes = [host + prefix_of(optimizer) for host in HOSTS]
        read = self._provider.read_scalars(
            ctx,
            experiment_id=experiment,
            plugin_name="scalars",
            downsample=MOST_POINTS,
            run_tag_filter=RunTagFilter(
                runs=[run], tags=[p + tag for p in prefixes for tag in TAGS]
            ),
        ).get(run, {})
        base = next((f"{p}step" for p in prefixes if f"{p}step" in read), None)
        if base is None:
            raise errors.NotFoundError(f"`run` must have the noise scale, got {run!r}.")
        scalars = {
            tag: (np.array([p.step for p in points], float), np.array([p.value for p in points]))
            for tag, points in read.items()
        }
        together = on_common_steps(scalars, base)
        return history_from_scalars(together, optimizer=optimizer, source=run)


def _asked(request: wrappers.Request) -> tuple[tb_context.RequestContext, str]:
    return plugin_util.context(request.environ), plugin_util.experiment_id(request.environ)


def _shown(prediction: Prediction) -> dict[str, Any]:
    return {
        "headline": headline(prediction),
        "figures": [
            {"id": name, "title": title, **draw(prediction).to_plotly_json()}
            for name, (title, draw) in FIGURES.items()
        ],
        "settings": dict(SETTINGS),
        "tables": [
            {
                "title": table.title,
                "headings": table.headings,
                "lines": [{"cells": line.cells, "marks": line.marks} for line in table.lines],
                "notes": table.notes,
            }
            for table in tables(prediction)
        ],
        "warnings": prediction.warnings,
        "assumptions": prediction.assumptions,
        "last_step": float(prediction.history["step"][-1]),
    }


def _answer(content: Any, status: int = 200) -> wrappers.Response:
    return _response(json.dumps(_finite(content), allow_nan=False), "application/json", status)


def _response(body: str | bytes, kind: str, status: int = 200) -> wrappers.Response:
    response = wrappers.Response(body, status=status, content_type=f"{kind}; charset=utf-8")
    response.headers["X-Content-Type-Options"] = "nosniff"  # TensorBoard asks for it
    return response


def _finite(value: Any) -> Any:
    """Plotly reads null as a gap; JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
