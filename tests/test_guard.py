# SPDX-License-Identifier: Apache-2.0
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import TestCase

import pytest
import torch.distributed as dist
from ranks import on_ranks

from noisescale.guard import Guard, HookErrors, keeps_errors, never_ends_training


@contextmanager
def told() -> Iterator[list[str]]:
    """Warnings, without what stands in brackets: the line that failed."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [re.sub(r" \(test_guard\.py, line \d+\)\..*", "", str(w.message)) for w in caught]


def test_each_loss_is_told_once() -> None:
    guard = Guard()
    with told() as messages:
        for lost in ("A chart is missing", "A report is missing", "A chart is missing"):
            with guard(lost):
                raise KeyError("x")

    assert messages == ["A chart is missing: KeyError: 'x'", "A report is missing: KeyError: 'x'"]


@pytest.mark.parametrize("error", [FileExistsError("no"), KeyboardInterrupt()])
def test_what_is_let_pass_and_interruptions_pass(error: BaseException) -> None:
    with pytest.raises(type(error)), Guard(FileExistsError)("A report is missing"):
        raise error
    with pytest.raises(type(error)):
        Callback(FileExistsError).on_step(error)


def test_the_traceback_is_in_the_log() -> None:
    with (
        TestCase().assertLogs("noisescale.guard", logging.DEBUG) as logged,
        pytest.warns(UserWarning, match="A report is missing"),
        Guard()("A report is missing"),
    ):
        raise OSError("the disk is full")

    assert [record.exc_info[0] for record in logged.records if record.exc_info] == [OSError]


def test_each_rank_tells_of_its_own_failures() -> None:
    def on_one() -> list[str]:
        with told() as messages, Guard()("A step was not measured"):
            raise ValueError(f"of {dist.get_rank()}")
        return messages

    assert on_ranks(2, on_one) == [
        ["A step was not measured: ValueError: of 0"],
        ["A step was not measured on rank 1: ValueError: of 1"],
    ]


class Callback:
    def __init__(self, *let_pass: type[Exception]) -> None:
        self._guard = Guard(*let_pass)

    @never_ends_training
    def on_step(self, error: BaseException | None = None) -> None:
        if error is not None:
            raise error


def test_a_hook_beside_the_training_warns_once_and_goes_on() -> None:
    callback = Callback()
    with told() as messages:
        for error in (None, KeyError("x"), KeyError("y")):
            callback.on_step(error)

    assert messages == ["Callback failed in `on_step`: KeyError: 'x'"]


class Hooked(HookErrors):
    @keeps_errors
    def on_gradient(self, gradient: float) -> float:
        return 1 / gradient


def test_the_error_of_a_hook_waits_until_it_is_asked_for() -> None:
    hooked = Hooked()

    assert hooked.on_gradient(0.0) is None
    assert hooked.on_gradient(4.0) == 0.25
    assert hooked.failed
    with pytest.raises(ZeroDivisionError):
        hooked.raise_error_of_hook()
    hooked.raise_error_of_hook()
    assert not hooked.failed
