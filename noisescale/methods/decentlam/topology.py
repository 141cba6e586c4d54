# SPDX-License-Identifier: Apache-2.0
"""Who averages with whom: mixing matrices W, in which rank i gives rank j's weights the share w_ij.

All are doubly stochastic: rows and columns of numbers that are not negative sum to 1. So mixing
leaves the mean over ranks where it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from noisescale.checks import refuse, require_choice
from noisescale.refusal import TypeRefusal

Matrix: TypeAlias = npt.NDArray[np.float64]

NAMES = ("exponential", "one-peer", "ring")
TOLERANCE = 1e-6
"""How far sums of a row may be from 1: a matrix of float32 rounds."""


@dataclass(frozen=True)
class Topology:
    """The mixing matrices of the steps 0, 1, ..., which then repeat."""

    name: str
    matrices: tuple[Matrix, ...]
    without_momentum: tuple[Matrix, ...]
    """The same where no parameter has momentum."""

    def __str__(self) -> str:
        if self.name != "matrix":
            return f'"{self.name}"'
        rows = "; ".join(" ".join(f"{x:.6g}" for x in row) for row in self.matrices[0])
        digest = hashlib.blake2b(self.matrices[0].tobytes(), digest_size=4).hexdigest()
        return f"[{rows}]" if len(rows) < 100 else f"matrix {digest}"

    def matrix(self, step: int, *, momentum: bool = True) -> Matrix:
        """Return W of a step."""
        some = self.matrices if momentum else self.without_momentum
        return some[step % len(some)]

    def largest_momentum(self) -> float:
        """Return the momentum below which ranks come together, 1 for each symmetric matrix.

        Where ranks differ, an eigenvalue w of W makes z² - (β + w)z + β = 0 of a step: |z| < 1 for
        both roots if β + w is in the ellipse with the half-axes 1 + β and 1 - β. Eigenvalues of a
        symmetric matrix are real, and in it for all β < 1.
        """
        found = 1.0
        for matrix in self.matrices:
            if not np.allclose(matrix, matrix.T, atol=TOLERANCE):
                found = min(found, _largest_momentum(_other_eigenvalues(matrix)))
        return found


def topology_of(topology: Any, ranks: int) -> Topology:
    """Return the mixing matrices for a number of ranks.

    Args:
        topology: A name, or W itself: see `DecentLaM`.
        ranks: In the group.

    Raises:
        ValueError: If the name is unknown, or the matrix has not a row and a column for each rank,
            is not doubly stochastic, or does not connect all ranks.
        TypeError: If it is neither a name nor a matrix.
    """
    if not isinstance(topology, str):
        matrix = require_mixing(topology, ranks)
        return Topology("matrix", (matrix,), (matrix,))
    remedy = "Or pass a doubly stochastic matrix, such as `metropolis_weights(adjacency)`."
    require_choice("topology", topology, NAMES, remedy)
    hops = [1 << k for k in range((ranks - 1).bit_length())]
    if topology == "one-peer":
        share = 0.5 / max(len(hops) - 1, 1)
        with_momentum = tuple(_pairs(ranks, hop, share) for hop in hops)
        return Topology(topology, with_momentum, tuple(_pairs(ranks, hop, 0.5) for hop in hops))
    linked = np.zeros((ranks, ranks))
    for hop in hops[:1] if topology == "ring" else hops:
        for rank in range(ranks):
            linked[rank, (rank + hop) % ranks] = linked[(rank + hop) % ranks, rank] = 1
    matrix = metropolis_weights(linked)
    return Topology(topology, (matrix,), (matrix,))


def metropolis_weights(adjacency: Any) -> Matrix:
    """Make mixing weights for any graph: w_ij = 1/(1 + the larger degree of both) for linked ranks.

    What is left of a row stays with the rank itself. The matrix is symmetric, so its columns sum to
    1 as well. It needs no more than what neighbours know of each other.

    Args:
        adjacency: A symmetric matrix with an entry for each pair of ranks, 0 or False if they are
            not linked. Any other number is a link. The diagonal does not count.

    Returns:
        The matrix of float64, for `DecentLaM(optimizer, topology=...)`.

    Raises:
        ValueError: If `adjacency` is not square or not symmetric.
        TypeError: If it is no matrix of numbers.

    Examples:
        >>> metropolis_weights([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).round(2)
        array([[0.67, 0.33, 0.  ],
               [0.33, 0.33, 0.33],
               [0.  , 0.33, 0.67]])

    References:
        Xiao, Boyd, Lall 2005, "A scheme for robust distributed sensor fusion", equation 15.
    """
    linked = _square("adjacency", adjacency, "Pass a row and a column for each rank.") != 0
    if not np.array_equal(linked, linked.T):
        i, j = np.argwhere(linked != linked.T)[0]
        got = f"a link from rank {i} to rank {j} alone"
        refuse("adjacency", "be symmetric", got, "Pass `adjacency + adjacency.T`.")
    np.fill_diagonal(linked, False)
    degrees = linked.sum(1)
    weights = np.where(linked, 1 / (1 + np.maximum(degrees[:, None], degrees[None])), 0.0)
    np.fill_diagonal(weights, 1 - weights.sum(1))
    return weights


def require_mixing(matrix: Any, ranks: int) -> Matrix:
    """Return W in float64, or raise an error that says what is wrong with it."""
    remedy = "Pass `metropolis_weights(adjacency)` of the graph that you want."
    mixing = _square("topology", matrix, remedy)
    if not (np.isfinite(mixing).all() and (mixing >= 0).all()):
        i, j = np.argwhere(~(mixing >= 0) | ~np.isfinite(mixing))[0]
        got = f"{mixing[i, j]:g} in row {i}, column {j}"
        refuse("topology", "be doubly stochastic: no entry below 0", got, remedy)
    for name, sums in (("row", mixing.sum(1)), ("column", mixing.sum(0))):
        wrong = np.argmax(abs(sums - 1))
        if abs(sums[wrong] - 1) > TOLERANCE:
            got = f"{sums[wrong]:g} in {name} {wrong}"
            refuse("topology", f"be doubly stochastic: each {name} sums to 1", got, remedy)
    if len(mixing) != ranks:
        needed = f"have a row and a column for each of the {ranks} ranks of the group"
        refuse("topology", needed, f"{len(mixing)} x {len(mixing)}", remedy)
    reached = np.linalg.matrix_power(mixing + np.eye(ranks) > 0, max(ranks - 1, 1))
    if not reached.all():
        i, j = np.argwhere(~reached)[0]
        remedy = "Link them, or the groups of ranks train apart."
        refuse("topology", "connect all ranks", f"no way from rank {j} to rank {i}", remedy)
    if ranks > 1 and abs(_other_eigenvalues(mixing)).max() > 1 - TOLERANCE:
        remedy = "Pass (W + I)/2, in which each rank keeps a share of its own weights."
        got = "one that hands them round, with an eigenvalue of modulus 1"
        refuse("topology", "bring the weights of ranks together", got, remedy)
    return mixing


def _square(name: str, matrix: Any, remedy: str) -> Matrix:
    try:
        found = np.array(matrix.tolist() if hasattr(matrix, "tolist") else matrix, np.float64)
    except (TypeError, ValueError):
        needed = "be a matrix of numbers"
        if name == "topology":
            needed += f" or one of {', '.join(NAMES)}"
        refuse(name, needed, f"{type(matrix).__name__} {matrix!r:.60}", remedy, error=TypeRefusal)
    if found.ndim != 2 or found.shape[0] != found.shape[1] or not len(found):
        refuse(name, "be a square matrix", f"shape {found.shape}", remedy)
    return found


def _pairs(ranks: int, hop: int, share: float) -> Matrix:
    """Let rank i and rank i XOR `hop` give each other a share. One without a partner sits out."""
    matrix = np.eye(ranks)
    for rank in range(ranks):
        if (peer := rank ^ hop) < ranks:
            matrix[rank, rank], matrix[rank, peer] = 1 - share, share
    return matrix


def _other_eigenvalues(matrix: Matrix) -> npt.NDArray[np.complex128]:
    """Return all eigenvalues but the 1 of the mean."""
    return np.linalg.eigvals(matrix - 1 / len(matrix)).astype(np.complex128)


def _largest_momentum(eigenvalues: Sequence[complex] | npt.NDArray[np.complex128]) -> float:
    found = np.asarray(eigenvalues)
    momenta = np.linspace(0, 1, 1000, endpoint=False)[:, None]
    inside = ((momenta + found.real) / (1 + momenta)) ** 2 + (found.imag / (1 - momenta)) ** 2 < 1
    stable = inside.all(1)
    return 1.0 if stable.all() else float(momenta[np.argmin(stable), 0])
