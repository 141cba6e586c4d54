# SPDX-License-Identifier: Apache-2.0
"""Which cases of a grid run in `make test`: the others are slow and run in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of `make test-all`."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Single values of which all but some are slow.

    Values that are not hashable may be there; an unknown quick one is an error.
    """
    cases = list(cases)
    assert all(one in cases for one in quick), f"{quick} are not all in {cases}"
    return [case if case in quick else slow(case) for case in cases]


def slow_after(count: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of several values of which all after the first ones are slow."""
    return [case if i < count else slow(*case) for i, case in enumerate(cases)]
