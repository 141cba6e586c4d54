# SPDX-License-Identifier: Apache-2.0
"""Squared norms of every example's gradient, from a layer's input and its output's gradient.

A parameter of a layer is used at many positions t (tokens, pixels) of an example. With a_t what
the layer read there and d_t the gradient of its output, the example's gradient is a sum over t,
whose norm often takes less than the sum itself. All functions are pure; b is the number of
examples. Tensors are float32 or float64, or complex of such parts: 16 bits must be widened before.

References:
    Goodfellow 2015, arXiv:1510.01799. Gray et al. 2024, arXiv:2411.00999, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# What a formula may allocate at a time: a DDP bucket's worth.
TEMPORARY_BYTES = 25 * 2**20


class ExampleGradient(Protocol):
    """The gradients of one parameter, one for each example."""

    def sq_norms(self) -> Tensor:
        """Return |g_i|² of every example, shape (b,)."""

    def total(self) -> Tensor:
        """Return Σ_i g_i: the parameter's gradient, its elements in order but in any shape."""

    def spread(self) -> Tensor:
        """Sum over examples and positions of the squared norm of what each adds to `total`."""


class Outer(NamedTuple):
    """The gradients of a weight that maps a_t (k numbers) to l numbers: g_i = Σ_t d_t a_tᵀ.

    The norm is taken of that product, in t·k·l multiplications, or without it in t²·(k + l):

        |g_i|² = Σ_tt' (a_t·a_t')(d_t·d_t')

    Of complex numbers, too, with the products of conjugates x̄_t·x_t'. There `a` holds the
    conjugate of what the layer read: g_i = Σ_t d_t a_tᴴ (Kreutz-Delgado 2009, arXiv:0906.4835).
    """

    a: Tensor
    """Shape (b·groups, t, k)."""
    d: Tensor
    """Shape (b·groups, t, l)."""
    groups: int = 1
    """Weights side by side, that map a share of the channels each; together one parameter."""

    def sq_norms(self) -> Tensor:
        """Return |Σ_t d_t a_tᵀ|² of every example, by the cheaper way."""
        (_, t, k), l = self.a.shape, self.d.shape[2]  # noqa: E741 - the formula's letter
        if t == 1:
            sq_norms = _squares(self.a).squeeze(1) * _squares(self.d).squeeze(1)
        elif t * (k + l) <= k * l:
            sq_norms = _weighted_gram(lambda i, rows: _gram(self.a[i], rows), self.d)
        else:
            sq_norms = _products(self.a, self.d)
        return sq_norms if self.groups == 1 else sq_norms.view(-1, self.groups).sum(1)

    def total(self) -> Tensor:
        """Return Σ_i g_i, shape (groups, l, k)."""
        a, d = (x.unflatten(0, (-1, self.groups)) for x in (self.a, self.d))
        return torch.einsum("bgtl,bgtk->glk", d, a)

    def spread(self) -> Tensor:
        """Return Σ_t |a_t|²|d_t|²."""
        return (_squares(self.a) * _squares(self.d)).sum()


class Summed(NamedTuple):
    """The gradients of a bias, or of a gain with terms d_t ⊙ x̂_t: g_i = Σ_t term_t."""

    terms: Tensor
    """Shape (b, t, n)."""

    def sq_norms(self) -> Tensor:
        """Return |Σ_t term_t|² of every example."""
        return _squares(self.terms.sum(1))

    def total(self) -> Tensor:
        """Return Σ_i g_i, shape (n,)."""
        return self.terms.sum((0, 1))

    def spread(self) -> Tensor:
        """Return Σ_t |term_t|²."""
        return _squares(self.terms).sum()


class Normalized(NamedTuple):
    """The gradients of a gain on x̂_t = (x_t - μ_t)r_t, computed without x̂.

    g_i = Σ_t r_t (x_t ⊙ d_t) - Σ_t r_tμ_t d_t
    """

    x: Tensor
    """Shape (b, t, n)."""
    d: Tensor
    """Shape (b, t, n)."""
    mean: Tensor
    """μ, shape (b, t)."""
    inverse_deviation: Tensor
    """r, shape (b, t)."""

    def sq_norms(self) -> Tensor:
        """Return |g_i|² of every example."""
        return _squares(self._sums())

    def total(self) -> Tensor:
        """Return Σ_i g_i, shape (n,)."""
        return self._sums().sum(0)

    def spread(self) -> Tensor:
        """Return Σ_t |d_t ⊙ x̂_t|²."""
        normalized = (self.x - self.mean.unsqueeze(2)) * self.inverse_deviation.unsqueeze(2)
        return _squares(normalized.mul_(self.d)).sum()

    def _sums(self) -> Tensor:
        r = self.inverse_deviation
        products = torch.bmm(r.unsqueeze(1), self.x * self.d)
        return torch.baddbmm(products, (r * self.mean).unsqueeze(1), self.d, alpha=-1).squeeze(1)


class Lookup(NamedTuple):
    """The gradients of a table whose row id_t is read at t.

    Row r of g_i is Σ d_t over the t with id_t = r, so

        |g_i|² = Σ_tt' [id_t = id_t'] d_t·d_t'
    """

    ids: Tensor
    """Shape (b, t)."""
    d: Tensor
    """Shape (b, t, n)."""
    table: int
    """Rows of the table."""
    padding: int | None = None
    """The row that gets no gradient."""

    def sq_norms(self) -> Tensor:
        """Return the sum over all pairs of positions with the same id."""
        return _weighted_gram(self._same, self.d)

    def total(self) -> Tensor:
        """Return Σ_i g_i, shape (table, n)."""
        rows = self.d.new_zeros(self.table, self.d.shape[2])
        rows.index_add_(0, self.ids.flatten(), self.d.flatten(0, 1))
        if self.padding is not None:
            rows[self.padding] = 0
        return rows

    def spread(self) -> Tensor:
        """Return Σ_t |d_t|²."""
        return _squares(self.d).sum()

    def _same(self, examples: slice, rows: slice) -> Tensor:
        ids = self.ids[examples]
        same = ids[:, rows, None] == ids[:, None, :]
        return same if self.padding is None else same & (ids != self.padding)[:, None, :]


def _squares(x: Tensor) -> Tensor:
    """Sum squares over the last dimension: three times as fast as `vecdot(x, x)` on CPU."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms.square_()


def _gram(x: Tensor, rows: slice) -> Tensor:
    """Return x̄_t·x_t' for the t in `rows`, shape (b, rows, t)."""
    return torch.bmm(x[:, rows].conj(), x.mT)


def _weighted_gram(weights: Callable[[slice, slice], Tensor], d: Tensor) -> Tensor:
    """Return Σ_tt' w_tt' d_t·d_t' of every example.

    `weights` gives w for some examples and some t.
    """
    b, t, _ = d.shape
    sums = d.new_zeros(b, dtype=d.dtype.to_real())
    for examples, rows in _blocks(b, t, 2 * t * d.element_size()):
        pairs = _gram(d[examples], rows).mul_(weights(examples, rows))
        sums[examples] += pairs.sum((1, 2)).real  # what is imaginary cancels
    return sums


def _products(a: Tensor, d: Tensor) -> Tensor:
    """Return |Σ_t d_t a_tᵀ|² of every example, by way of the sum itself."""
    sums = d.new_zeros(len(d), dtype=d.dtype.to_real())
    for examples, rows in _blocks(len(d), d.shape[2], a.shape[2] * a.element_size()):
        products = torch.bmm(d[examples, :, rows].mT, a[examples])
        sums[examples] += _squares(products).sum(1)
    return sums


def _blocks(b: int, rows: int, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Cut b matrices into blocks of whole ones, or of rows where one alone is too large."""
    whole = TEMPORARY_BYTES // max(rows * row_bytes, 1)
    if whole:
        for i in range(0, b, whole):
            yield slice(i, i + whole), slice(None)
        return
    some = max(TEMPORARY_BYTES // row_bytes, 1)
    for i in range(b):
        for row in range(0, rows, some):
            yield slice(i, i + 1), slice(row, row + some)
