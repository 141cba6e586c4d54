# SPDX-License-Identifier: Apache-2.0
"""How many steps an average has to hold for an interval of a given width."""

from __future__ import annotations


def steps_needed(squared_variation: float, relative_width: float) -> float:
    """Return n = (4·cv/width)², the steps whose noise scale has an interval of that width.

    By the delta method a ratio b of means over n steps has the interval b·(1 ± 2·cv/√n).

    Args:
        squared_variation: cv², with cv the standard deviation of S - b·Q of single steps over
            the mean of S. Take it over more steps than those that are answered from: choosing a
            window by its own interval favours those that are narrow by luck.
        relative_width: Of the interval, (high - low)/value.

    Example:
        >>> steps_needed(squared_variation=0.25, relative_width=0.5)
        16.0
    """
    return 16 * squared_variation / relative_width**2
