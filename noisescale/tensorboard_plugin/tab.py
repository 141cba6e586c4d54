# SPDX-License-Identifier: Apache-2.0
"""What the tab is to TensorBoard, with figures or without."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from noisescale.extras import how_to_install
from noisescale.tensorboard_plugin.logged_runs import LoggedRuns


class Tab(base_plugin.TBPlugin):  # type: ignore[misc] # TensorBoard has no types
    """The tab *Noise scale*. Its script is the route `/index.js`."""

    plugin_name = "noise_scale"

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._provider = context.data_provider
        self._logdir = context.logdir or ""

    def is_active(self) -> bool:
        """Return whether there is a run to show."""
        return LoggedRuns(self._provider, RequestContext(), "").has_runs()

    def data_plugin_names(self) -> tuple[str, ...]:
        """Return none: with "scalars" the tab would appear for every folder of logs."""
        return ()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name of the tab and its script."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Noise scale")


class PageWithoutFigures(Tab):
    """Replaces `NoiseScalePlugin` if plotly is not installed: one line that says how to do that."""

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return the only route: the script of the page."""
        return {"/index.js": wrappers.Request.application(_script)}


def _script(request: wrappers.Request) -> wrappers.Response:
    remedy = how_to_install("plotly", "The tab Noise scale") + ", then start TensorBoard again."
    script = f"""export function render() {{
  document.documentElement.lang = "en";
  const line = document.createElement("p");
  line.textContent = {json.dumps(remedy)};
  line.style.cssText = "margin: 2em; font: 15px system-ui, sans-serif";
  document.body.append(line);
}}
"""
    response = wrappers.Response(script, content_type="text/javascript; charset=utf-8")
    response.headers["X-Content-Type-Options"] = "nosniff"  # TensorBoard asks for it
    return response
