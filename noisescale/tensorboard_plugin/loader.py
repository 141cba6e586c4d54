# SPDX-License-Identifier: Apache-2.0
"""What TensorBoard finds by the entry point `tensorboard_plugins`.

An error while this is imported would keep the whole `tensorboard` command from starting, one in
`load` is logged and costs the page alone: hence as little as possible is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorboard.plugins import base_plugin

from noisescale.extras import is_installed

if TYPE_CHECKING:
    from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin
    from noisescale.tensorboard_plugin.without_figures import PageWithoutFigures


class NoiseScaleLoader(base_plugin.TBLoader):  # type: ignore[misc]
    """Loads the page when TensorBoard starts."""

    def load(self, context: base_plugin.TBContext) -> NoiseScalePlugin | PageWithoutFigures:
        """Return the plugin, or where plotly is missing one that says how to install it."""
        if not is_installed("plotly"):
            from noisescale.tensorboard_plugin.without_figures import PageWithoutFigures

            return PageWithoutFigures(context)
        from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin

        return NoiseScalePlugin(context)
