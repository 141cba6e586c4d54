# SPDX-License-Identifier: Apache-2.0
"""Functions of a test module that the same forked ranks call one after another."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ranks import on_ranks

Function = Callable[[], Any]

_FUNCTIONS: dict[tuple[str, int], list[Function]] = {}


def on(ranks: int) -> Callable[[Function], Callable[[], list[Any]]]:
    """Have a function called on ranks, in one process group with others of its module.

    The decorated function returns what each rank returned. All ranks have to end a function in the
    same way: one that raises an error ends all functions.
    """

    def decorate(function: Function) -> Callable[[], list[Any]]:
        functions = _FUNCTIONS.setdefault((function.__module__, ranks), [])
        functions.append(function)
        position = len(functions) - 1

        def of_ranks() -> list[Any]:
            found = _called(function.__module__, ranks)
            if isinstance(found, BaseException):
                raise found
            return [of_rank[position] for of_rank in found]

        return of_ranks

    return decorate


@functools.cache
def _called(module: str, ranks: int) -> list[list[Any]] | AssertionError:
    functions = _FUNCTIONS[module, ranks]
    importlib.import_module("torch._dynamo")  # optimizers import it: here once, not in each rank
    try:
        return on_ranks(ranks, lambda: [function() for function in functions])
    except AssertionError as error:
        return error
