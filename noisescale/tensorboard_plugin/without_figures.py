# SPDX-License-Identifier: Apache-2.0
"""The tab without plotly: one line that says how to install it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from werkzeug import wrappers

from noisescale.extras import how_to_install
from noisescale.tensorboard_plugin.tab import Tab


class PageWithoutFigures(Tab):
    """Replaces `NoiseScalePlugin` if plotly is not installed."""

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
