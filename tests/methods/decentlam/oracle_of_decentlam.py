# SPDX-License-Identifier: Apache-2.0
"""Decentralized momentum SGD of all ranks in one process, written from the paper, in numpy."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradients = Callable[[Array, int], Array]
"""From the weights of all ranks, a row each, and the step, to their gradients."""


def ring(ranks: int) -> Array:
    """A third of each neighbour, written out; with two ranks half of the other one."""
    if ranks == 1:
        return np.ones((1, 1))
    if ranks == 2:
        return np.full((2, 2), 0.5)
    matrix = np.zeros((ranks, ranks))
    for rank in range(ranks):
        for other in (rank - 1, rank, rank + 1):
            matrix[rank, other % ranks] = 1 / 3
    return matrix


def decentlam(
    gradients: Gradients,
    start: Array,
    matrices: Sequence[Array],
    lrs: Sequence[float],
    momentum: float,
    weight_decay: float = 0.0,
) -> Array:
    """Algorithm 2 with its division by the learning rate: m = βm + g~, x = x - γm."""
    x, m = start.copy(), np.zeros_like(start)
    for step, lr in enumerate(lrs):
        gradient = gradients(x, step) + weight_decay * x
        mixed = matrices[step % len(matrices)] @ (x - lr * gradient)
        m = momentum * m + (x - mixed) / lr
        x = x - lr * m
    return x


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
