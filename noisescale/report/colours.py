# SPDX-License-Identifier: Apache-2.0
"""Colours of the figures, on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Okabe and Ito 2008: readers with any colour vision see them as different. The yellow is too
# faint on white.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)

PAGE, GREY, FAINT, GRID = "#FFFFFF", "#6B6B6B", "#444444", "#E3E3E3"
SHADES = (PAGE, "#F0F0F0", "#DCDCDC")
"""Areas that lie beside each other in the background."""
EDGE = "#9CC3DE"
"""Around a band."""
NOTHING = "rgba(0, 0, 0, 0)"


def _faint(colour: str, opacity: float) -> str:
    """Return a colour of a band around a line of another colour."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity:g})"


BANDS = tuple(map(_faint, SERIES, (0.16, 0.16, 0.16, 0.2, 0.18, 0.2)))
"""Around the lines of SERIES."""
BAND = BANDS[0]

# The palette of TensorBoard 2.21, `settings.colorPalette` of its page, in its order.
SLATE, SLATE_ON_DARK = "#425066", "#8E98A3"
RUNS = (SLATE, "#12B5CB", "#E52592", "#F9AB00", "#9334E6", "#7CB342", "#E8710A")
"""TensorBoard's colours of runs. Only slate is another colour on a dark page."""
RUN_BANDS = tuple(_faint(colour, 0.16) for colour in RUNS)
"""Around the lines of RUNS."""

_SERIES_ON_DARK = {
    BLUE: "#5CB2F0",
    VERMILLION: "#FF8A4C",
    GREEN: "#2BC79C",
    PURPLE: "#E59CC6",
    ORANGE: "#F2B534",
    SKY: "#A6DBFA",
}
_BANDS_ON_DARK = map(_faint, _SERIES_ON_DARK.values(), (0.24, 0.24, 0.24, 0.26, 0.24, 0.26))

DARK: Mapping[str, str] = MappingProxyType(
    {
        PAGE: "#202124",
        BLACK: "#E8EAED",
        GREY: "#A3A9B1",
        FAINT: "#BDC1C6",
        GRID: "#3C4043",
        SHADES[1]: "#2C2E33",
        SHADES[2]: "#3A3D44",
        EDGE: "#3F6F91",
        NOTHING: NOTHING,
        **_SERIES_ON_DARK,
        **dict(zip(BANDS, _BANDS_ON_DARK, strict=True)),
        **{colour: colour for colour in RUNS},
        **{_faint(colour, 0.16): _faint(colour, 0.24) for colour in RUNS},
        SLATE: SLATE_ON_DARK,
        RUN_BANDS[0]: _faint(SLATE_ON_DARK, 0.24),
    }
)
"""The colour on a dark page, by the colour of a figure that it replaces."""
