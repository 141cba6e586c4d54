# SPDX-License-Identifier: Apache-2.0
"""Every step's gradient is the mean over the batches of its window, however windows change."""

import math
from typing import Any

import numpy as np
import pytest
from fits import fit, trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from named_batches import Asks, Names, mean_of, names, windows

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

NO_LIMIT: dict[str, Any] = {"max_batch_size": 10**6}

SEVEN_BATCHES = (3, 2, 5, 1, 2, 4)  # several windows of epochs of seven batches are cut short


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    batches=st.integers(1, 11),
    epochs=st.integers(1, 3),
    accumulate=st.integers(1, 4),
    last=st.integers(1, 2),
    sized=st.booleans(),
)
def test_every_gradient_is_the_mean_over_its_window(
    lengths: list[int], batches: int, epochs: int, accumulate: int, last: int, sized: bool
) -> None:
    """No batch is lost, none counts twice; the short last window of an epoch is a mean, too."""
    examples = 2 * (batches - 1) + last  # the last batch may be short
    module = Names(examples)
    scheduler = BatchSizeScheduler(Asks(lengths, of_one=2.0), **NO_LIMIT)

    trainer(
        1,
        strategy="auto",
        callbacks=[scheduler],
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
    ).fit(module, names(examples, 2, sized=sized))

    expected = windows(batches, epochs, lengths)
    of_rank = [module.arrived]
    assert module.arrived == module.arrived[:batches] * epochs
    assert len(module.gradients) == len(expected)
    for window, gradient in zip(expected, module.gradients, strict=True):
        np.testing.assert_allclose(gradient, mean_of(window, of_rank, examples), rtol=1e-12)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_on_two_ranks_it_is_the_mean_over_both(sized: bool) -> None:
    """A stream is alike on both, a data set is dealt out."""
    examples, batches, epochs = (28, 7, 3) if sized else (14, 7, 3)

    results = fit(
        BatchSizeScheduler(Asks(SEVEN_BATCHES, of_one=4.0), **NO_LIMIT),
        model=Names(examples),
        train_loader=names(examples, 2, sized=sized),
        max_epochs=epochs,
        results=lambda _, module: (module.arrived, module.gradients),
    )

    of_rank = [arrived for arrived, _ in results]
    expected = windows(batches, epochs, SEVEN_BATCHES)
    for _, gradients in results:
        assert len(gradients) == len(expected)
        for window, gradient in zip(expected, gradients, strict=True):
            np.testing.assert_allclose(gradient, mean_of(window, of_rank, examples), rtol=1e-12)


def test_the_short_window_of_a_stream_is_a_mean_before_it_is_clipped() -> None:
    """|g|² of k batches of one is 1/k: all are clipped to 0.3."""
    module = Names(7)
    scheduler = BatchSizeScheduler(Asks((3,)), **NO_LIMIT)

    trainer(1, strategy="auto", callbacks=[scheduler], gradient_clip_val=0.3).fit(
        module, names(7, sized=False)
    )

    norms = [math.hypot(*gradient) for gradient in module.gradients]
    assert norms == pytest.approx([0.3] * 3, rel=1e-5)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_the_monitor_measures_short_windows_too(
    sized: bool, scheduler_first: bool, recorded: list[StepNorms]
) -> None:
    """Whichever is given first it sees gradients before they are rescaled, and knows the divisor.

    A batch of n has |g|² = 1/n, the mean of k of them 1/(n·k).
    """
    callbacks = [
        BatchSizeScheduler(Asks((3, 5, 2, 4), of_one=2.0), **NO_LIMIT),
        NoiseScaleMonitor(small_batch="micro_batch"),
    ]
    module = Names(14)

    trainer(
        1,
        strategy="auto",
        callbacks=callbacks if scheduler_first else callbacks[::-1],
        accumulate_grad_batches=3,
        max_epochs=2,
    ).fit(module, names(14, 2, sized=sized))

    lengths = [3, 4, 2, 4, 1]  # of 3, 5; of 2, 4, 3
    assert [len(w) for w in windows(7, 2, (3, 5, 2, 4))] == lengths
    assert [norms.examples for norms in recorded] == [2.0 * k for k in lengths]
    for norms, k in zip(recorded, lengths, strict=True):
        measured = (norms.small_sq_norm, norms.big_sq_norm, norms.small_batch, norms.big_batch)
        assert measured == pytest.approx((1 / 2, 1 / 2 / k, 2, 2 * k), rel=1e-6)


def test_the_monitor_measures_short_windows_on_two_ranks(recorded: list[StepNorms]) -> None:
    """A rank's gradient of k batches of n has |g|² = 1/(n·k), their mean over ranks half of it."""
    results = fit(
        BatchSizeScheduler(Asks((3, 5, 2, 4), of_one=4.0), **NO_LIMIT),
        NoiseScaleMonitor(small_batch="rank"),
        model=Names(28),
        train_loader=names(28, 2),
        max_epochs=2,
        results=lambda *_: list(recorded),
    )

    for of_rank in results:
        for norms, k in zip(of_rank, [3, 4, 2, 4, 1], strict=True):
            measured = (norms.small_sq_norm, norms.big_sq_norm, norms.small_batch, norms.big_batch)
            assert measured == pytest.approx((1 / 2 / k, 1 / 4 / k, 2 * k, 4 * k), rel=1e-6)
