# SPDX-License-Identifier: Apache-2.0
"""Ranks that are forked once for all tests of a file."""

from collections.abc import Callable
from functools import cache
from typing import Any

from ranks import on_ranks


class Ranks:
    """Call functions one after the other on ranks that are forked when the first test asks.

    Args:
        count: The ranks.
        launched: Prepares each rank, as `as_torchrun` does.

    Example:
        two = Ranks(2)

        @two
        def numbers() -> int:
            return dist.get_rank()

        def test_each_rank_has_its_number() -> None:
            assert numbers() == [0, 1]
    """

    def __init__(self, count: int, launched: Callable[[Any], Any] = lambda call: call) -> None:
        self._count, self._launched = count, launched
        self._functions: list[Callable[[], Any]] = []
        self._found = cache(self._find)

    def __call__(self, function: Callable[[], Any]) -> Callable[[], list[Any]]:
        """Return what gives the function's result on each rank."""
        index = len(self._functions)
        self._functions.append(function)

        def of_each_rank() -> list[Any]:
            found = self._found()
            if isinstance(found, Exception):
                raise found
            return [of_rank[index] for of_rank in found]

        return of_each_rank

    def _find(self) -> list[Any] | Exception:
        def call_all() -> list[Any]:
            return [function() for function in self._functions]

        try:
            return on_ranks(self._count, self._launched(call_all))
        except Exception as error:  # the next test has it too, without a fork
            return error
