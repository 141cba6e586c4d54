# SPDX-License-Identifier: Apache-2.0
"""What the tab is to TensorBoard, with figures or without."""

from __future__ import annotations

from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin

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
