# SPDX-License-Identifier: Apache-2.0
"""Least squares with other data on each rank, and decentralized momentum SGD of it, in numpy."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradients = Callable[[Array, int], Array]
"""From the weights of all ranks, a row each, and the step, to their gradients."""


def dmsgd(
    gradients: Gradients, start: Array, matrix: Array, lr: float, momentum: float, steps: int
) -> Array:
    """Its rival: each rank's momentum is of its own gradients."""
    x, m = start.copy(), np.zeros_like(start)
    for step in range(steps):
        m = momentum * m + gradients(x, step)
        x = matrix @ (x - lr * m)
    return x


def regressions(
    ranks: int, rows: int = 50, width: int = 30
) -> tuple[Gradients, Array, Array, Array]:
    """Least squares with other data on each rank: gradients, the optimum of all, A'A/n, A'b/n."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((ranks, rows, width))
    of_ranks = rng.standard_normal((ranks, width))
    b = np.einsum("rij,rj->ri", a, of_ranks) + 0.1 * rng.standard_normal((ranks, rows))
    squares, products = np.einsum("rij,rik->rjk", a, a) / rows, np.einsum("rij,ri->rj", a, b) / rows

    def gradients(x: Array, step: int) -> Array:
        return np.asarray(np.einsum("rjk,rk->rj", squares, x) - products)

    optimum = np.linalg.solve(squares.sum(0), products.sum(0))
    return gradients, optimum, squares, products


def relative_distance(x: Array, optimum: Array) -> float:
    """Mean over ranks of the squared distance to the optimum, over that of the origin."""
    return float(((x - optimum) ** 2).sum(1).mean() / (optimum**2).sum())
