# SPDX-License-Identifier: Apache-2.0
"""Tensors of a device that one kernel takes together, as a launch takes some microseconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

MOST_ELEMENTS = 2**23
"""Of what is copied at once: 32 MB in float32."""


def together(items: Iterable[tuple[T, Hashable, int]]) -> Iterator[list[T]]:
    """Yield lists of items of one kind, with `MOST_ELEMENTS` at most if they hold several.

    Args:
        items: Each with its kind and its elements.
    """
    kept: dict[Hashable, tuple[int, list[T]]] = {}
    for item, kind, elements in items:
        held, some = kept.get(kind, (0, []))
        if some and held + elements > MOST_ELEMENTS:
            yield some
            held, some = 0, []
        some.append(item)
        kept[kind] = held + elements, some
    for _, some in kept.values():
        yield some
