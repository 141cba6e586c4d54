# SPDX-License-Identifier: Apache-2.0
"""Formulas for per-example norms, layer by layer, against gradients taken one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from brute_force import columns_of, gradients_of_examples
from torch import Tensor, nn

from noisescale.collectors.per_example import norms as example_norms
from noisescale.collectors.per_example.layers import kind_of
from noisescale.collectors.per_example.norms import Outer

LAYERS = "noisescale.collectors.per_example.layers"
B = 5


def one_by_one(module: nn.Module, x: Tensor, d: Tensor) -> dict[str, Tensor]:
    """Gradients of Σ d·y of every example, shape (b, numbers of the parameter)."""
    rows = torch.stack(gradients_of_examples(module, (x, d), lambda y, d: (y * d).sum()))
    return {name: rows[:, columns_of(module, name.__eq__)] for name, _ in module.named_parameters()}


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(B, *shape)


def ids(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 7, (B, *shape))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 4), numbers(6)),
    "linear, few positions": (lambda: nn.Linear(16, 12), numbers(3, 16)),
    "linear, many positions": (lambda: nn.Linear(3, 4), numbers(9, 3)),
    "linear, two dimensions of positions": (lambda: nn.Linear(3, 4), numbers(2, 5, 3)),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), numbers(3, 6)),
    "embedding": (lambda: nn.Embedding(7, 4), ids()),
    "embedding of sequences": (lambda: nn.Embedding(7, 4), ids(9)),
    "embedding of two dimensions": (lambda: nn.Embedding(7, 4), ids(3, 4)),
    "embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), ids(9)),
    "layer norm": (lambda: nn.LayerNorm(6), numbers(6)),
    "layer norm of sequences": (lambda: nn.LayerNorm(6), numbers(4, 6)),
    "layer norm over two dimensions": (lambda: nn.LayerNorm((3, 6)), numbers(2, 4, 3, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), numbers(4, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), numbers(4, 6)),
    "rms norm with eps": (lambda: nn.RMSNorm(6, eps=0.1), numbers(4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), numbers(6)),
    "group norm of pictures": (lambda: nn.GroupNorm(3, 6), numbers(6, 4, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), numbers(3, 9)),
    "conv1d in full": (
        lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        numbers(4, 11),
    ),
    "conv1d, same, even kernel": (lambda: nn.Conv1d(3, 4, 4, padding="same"), numbers(3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), numbers(3, 7, 6)),
    "conv2d without bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), numbers(3, 7, 6)),
    "conv2d of one pixel": (lambda: nn.Conv2d(3, 4, 1), numbers(3, 7, 6)),
    "conv2d of one pixel, strided": (lambda: nn.Conv2d(3, 4, 1, stride=2), numbers(3, 7, 6)),
    "conv2d of one pixel, padded": (lambda: nn.Conv2d(3, 4, 1, padding=1), numbers(3, 4, 4)),
    "conv2d in full": (
        lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        numbers(4, 9, 8),
    ),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), numbers(4, 6, 6)),
    "conv2d, valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), numbers(3, 7, 6)),
    "conv2d, same": (lambda: nn.Conv2d(3, 4, (3, 2), padding="same"), numbers(3, 7, 6)),
    "conv2d, same, reflected": (
        lambda: nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"),
        numbers(3, 7, 6),
    ),
    "conv2d, replicated": (
        lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="replicate"),
        numbers(3, 7, 6),
    ),
    "conv2d, large kernel": (lambda: nn.Conv2d(8, 8, 5), numbers(8, 6, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("temporary_bytes", [25 * 2**20, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("case", "saved"),
    [*((case, False) for case in CASES), *((case, True) for case in CASES if "layer n" in case)],
)
def test_norms_and_sums_are_those_of_single_gradients(
    case: str,
    saved: bool,
    dtype: torch.dtype,
    temporary_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the statistics that autograd saves in the forward pass, too."""
    make_module, make_input = CASES[case]
    torch.manual_seed(0)
    module, x = make_module().to(dtype), make_input()
    x = x.to(dtype) if x.is_floating_point() else x
    d = torch.randn_like(module(x))
    monkeypatch.setattr(example_norms, "TEMPORARY_BYTES", temporary_bytes)
    monkeypatch.setattr(f"{LAYERS}.layer.TEMPORARY_BYTES", temporary_bytes)
    monkeypatch.setattr(f"{LAYERS}.normalization.NormLayer.bytes_on_cpu", None)

    names = [name for name, _ in module.named_parameters()]
    kind = kind_of(module)
    assert kind is not None
    layer = kind(module, dict.fromkeys(names, 0))
    statistics = layer.statistics(module(x)) if saved else None
    # Before torch 2.8 it cannot be known whether they may be taken.
    assert (statistics is not None) is (saved and torch.__version__ >= (2, 8))
    with torch.no_grad():
        chunks = list(layer.in_chunks(x, d, names, statistics))

    rtol = 1e-5 if dtype == torch.float32 else 1e-10
    for name, expected in one_by_one(module, x, d).items():
        parts = [chunk[name] for chunk in chunks]
        sq_norms = torch.cat([part.sq_norms() for part in parts])
        total = torch.stack([part.total() for part in parts]).sum(0).flatten()
        spread = torch.stack([part.spread() for part in parts]).sum()
        torch.testing.assert_close(
            sq_norms.double(), expected.square().sum(1), rtol=rtol, atol=0, msg=name
        )
        torch.testing.assert_close(total.double(), expected.sum(0), rtol=rtol, atol=1e-5, msg=name)
        assert spread > 0


@pytest.mark.parametrize(("t", "way"), [(1, "one"), (2, "gram"), (5, "product")])
def test_the_cheaper_formula_is_taken(t: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ["one"]
    for name, private in (("gram", "_weighted_gram"), ("product", "_products")):
        original: Any = getattr(example_norms, private)

        def spy(*arguments: Any, name: str = name, original: Any = original) -> Any:
            taken.append(name)
            return original(*arguments)

        monkeypatch.setattr(example_norms, private, spy)

    Outer(torch.randn(3, t, 4), torch.randn(3, t, 4)).sq_norms()

    assert taken[-1] == way


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_that_overflow_16_bits_are_taken_in_32(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    x, d = torch.full((2, 3, 4), 300.0), torch.full((2, 3, 4), 300.0, dtype=dtype)
    kind = kind_of(layer)
    assert kind is not None

    (found,) = kind(layer, {"weight": 0, "bias": 1}).in_chunks(x, d, ["weight", "bias"])

    assert found["bias"].sq_norms().tolist() == pytest.approx([4 * 900.0**2] * 2)
    assert found["weight"].sq_norms().tolist() == pytest.approx([16 * 270000.0**2] * 2)


def test_patches_are_made_of_as_many_examples_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv2d(2, 2, 3)
    x, d = torch.randn(6, 2, 5, 5), torch.randn(6, 2, 3, 3)
    one_example = 9 * (2 * 9) * 4
    monkeypatch.setattr(f"{LAYERS}.layer.TEMPORARY_BYTES", 2 * one_example + 1)
    kind = kind_of(conv)
    assert kind is not None

    chunks = list(kind(conv, {"weight": 0}).in_chunks(x, d, ["weight"]))

    assert [len(chunk["weight"].sq_norms()) for chunk in chunks] == [2, 2, 2]


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Named(nn.Linear):
    pass


def test_there_is_a_formula_for_the_same_forward_alone() -> None:
    patched = Named(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]

    assert kind_of(Named(2, 2)) is kind_of(nn.Linear(2, 2)) is not None
    for module in (
        *(nn.Embedding(3, 2, sparse=True), nn.Embedding(3, 2, max_norm=1.0)),
        *(nn.Embedding(3, 2, scale_grad_by_freq=True), nn.ConvTranspose2d(1, 1, 1)),
        *(nn.BatchNorm1d(2), Doubled(2, 2), patched),
    ):
        assert kind_of(module) is None, module
