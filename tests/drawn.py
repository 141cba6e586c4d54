# SPDX-License-Identifier: Apache-2.0
"""What a figure has drawn, for tests of figures."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go


def trace(figure: "go.Figure", name: str, **style: Any) -> "go.Scatter":
    """The one trace whose name starts so, and that has this style."""
    found = [
        each
        for each in figure.data
        if (each.name or "").startswith(name)
        and all(each[key] == wanted for key, wanted in style.items())
    ]
    assert len(found) == 1, [(each.name, each.mode) for each in figure.data]
    return found[0]


def colours_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(colours_in, value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(colours_in, value))
    return (
        {value}
        if isinstance(value, str) and re.match(r"#[0-9A-Fa-f]{6}$|rgba?\(", value)
        else set()
    )
