# SPDX-License-Identifier: Apache-2.0
"""A training that is refused, and the same with the remedy that the refusal names."""

from collections.abc import Callable
from typing import Any, NamedTuple

from refused import refused

from noisescale import predict


class Found(NamedTuple):
    """What became of a training."""

    told: list[str]
    """What was warned of."""
    measured: int
    """Measured steps."""
    run: Any
    """What `predict` takes."""


class Case(NamedTuple):
    """A refusal."""

    says: str
    """A part of the warning, with the remedy."""
    refused: Callable[[], Found]
    remedied: Callable[[], Found]


def check(case: Case, least: int) -> None:
    """Check that one warning has the remedy, `predict` too, and that it helps."""
    before, after = case.refused(), case.remedied()

    assert before.measured == 0
    (message,) = [one for one in before.told if "measure" in one]
    assert case.says in message
    with refused("run", got="none, as no step was measured", remedy=case.says):
        predict(before.run)
    assert after.measured >= least, after.told
