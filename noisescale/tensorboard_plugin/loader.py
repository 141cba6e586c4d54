# SPDX-License-Identifier: Apache-2.0
"""The entry point `tensorboard_plugins`, by which TensorBoard finds the tab.

This file imports as little as possible. An error at its import would prevent the whole
`tensorboard` command from starting. An error in `load` is logged, and only the tab is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorboard.plugins import base_plugin

from noisescale.extras import is_installed

if TYPE_CHECKING:
    from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin
    from noisescale.tensorboard_plugin.tab import PageWithoutFigures


class NoiseScaleLoader(base_plugin.TBLoader):  # type: ignore[misc] # TensorBoard has no types
    """Load the tab when TensorBoard starts."""

    def load(self, context: base_plugin.TBContext) -> NoiseScalePlugin | PageWithoutFigures:
        """Return the plugin, or without plotly a page that says how to install plotly."""
        if not is_installed("plotly"):
            from noisescale.tensorboard_plugin.tab import PageWithoutFigures

            return PageWithoutFigures(context)
        from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin

        return NoiseScalePlugin(context)
