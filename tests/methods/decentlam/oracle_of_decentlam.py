# SPDX-License-Identifier: Apache-2.0
"""Decentralized momentum SGD of all ranks in one process, written from the paper, in numpy."""

from collections.abc import Sequence

import numpy as np

from benchmarks.lib.regressions import Array, Gradients


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
