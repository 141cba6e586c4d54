# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_once import Ranks
from methods.across_ranks.small_net import error_of, this_rank
from methods.adasum.oracle_of_adasum import expected
from ranks import on_ranks
from tiers import slow_after, slow_but
from torch import Tensor

from noisescale.methods.adasum import fused
from noisescale.methods.adasum.all_reduce import adasum_all_reduce_

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(7, 3), (1,), (), (0,), (3, fused.WIDTH), (2 * fused.WIDTH + 1,)]


def reduced(leaves: list[list[Tensor]], *args: Any, **options: Any) -> tuple[list[Tensor], Any]:
    """What this rank has after the reduction of its tensors, `leaves[rank]`, and its statistics."""
    tensors = [each.clone() for each in leaves[this_rank()]]
    return tensors, tuple(adasum_all_reduce_(tensors, *args, **options))


def random(ranks: int, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(ranks)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        for _ in range(ranks)
    ]


def truth(leaves: list[list[Tensor]]) -> list[Any]:
    return [
        expected([each.double().numpy() for each in same]) for same in zip(*leaves, strict=True)
    ]


def groups_of(nodes: int, each: int) -> tuple[Any, Any]:
    """This rank's groups within its node of `each` ranks, and across nodes."""
    inside = [[node * each + i for i in range(each)] for node in range(nodes)]
    within, _ = dist.new_subgroups_by_enumeration(inside)
    across, _ = dist.new_subgroups_by_enumeration([list(x) for x in zip(*inside, strict=True)])
    return within, across


def everything() -> dict[Any, Any]:
    ranks = dist.get_world_size()
    found: dict[Any, Any] = {
        "dtypes": [reduced(random(ranks, SHAPES, dtype))[0] for dtype in DTYPES],
        "statistics": reduced(random(ranks, [(5,), (600,)], torch.float64))[1],
    }
    for rows in (1, 2):
        with patch("noisescale.methods.adasum.all_reduce._MESSAGE_ON_CPU", rows):
            found["messages", rows] = [reduced(each)[0][0] for each in of_halves(ranks)]
    for each in [each for each in (2, 3) if ranks % each == 0 and ranks > each]:
        within, across = groups_of(ranks // each, each)
        leaves = random(ranks, SHAPES, torch.float64)
        found["nodes", each] = reduced(leaves, across, mean_group=within)
    return found


def of_halves(ranks: int) -> list[list[list[Tensor]]]:
    """Halves of unequal length."""
    lengths = range(11 * fused.WIDTH, 14 * fused.WIDTH, fused.WIDTH)
    return [random(ranks, [(length,)], torch.float64) for length in lengths]


on = {ranks: Ranks(ranks) for ranks in range(1, 9)}
ON = {ranks: on[ranks](everything) for ranks in on}


@pytest.mark.parametrize("ranks", slow_but(range(2, 9), 2, 3, 4, 5))
def test_all_ranks_have_the_bits_of_the_rule(ranks: int) -> None:
    of_ranks = [found["dtypes"] for found in ON[ranks]()]
    for dtype, *found in zip(DTYPES, *of_ranks, strict=True):
        for tensors in found[1:]:
            assert all(map(torch.equal, tensors, found[0]))
        for got, wanted in zip(found[0], truth(random(ranks, SHAPES, dtype)), strict=True):
            # A coefficient can be large and cancel: the error is that of the largest vector.
            atol = 20 * ranks * torch.finfo(dtype).eps
            np.testing.assert_allclose(got.double(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_halves_in_many_messages_arrive_whole(ranks: int, rows: int) -> None:
    wanted = [truth(each)[0] for each in of_halves(ranks)]

    for found in ON[ranks]():
        for got, one in zip(found["messages", rows], wanted, strict=True):
            np.testing.assert_allclose(got, one, rtol=0, atol=1e-13)


def of_horovod(case: str, ranks: int) -> Iterator[tuple[Any, Any]]:
    """Horovod's published cases, drawn as there: a vector a rank, and what their Adasum is."""
    rng = np.random.RandomState(2)
    for dtype in (np.float32, np.float16):
        low, high = float(np.finfo(dtype).tiny), math.sqrt(float(np.finfo(dtype).max))
        shorter = 20 * ranks - (17 if case == "orthogonal" else 13)
        lengths = [shorter, 2 * ranks + 1, ranks + 2, 2**19]
        for length in lengths if case in ("orthogonal", "parallel") else [1024]:
            if case == "orthogonal":
                vectors = np.linalg.qr(rng.normal(0, 1, (length, ranks)))[0].astype(dtype)
                yield vectors, vectors.astype(np.float64).sum(1)
                continue
            vector = rng.normal(0, low if case == "tiny" else 1, (length, 1))
            if case == "magnitudes":
                powers = [((i + 1) / ranks, (ranks - i - 1) / ranks) for i in range(ranks)]
                factors = np.array([[high**x * low**y] for x, y in powers])
                rng.shuffle(factors)
            else:
                factors = rng.normal(0, 1, (ranks, 1))
            vectors = (vector @ factors.T).astype(dtype)
            yield vectors, vectors.astype(np.float64).mean(1)


@pytest.mark.parametrize("ranks", slow_but([2, 4, 8], 2))
def test_the_published_cases_of_horovod(ranks: int) -> None:
    cases = ("orthogonal", "parallel", "tiny", "magnitudes")
    drawn = [(case, *each) for case in cases for each in of_horovod(case, ranks)]  # before forks

    def one_rank() -> list[tuple[str, float]]:
        found = []
        for case, vectors, wanted in drawn:
            got = torch.from_numpy(vectors[:, dist.get_rank()].copy())
            adasum_all_reduce_([got])
            error = np.linalg.norm(wanted - got.numpy()) / np.linalg.norm(wanted) / 100
            name = f"{case} {vectors.dtype} {len(wanted)}"
            found.append((name, error / np.finfo(vectors.dtype).eps))
        return found

    for found in on_ranks(ranks, one_rank):
        assert [(name, error) for name, error in found if not error < 1] == []
        assert len(found) == 2 * (4 + 4 + 1 + 1)


@pytest.mark.parametrize("ranks", [3, 4])
def test_statistics_are_those_of_the_tree(ranks: int) -> None:
    leaves = random(ranks, [(5,), (600,)], torch.float64)

    # By hand: of three ranks the third is combined with the first, that is of two ranks then.
    for index in range(2):
        vectors = [[each[index].numpy(), 1] for each in leaves]
        pairs = [(0, 2), (0, 1)] if ranks == 3 else [(0, 1), (2, 3), (0, 2)]
        of_pairs, cosines = [], []
        for i, j in pairs:
            (x, m), (y, n) = vectors[i], vectors[j]
            of_pairs += [1 - m / (m + n) * (x @ y) / (x @ x), 1 - n / (m + n) * (x @ y) / (y @ y)]
            cosines.append((x @ y) / math.sqrt((x @ x) * (y @ y)))
            vectors[i] = [of_pairs[-2] * x + of_pairs[-1] * y, m + n]
        square = sum(float(each[index] @ each[index]) for each in leaves)
        orthogonality = vectors[0][0] @ vectors[0][0] / square
        for of_rank in ON[ranks]():
            coefficient, cosine, found = of_rank["statistics"]
            assert coefficient[index].item() == pytest.approx(np.mean(of_pairs))
            assert cosine[index].item() == pytest.approx(np.mean(cosines))
            assert found[index].item() == pytest.approx(orthogonality)


@on[2]
def of_odd_tensors() -> dict[str, Any]:
    mixed = [each[this_rank()] for each in (wides(), wides(), wides())]
    tensors = [
        mixed[0][:, ::2],
        mixed[1][:, 1].half(),
        torch.view_as_complex(mixed[2][:, 2:4].contiguous()),
    ]
    adasum_all_reduce_(tensors)
    infinite = torch.tensor([1.0, math.inf, 2.0])
    return {
        "mixed": [each.clone() for each in tensors],
        "zero": reduced([[torch.zeros(3)], [torch.ones(3)]]),
        "infinite": reduced([[infinite, torch.ones(2)], [torch.ones(3), torch.ones(2)]])[0],
        "none": reduced([[], []])[0],
    }


def wides() -> list[Tensor]:
    """Of each rank."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    return [torch.randn(4, 6, generator=each, dtype=torch.float64) for each in generators]


def test_non_finite_elements_stay_and_a_vector_of_some_ranks_is_orthogonal_to_nothing() -> None:
    for found in of_odd_tensors():
        assert [each.tolist() for each in found["infinite"]] == [[1.0, math.inf, 1.5], [1.0, 1.0]]
        assert found["none"] == []
        tensors, statistics = found["zero"]
        assert tensors[0].tolist() == [1.0, 1.0, 1.0]
        assert [each.item() for each in statistics] == [1, 0, 1]  # of cosine 0


def test_tensors_of_several_dtypes_complex_ones_and_ones_with_gaps() -> None:
    first, second = (found["mixed"] for found in of_odd_tensors())

    assert all(map(torch.equal, first, second))
    np.testing.assert_allclose(first[0], expected([w[:, ::2].numpy() for w in wides()]))
    halves = [w[:, 1].half().double().numpy() for w in wides()]
    np.testing.assert_allclose(first[1], expected(halves), atol=4e-3)
    pairs = expected([w[:, 2:4].numpy() for w in wides()])
    np.testing.assert_allclose(torch.view_as_real(first[2]), pairs)


@on[3]
def in_a_group_of_two() -> float:
    group = dist.new_group([2, 0])
    tensor = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() != 1:
        adasum_all_reduce_([tensor], group)
    return tensor.item()


def test_a_group_combines_its_own_ranks_alone() -> None:
    assert in_a_group_of_two() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("nodes", "ranks_of_a_node"), slow_after(1, [(2, 2), (3, 2), (2, 3)]))
def test_the_mean_in_a_node_comes_first(nodes: int, ranks_of_a_node: int) -> None:
    leaves = random(nodes * ranks_of_a_node, SHAPES, torch.float64)
    results = [found["nodes", ranks_of_a_node] for found in ON[len(leaves)]()]

    means = [
        [torch.stack(same).mean(0) for same in zip(*leaves[i : i + ranks_of_a_node], strict=True)]
        for i in range(0, len(leaves), ranks_of_a_node)
    ]
    for tensors, (*_, orthogonality) in results:
        for index, (got, wanted) in enumerate(zip(tensors, truth(means), strict=True)):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
            if got.numel():
                squares = sum(float((node[index] ** 2).sum()) for node in means)
                assert orthogonality[index].item() == pytest.approx((wanted**2).sum() / squares)
        assert all(map(torch.equal, tensors, results[0][0]))


def test_one_process_keeps_its_tensors() -> None:
    (found,) = ON[1]()
    coefficient, cosine, orthogonality = found["statistics"]

    for tensors, dtype in zip(found["dtypes"], DTYPES, strict=True):
        assert all(map(torch.equal, tensors, random(1, SHAPES, dtype)[0]))
    assert (coefficient.tolist(), orthogonality.tolist()) == ([1.0] * 2, [1.0] * 2)
    assert cosine.isnan().all()
    with pytest.raises(RuntimeError, match="init_process_group"):  # without a group
        adasum_all_reduce_([torch.ones(1)])


OTHERS = [
    ([torch.ones(2), torch.ones(4)], "2 on rank 0 and 2 on rank 2", "Tensor 1 has shape (3,)"),
    ([torch.ones(2), torch.ones(3).half()], "2 on rank 0 and 2 on rank 2", "float16 on rank 2"),
    ([torch.ones(2)], "2 on rank 0 and 1 on rank 2", "and none on rank 2"),
    ([], "2 on rank 0 and 0 on rank 2", "Tensor 0 has shape (2,)"),
    ([torch.ones(2), torch.ones(3).to_sparse()], "2 on rank 0 and 2 on rank 2", "sparse_coo"),
]


@on[3]
def with_others_on_the_last_rank() -> list[Any]:
    return [
        error_of(
            lambda last=last: adasum_all_reduce_(
                last if this_rank() == 2 else [torch.ones(2), torch.ones(3)]
            )
        )
        for last, *_ in OTHERS
    ]


def test_ranks_that_pass_other_tensors_are_told_so_on_all_ranks() -> None:
    for errors in with_others_on_the_last_rank():
        for error, (_, got, remedy) in zip(errors, OTHERS, strict=True):
            assert (error.arguments, error.got) == (("tensors",), got)
            assert remedy in error.remedy


@on[4]
def a_difference_in_one_node() -> Any:
    within, across = groups_of(2, 2)
    tensor = torch.ones(3 + (this_rank() == 3))
    return error_of(lambda: adasum_all_reduce_([tensor], across, mean_group=within))


@on[5]
def nodes_of_different_sizes() -> Any:
    within = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3, 4])][this_rank() // 3]
    across = [dist.new_group(ranks) for ranks in ([0, 3], [1, 4], [2])][this_rank() % 3]
    return error_of(lambda: adasum_all_reduce_([torch.ones(3)], across, mean_group=within))


def test_differences_between_nodes_and_nodes_of_different_sizes_are_told_on_all_ranks() -> None:
    for error in a_difference_in_one_node():
        assert error.arguments == ("tensors",)
        assert "shape (4,)" in error.remedy
    for error in nodes_of_different_sizes():
        assert (error.arguments, error.got) == (
            ("mean_group",),
            "3 ranks on rank 0 and 2 ranks on rank 3",
        )


@on[2]
def wrong_arguments() -> list[Any]:
    outside = dist.new_group([0])
    wrong: list[Any] = [[torch.ones(2, dtype=torch.int32)], [torch.ones(2).to_sparse()]]
    errors = [error_of(lambda one=one: adasum_all_reduce_(one)) for one in [*wrong, torch.ones(2)]]
    if this_rank():
        errors.append(error_of(lambda: adasum_all_reduce_([torch.ones(1)], outside)))
    return errors


def test_tensors_that_cannot_be_combined_and_a_process_outside_the_group_are_refused() -> None:
    first, second = wrong_arguments()

    for integers, sparse, tensor in (first, second[:3]):
        assert {error.arguments for error in (integers, sparse, tensor)} == {("tensors",)}
        assert [isinstance(e, TypeError) for e in (integers, sparse, tensor)] == [True, False, True]
        assert sparse.got == "one of layout torch.sparse_coo"
        assert (integers.got, tensor.got) == ("torch.int32", "a tensor")
    assert (second[3].arguments, second[3].got) == (("group",), "a group without rank 1")
