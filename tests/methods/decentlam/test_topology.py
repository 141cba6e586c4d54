# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused

from noisescale import metropolis_weights
from noisescale.methods.decentlam.topology import Topology, topology_of


def slowest(topology: Topology, momentum: float) -> float:
    """Modulus a step of the slowest way in which ranks that differ come together."""
    ranks = len(topology.matrices[0])
    one = np.eye(ranks)
    whole = np.eye(2 * ranks)
    for matrix in topology.matrices:
        step = np.block([[matrix, -momentum * one], [one - matrix, momentum * one]])
        whole = step @ whole
    apart = np.kron(np.eye(2), one - 1 / ranks)
    return float(max(abs(np.linalg.eigvals(apart @ whole @ apart))) ** (1 / len(topology.matrices)))


@pytest.mark.parametrize("name", ["ring", "exponential", "one-peer"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32])
def test_named_topologies_keep_the_mean_and_bring_ranks_together(name: str, ranks: int) -> None:
    topology = topology_of(name, ranks)

    for matrix in topology.matrices + topology.without_momentum:
        assert (matrix >= 0).all()
        np.testing.assert_allclose(matrix.sum(0), 1)
        assert np.array_equal(matrix, matrix.T)
    assert topology.largest_momentum() == 1
    for momentum in (0.5, 0.8, 0.9, 0.95, 0.99) if ranks > 1 else ():
        assert slowest(topology, momentum) < 1 - 1e-4


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_one_peer_a_step_without_momentum_averages_all(ranks: int) -> None:
    topology = topology_of("one-peer", ranks)

    product = np.linalg.multi_dot([np.eye(ranks), *topology.without_momentum, np.eye(ranks)])

    np.testing.assert_allclose(product, np.full((ranks, ranks), 1 / ranks))


def test_links_of_the_named_topologies() -> None:
    exponential = topology_of("exponential", 8).matrix(0)
    ring = topology_of("ring", 8).matrix(0)
    peers = [topology_of("one-peer", 6).matrix(step) for step in range(4)]

    assert np.flatnonzero(exponential[0]).tolist() == [0, 1, 2, 4, 6, 7]
    assert exponential[0, 1] == pytest.approx(1 / 6)
    assert np.flatnonzero(ring[0]).tolist() == [0, 1, 7]
    assert ring[0, 0] == pytest.approx(1 / 3)
    heard = [np.flatnonzero(matrix[0]).tolist() for matrix in peers]
    assert heard == [[0, 1], [0, 2], [0, 4], [0, 1]]
    assert np.array_equal(peers[1][4], np.eye(6)[4])  # rank 6 is none: rank 4 sits out


def test_metropolis_weights_of_any_graph() -> None:
    star = np.zeros((4, 4), bool)
    star[0, 1:] = star[1:, 0] = True

    for adjacency in (star, star.tolist(), torch.tensor(star), star * 7.0 + np.eye(4)):
        weights = metropolis_weights(adjacency)

        np.testing.assert_allclose(weights, star / 4 + np.diag([0.25, 0.75, 0.75, 0.75]))
        assert np.array_equal(topology_of(weights, 4).matrix(5), weights)


def test_the_largest_momentum_of_a_matrix_that_is_not_symmetric() -> None:
    """Ranks 0 to 7 each hear those at distance 1, 2 and 4 on one side alone."""
    shifts = [np.roll(np.eye(8), hop, axis=1) for hop in (0, 1, 2, 4)]
    matrix = np.stack(shifts).mean(0)

    found = topology_of(matrix, 8).largest_momentum()

    assert 0.5 < found < 0.6
    topology = Topology("", (matrix,), ())
    assert slowest(topology, found - 0.005) < 1 < slowest(topology, found + 0.005)


SWAP = [[0.0, 1.0], [1.0, 0.0]]
APART = np.kron(np.eye(2), np.full((2, 2), 0.5))


@pytest.mark.parametrize(
    ("topology", "ranks", "requirement", "got"),
    [
        ("star", 4, '"exponential", "one-peer", "ring"', "'star'"),
        (np.full((4, 4), 0.3), 4, "row", "1.2 in row 0"),
        ([[1.0, 0.0], [1.0, 0.0]], 2, "column", "2 in column 0"),
        ([[2.0, -1.0], [-1.0, 2.0]], 2, "no entry below 0", "-1 in row 0, column 1"),
        ([[np.nan, 1.0], [1.0, 0.0]], 2, "no entry below 0", "nan in row 0, column 0"),
        (np.ones((2, 3)) / 3, 2, "square", "shape (2, 3)"),
        ([], 1, "square", "shape (0,)"),
        (np.full((4, 4), 0.25), 3, "3 ranks", "4 x 4"),
        (APART, 4, "connect all ranks", "no way from rank 2 to rank 0"),
        (SWAP, 2, "together", "one that hands them round"),
    ],
)
def test_topologies_that_are_refused(topology: Any, ranks: int, requirement: str, got: str) -> None:
    with refused("topology", requirement=requirement) as raised:
        topology_of(topology, ranks)

    assert raised.value.got.startswith(got)


def test_what_is_no_matrix_and_a_graph_with_links_one_way_are_refused() -> None:
    for topology in (None, 3.0, [["a"]], [[1.0], [1.0, 2.0]]):
        with refused("topology"):
            topology_of(topology, 2)
    with refused("adjacency", requirement="symmetric"):
        metropolis_weights([[0, 1], [0, 0]])
