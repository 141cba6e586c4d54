# SPDX-License-Identifier: Apache-2.0
"""Values as JSON can hold them."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from noisescale.bounded import Bounded
from noisescale.report.numbers import value_from_bounds


def fields_of(record: object, *names: str) -> dict[str, Any]:
    """Return some attributes of a record by their names."""
    return {name: getattr(record, name) for name in names}


def finite(value: Any) -> Any:
    """Return values that JSON can hold: bands as dictionaries, None for NaN and infinities.

    Examples:
        >>> import numpy as np
        >>> finite({"steps": np.array([1.0, math.inf]), "bounds": (math.nan, 2)})
        {'steps': [1.0, None], 'bounds': [None, 2]}
    """
    if isinstance(value, Bounded):
        return finite(asdict(value_from_bounds(value)))
    if hasattr(value, "tolist"):  # of NumPy, which the help of a command does not import
        return finite(value.tolist())
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
