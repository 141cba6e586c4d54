# SPDX-License-Identifier: Apache-2.0
"""What a logger wrote about a run besides the monitor's rows: numbers by name and step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Metric(NamedTuple):
    """The values of one metric, in the order of writing."""

    steps: Array
    """The steps under which the values were logged; NaN if not known."""
    values: Array
    seconds: Array
    """Seconds since the run's first value, without the time between two files; NaN if not known."""

    @classmethod
    def of(cls, rows: list[tuple[float, float, float]]) -> Metric:
        """Return the metric of steps, values and seconds, one row for each value."""
        return cls(*np.array(rows, dtype=np.float64).reshape(-1, 3).T)
