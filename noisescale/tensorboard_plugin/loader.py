# SPDX-License-Identifier: Apache-2.0
"""What TensorBoard finds by the entry point `tensorboard_plugins`.

An error while this is imported would keep the whole `tensorboard` command from starting, one in
`load` is logged and costs the page alone: hence as little as possible is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorboard.plugins import base_plugin

if TYPE_CHECKING:
    from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin


class NoiseScaleLoader(base_plugin.TBLoader):  # type: ignore[misc]
    """Loads the page when TensorBoard starts."""

    def load(self, context: base_plugin.TBContext) -> NoiseScalePlugin:
        """Return the plugin."""
        from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin

        return NoiseScalePlugin(context)
