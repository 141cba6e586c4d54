# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from ranks import call_in_a_fork
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from noisescale.collectors.squared_norms import (
    norms_of,
    norms_of_one,
    scale,
    squared_norm,
    sums_of_squares,
)

CPU = torch.device("cpu")


def by_numpy(*tensors: Tensor) -> float:
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return float(sum((t.detach().double().numpy() ** 2).sum() for t in parts))


@pytest.mark.parametrize("elements", [1, 4096, 4097, 1_000_001, 16 * 2**20])
def test_norms_are_exact_to_1e_6_at_any_size(elements: int) -> None:
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 1e-3

    result = squared_norm([tensor], device=CPU)

    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(by_numpy(tensor), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_widened_not_squared(dtype: torch.dtype) -> None:
    """300² overflows in half precision."""
    tensors = [torch.full((300, 70), 300.0, dtype=dtype), torch.ones(7, dtype=dtype)]

    assert squared_norm(tensors, device=CPU).item() == pytest.approx(by_numpy(*tensors), rel=2e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("elements", [7, 20_000, 2**18 + 1])
def test_a_complex_number_counts_by_both_of_its_parts(dtype: torch.dtype, elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(elements, dtype=torch.complex64, generator=generator).to(dtype)

    for tensor in (z, z.conj()):
        for norms in (norms_of([tensor]), norms_of_one(tensor)):
            result = sums_of_squares([norms], device=CPU).item()

            assert result == pytest.approx(by_numpy(z), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_any_layout_counts_every_element_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, 5, 5, dtype=dtype, generator=generator)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[3, 0, 3]]), x[:3, :4, 0, 0], (9, 4), check_invariants=True
    )
    dense = [
        *(x.to(memory_format=torch.channels_last), x.transpose(0, 1), x[:, ::2], x.mT.conj()),
        *(x[0, 0, 0, 0], x[:0], torch.randn(300, 70, generator=generator)),
    ]

    result = squared_norm([*dense, sparse], device=CPU).item()
    of_one = sums_of_squares([norms_of_one(sparse)], device=CPU).item()

    assert result == pytest.approx(by_numpy(*dense, sparse.to_dense()), rel=1e-6)
    assert of_one == pytest.approx(by_numpy(sparse.to_dense()), rel=1e-6)


def test_no_tensors_have_norm_zero_and_what_is_not_finite_shows() -> None:
    assert squared_norm([], device=CPU).item() == 0
    assert squared_norm([torch.empty(0)], device=CPU).item() == 0
    for bad in (float("nan"), float("inf")):
        tensor = torch.ones(10_000)
        tensor[5000] = bad
        assert not torch.isfinite(squared_norm([tensor], device=CPU))


def test_no_copy_is_made() -> None:
    for tensor in (
        torch.ones(8 * 2**20),
        torch.ones(4 * 2**20, dtype=torch.complex64),
        torch.ones(4 * 2**20, dtype=torch.complex64).conj(),
    ):
        call_in_a_fork(check_no_copy, tensor)  # see `in_a_fork`


def check_no_copy(tensor: Tensor) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        squared_norm([tensor], device=CPU)

    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events())
    assert 0 < allocated <= 0.01 * tensor.nbytes


@pytest.mark.parametrize("elements", [7, 20_000, 2**20])
def test_what_was_scaled_has_the_norm_of_what_is_scaled(elements: int) -> None:
    """Long tensors are summed up at once, short ones only normed: both forms have to scale."""
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(0))

    for norms in (norms_of([tensor]), norms_of_one(tensor)):
        result = sums_of_squares([scale(norms, 3.0), norms], device=CPU)

        assert result.tolist() == pytest.approx([9 * by_numpy(tensor), by_numpy(tensor)], rel=1e-6)
