# SPDX-License-Identifier: Apache-2.0
"""Arguments that cannot be, refused by name, value and remedy."""

import math
import re

import pytest

from noisescale.checks import require_bounds, require_count


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ((0, None), ValueError, "`min_batch_size` must be positive and finite, got 0."),
        ((None, math.inf), ValueError, "`max_batch_size` must be positive and finite, got inf."),
        ((None, math.nan), ValueError, "`max_batch_size` must be positive and finite, got nan."),
        (("8", None), TypeError, "`min_batch_size` must be a number of examples or None, got '8'."),
        ((64, 32), ValueError, "`min_batch_size` must not exceed `max_batch_size`, got 64 > 32."),
    ],
)
def test_wrong_bounds_are_named(
    bounds: tuple[object, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        require_bounds(*bounds)  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_wrong_counts_are_named(value: object) -> None:
    with pytest.raises(
        ValueError, match=r"^`n` must be a positive whole number, got .* Why not\.$"
    ):
        require_count("n", value, "Why not.")
