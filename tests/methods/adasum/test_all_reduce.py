# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from methods.adasum.oracle_of_adasum import expected
from ranks import on_ranks
from torch import Tensor

from noisescale.methods.adasum import fused
from noisescale.methods.adasum.all_reduce import adasum_all_reduce_

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def reduced(leaves: list[list[Tensor]], **options: Any) -> list[tuple[list[Tensor], Any]]:
    """What each rank has after the reduction of its tensors, `leaves[rank]`, and its statistics."""

    def one_rank() -> tuple[list[Tensor], Any]:
        tensors = [each.clone() for each in leaves[dist.get_rank()]]
        return tensors, tuple(adasum_all_reduce_(tensors, **options))

    return on_ranks(len(leaves), one_rank)


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


SHAPES = [(7, 3), (1,), (), (0,), (3, fused.WIDTH), (2 * fused.WIDTH + 1,)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8])
def test_all_ranks_have_the_bits_of_the_rule(ranks: int) -> None:
    def one_rank() -> list[list[Tensor]]:
        found = []
        for dtype in DTYPES:
            tensors = random(ranks, SHAPES, dtype)[dist.get_rank()]
            adasum_all_reduce_(tensors)
            found.append(tensors)
        return found

    results = on_ranks(ranks, one_rank)

    for dtype, *found in zip(DTYPES, *results, strict=True):
        for tensors in found[1:]:
            assert all(map(torch.equal, tensors, found[0]))
        for got, wanted in zip(found[0], truth(random(ranks, SHAPES, dtype)), strict=True):
            # A coefficient can be large and cancel: the error is that of the largest vector.
            atol = 20 * ranks * torch.finfo(dtype).eps
            np.testing.assert_allclose(got.double(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_halves_in_many_messages_arrive_whole(
    ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noisescale.methods.adasum.all_reduce._MESSAGE_ON_CPU", rows)
    lengths = range(11 * fused.WIDTH, 14 * fused.WIDTH, fused.WIDTH)  # halves of unequal length
    leaves = [random(ranks, [(length,)], torch.float64) for length in lengths]

    def one_rank() -> list[list[Tensor]]:
        mine = [each[dist.get_rank()] for each in leaves]
        for tensors in mine:
            adasum_all_reduce_(tensors)
        return mine

    results = on_ranks(ranks, one_rank)

    for each, *found in zip(leaves, *results, strict=True):
        wanted = truth(each)[0]
        for (got,) in found:
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-13)


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


@pytest.mark.parametrize("ranks", [2, 4, 8])
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
    results = reduced(leaves)

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
        for _, (coefficient, cosine, found) in results:
            assert coefficient[index].item() == pytest.approx(np.mean(of_pairs))
            assert cosine[index].item() == pytest.approx(np.mean(cosines))
            assert found[index].item() == pytest.approx(orthogonality)


def test_a_vector_that_only_some_ranks_have_is_orthogonal_to_nothing() -> None:
    results = reduced([[torch.zeros(3)], [torch.ones(3)]])

    tensors, (coefficient, cosine, orthogonality) = results[0]
    assert tensors[0].tolist() == [1.0, 1.0, 1.0]
    assert cosine.item() == 0
    assert coefficient.item() == 1
    assert orthogonality.item() == 1


def test_non_finite_elements_stay_where_they_are() -> None:
    leaves = [[torch.tensor([1.0, math.inf, 2.0]), torch.ones(2)], [torch.ones(3), torch.ones(2)]]

    for tensors, _ in reduced(leaves):
        assert tensors[0].tolist() == [1.0, math.inf, 1.5]
        assert tensors[1].tolist() == [1.0, 1.0]


def test_tensors_of_several_dtypes_complex_ones_and_ones_with_gaps() -> None:
    def one_rank() -> list[Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        wide = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        tensors = [
            wide[:, ::2],
            wide[:, 1].half(),
            torch.view_as_complex(wide[:, 2:4].contiguous()),
        ]
        adasum_all_reduce_(tensors)
        return [each.clone() for each in tensors]

    first, second = on_ranks(2, one_rank)

    assert all(map(torch.equal, first, second))
    wides = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(2)
    ]
    np.testing.assert_allclose(first[0], expected([w[:, ::2].numpy() for w in wides]))
    np.testing.assert_allclose(
        torch.view_as_real(first[2]), expected([w[:, 2:4].numpy() for w in wides])
    )


def test_a_group_combines_its_own_ranks_alone() -> None:
    def one_rank() -> float:
        group = dist.new_group([2, 0])
        tensor = torch.tensor([1.0 + dist.get_rank()])
        if dist.get_rank() != 1:
            adasum_all_reduce_([tensor], group)
        return tensor.item()

    assert on_ranks(3, one_rank) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("nodes", "ranks_of_a_node"), [(2, 2), (3, 2), (2, 3)])
def test_the_mean_in_a_node_comes_first(nodes: int, ranks_of_a_node: int) -> None:
    leaves = random(nodes * ranks_of_a_node, SHAPES, torch.float64)

    def one_rank() -> tuple[list[Tensor], Tensor]:
        rank = dist.get_rank()
        inside = [[n * ranks_of_a_node + i for i in range(ranks_of_a_node)] for n in range(nodes)]
        within, _ = dist.new_subgroups_by_enumeration(inside)
        across, _ = dist.new_subgroups_by_enumeration(
            [list(each) for each in zip(*inside, strict=True)]
        )
        tensors = [each.clone() for each in leaves[rank]]
        found = adasum_all_reduce_(tensors, across, mean_group=within)
        return tensors, found.orthogonality

    results = on_ranks(nodes * ranks_of_a_node, one_rank)

    means = [
        [torch.stack(same).mean(0) for same in zip(*leaves[i : i + ranks_of_a_node], strict=True)]
        for i in range(0, len(leaves), ranks_of_a_node)
    ]
    for tensors, orthogonality in results:
        for index, (got, wanted) in enumerate(zip(tensors, truth(means), strict=True)):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
            if got.numel():
                squares = sum(float((node[index] ** 2).sum()) for node in means)
                assert orthogonality[index].item() == pytest.approx((wanted**2).sum() / squares)
        assert all(map(torch.equal, tensors, results[0][0]))


def test_one_process_keeps_its_tensors() -> None:
    ((tensors, (coefficient, cosine, orthogonality)),) = reduced([[torch.tensor([1.0, 2.0])]])

    assert tensors[0].tolist() == [1.0, 2.0]
    assert (coefficient.item(), orthogonality.item()) == (1.0, 1.0)
    assert cosine.isnan().all()


def test_no_tensors_are_no_error() -> None:
    assert [tensors for tensors, _ in reduced([[], []])] == [[], []]


def errors_of(ranks: int, call: Callable[[int], object]) -> list[str]:
    """What each rank raised."""

    def one_rank() -> str:
        try:
            call(dist.get_rank())
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    return on_ranks(ranks, one_rank)


@pytest.mark.parametrize(
    ("of_last_rank", "said"),
    [
        (
            [torch.ones(2), torch.ones(4)],
            "Tensor 1 has shape (3,) and dtype torch.float32 on rank 0, and shape (4,)",
        ),
        ([torch.ones(2), torch.ones(3).half()], "and shape (3,) and dtype torch.float16 on rank 2"),
        (
            [torch.ones(2)],
            "got 2 on rank 0 and 1 on rank 2. Tensor 1 has shape (3,) and dtype torch.float32 on"
            " rank 0, and none on rank 2",
        ),
        ([], "got 2 on rank 0 and 0 on rank 2"),
        ([torch.ones(2), torch.ones(3).to_sparse()], "torch.sparse_coo on rank 2"),
    ],
)
def test_ranks_that_pass_other_tensors_are_told_so_on_all_ranks(
    of_last_rank: list[Tensor], said: str
) -> None:
    def call(rank: int) -> None:
        adasum_all_reduce_(of_last_rank if rank == 2 else [torch.ones(2), torch.ones(3)])

    for error in errors_of(3, call):
        assert error.startswith("Refusal: `tensors` must be the same")
        assert said in error


def test_a_difference_in_one_node_is_told_in_all() -> None:
    def call(rank: int) -> None:
        within, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        adasum_all_reduce_([torch.ones(3 + (rank == 3))], across, mean_group=within)

    for error in errors_of(4, call):
        assert "Tensor 0 has shape (3,) and dtype torch.float32 on rank 0, and shape (4,)" in error


def test_nodes_of_different_sizes_are_told_so_on_all_ranks() -> None:
    def call(rank: int) -> None:
        within = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3, 4])]
        across = [dist.new_group(ranks) for ranks in ([0, 3], [1, 4], [2])]
        adasum_all_reduce_([torch.ones(3)], across[rank % 3], mean_group=within[rank // 3])

    for error in errors_of(5, call):
        assert "`mean_group` must be the same on all ranks, got ranks in 2 and 3" in error


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([torch.ones(2, dtype=torch.int32)], "TypeRefusal: `tensors` must be of a floating-point"),
        ([torch.ones(2).to_sparse()], "Refusal: `tensors` must be dense"),
        (
            torch.ones(2),
            "TypeRefusal: `tensors` must be a sequence, got a tensor. Pass ",
        ),
    ],
)
def test_tensors_that_cannot_be_combined(tensors: Any, said: str) -> None:
    assert all(said in error for error in errors_of(2, lambda _: adasum_all_reduce_(tensors)))


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        adasum_all_reduce_([torch.ones(1)])


def test_a_process_outside_the_group_is_told_so() -> None:
    def call(rank: int) -> None:
        group = dist.new_group([0])
        if rank:
            adasum_all_reduce_([torch.ones(1)], group)

    assert "`group` must contain this process, got a group without rank 1" in errors_of(2, call)[1]
