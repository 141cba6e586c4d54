# SPDX-License-Identifier: Apache-2.0
"""Whether the losses of a run's first passes follow the tokens in them, and the weights given."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from noisescale.batches.weights import GuessedTerms
from noisescale.guard import WarnOnce

PASSES = 32
"""The first measured backward passes of a rank that are looked at."""

_LEAST_SPREAD = 0.1
"""The relative standard deviation of the terms in a pass, below which weights change little."""

_CLEARLY = 4
"""A variance of logarithms this many times the other one decides whether losses follow terms."""

_BY_CHANCE = 1e-4


class LossTerms:
    """Compare losses with the terms in them (tokens, say), in the first measured passes.

    The numbers stay on the device until they are read with the measured steps, once in a run.

    Args:
        ranks: Ranks that train together.
    """

    def __init__(self, ranks: int) -> None:
        self._several = ranks > 1
        self._seen: list[tuple[int, bool, Tensor | None, Tensor | float]] = []
        self._widths: set[int] = set()
        """The second dimensions of batches whose terms are guessed."""
        self._over = False
        self._read: list[float] | None = None
        """The losses and terms that were on the device; None before they are read."""
        self._warn = WarnOnce()

    def look(
        self,
        loss: object,
        terms: Tensor | float | GuessedTerms | None,
        *,
        which: int,
        given: bool,
    ) -> None:
        """Keep the loss of a pass and its terms.

        Args:
            loss: The loss; anything but a scalar does not tell whether it follows the terms.
            terms: The weight, or what the batch shows.
            which: The number of the pass in its step.
            given: Whether it is a weight that was given.
        """
        self._several |= which > 0
        if self._over or len(self._seen) >= PASSES or terms is None:
            return
        if isinstance(terms, GuessedTerms):
            self._widths.add(terms.width)
            terms = terms.number()
        number = terms.detach().sum() if isinstance(terms, Tensor) else float(terms)
        scalar = None
        if isinstance(loss, Tensor) and not loss.dim():
            scalar = loss.detach().clone()  # a CUDA graph writes the next loss to the same memory
        self._seen.append((which, given, scalar, number))

    def unread(self) -> list[Tensor]:
        """Return the numbers that are on the device, once they are enough.

        Numbers that could not be read are not asked for again, as steps are read with them.
        """
        if self._over:
            self._seen = []
        if len(self._seen) < PASSES:
            return []
        self._over = True
        return [x.view(1) for one in self._seen for x in one[2:] if isinstance(x, Tensor)]

    def take(self, numbers: Sequence[Sequence[float]]) -> None:
        """Receive these numbers."""
        if self._over and self._seen:
            self._read = [number for (number,) in numbers]

    def settle(self) -> None:
        """Warn if losses do not follow weights, or if parts are sorted, once losses are read."""
        if self._read is None:
            return
        numbers, self._read = iter(self._read), None
        seen, self._seen = self._seen, []
        losses, terms = [], []
        for _, _, loss, number in seen:
            losses.append(math.nan if loss is None else next(numbers))
            terms.append(next(numbers) if isinstance(number, Tensor) else number)
        given = all(one[1] for one in seen)
        if not self._several or not all(0 < t < math.inf for t in terms):
            return
        if statistics.pstdev(terms) < _LEAST_SPREAD * statistics.mean(terms):
            return
        follow = _follow(losses, terms)
        # A guess is said if it is confirmed: images have sizes, too, and losses that do not grow.
        if self._widths and not (follow and len(self._widths) > 1):
            return
        if not given and follow is not False:
            self._warn(
                f"The parts of a step have unequal numbers of tokens, by {self._source}, and no"
                " weight is given. If the loss is one mean over the tokens of the step, the noise"
                " scale is wrong: pass `weight_fn`, or `weight` to the meter. If each part's loss"
                " is a mean of its own, all is well."
            )
        if given and follow is False:
            self._warn(
                "The losses of the parts of a step do not grow with the weights that are given, as"
                " if each part's loss were a mean of its own. Weights are for a loss that is one"
                " mean over all parts, divided by their sum. Leave the weights out, or divide the"
                " loss so; the noise scale is wrong otherwise."
            )
        if follow is not False and _sorted([which for which, *_ in seen], terms):
            self._warn(
                "The parts of each step are sorted by their number of tokens. Where the gradient"
                " depends on the length, the noise scale is then wrong. Shuffle the rows within a"
                " step."
            )

    @property
    def _source(self) -> str:
        if self._widths:
            return "the lengths of their batches, with which their losses grow"
        return "their attention masks or their labels of -100"


def _follow(losses: list[float], terms: list[float]) -> bool | None:
    """Return whether losses grow in proportion to their terms; None if that is not clear."""
    if not all(0 < loss < math.inf for loss in losses):
        return None
    plain = statistics.pvariance([math.log(loss) for loss in losses])
    each = statistics.pvariance([math.log(loss / n) for loss, n in zip(losses, terms, strict=True)])
    if plain * _CLEARLY < each:
        return False
    return True if each * _CLEARLY < plain else None


def _sorted(which: list[int], terms: list[float]) -> bool:
    """Return whether terms have one order in the passes of all steps, and hardly by chance."""
    starts = [i for i, number in enumerate(which) if number == 0]
    steps = [terms[a:b] for a, b in pairwise(starts) if b - a > 1]
    chance = math.prod(1 / math.factorial(len(step)) for step in steps)
    if not steps or chance > _BY_CHANCE:
        return False
    steps = [step for step in steps if len(set(step)) > 1]
    return all(step == sorted(step) for step in steps) or all(
        step == sorted(step, reverse=True) for step in steps
    )
