# SPDX-License-Identifier: Apache-2.0
"""Every step's gradient is the mean over the batches of its window, however windows change."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
from fits import fit, trainer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from named_batches import Asks, Names, mean_of, names, windows
from torch import Tensor

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.scheduling.accumulation import Accumulation

NO_LIMIT: dict[str, Any] = {"max_batch_size": 10**6}

SEVEN_BATCHES = (3, 2, 5, 1, 2, 4)  # several windows of epochs of seven batches are cut short


@settings(max_examples=40, derandomize=True)
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
@settings(max_examples=15, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    batches=st.integers(1, 11),
)
@example(lengths=list(SEVEN_BATCHES), batches=7)
def test_on_two_ranks_it_is_the_mean_over_both(
    sized: bool, lengths: list[int], batches: int
) -> None:
    """A stream is alike on both, a data set is dealt out."""
    examples, epochs = (4 * batches if sized else 2 * batches), 3

    results = fit(
        BatchSizeScheduler(Asks(lengths, of_one=4.0), **NO_LIMIT),
        model=Names(examples),
        train_loader=names(examples, 2, sized=sized),
        max_epochs=epochs,
        results=lambda _, module: (module.arrived, module.gradients),
    )

    of_rank = [arrived for arrived, _ in results]
    expected = windows(batches, epochs, lengths)
    for _, gradients in results:
        assert len(gradients) == len(expected)
        for window, gradient in zip(expected, gradients, strict=True):
            np.testing.assert_allclose(gradient, mean_of(window, of_rank, examples), rtol=1e-12)


class Divisors(L.Callback):
    """Note what each loss is divided by."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_before_backward(self, fitting: Any, *_: Any) -> None:
        self.seen.append(int(fitting.accumulate_grad_batches))


@pytest.mark.parametrize(("sized", "last"), [(True, 1), (False, 3)], ids=["sized", "stream"])
def test_a_short_window_begins_with_its_true_length_where_it_is_known(
    sized: bool, last: int
) -> None:
    divisors = Divisors()

    trainer(
        1, strategy="auto", callbacks=[BatchSizeScheduler(Asks((3,)), **NO_LIMIT), divisors]
    ).fit(Names(7), names(7, sized=sized))

    assert divisors.seen == [3] * 6 + [last]


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


def test_validation_within_a_window_leaves_its_gradients() -> None:
    """Lightning clears gradients before it validates, unless it believes to be accumulating."""

    class Validated(Names):
        def validation_step(self, batch: Tensor) -> None:
            pass

    module = Validated(14)
    trainer(
        1,
        strategy="auto",
        callbacks=[BatchSizeScheduler(Asks(SEVEN_BATCHES, of_one=2.0), **NO_LIMIT)],
        val_check_interval=1,
        max_epochs=3,
    ).fit(module, names(14, 2), names(4, 2))

    for window, gradient in zip(windows(7, 3, SEVEN_BATCHES), module.gradients, strict=True):
        np.testing.assert_allclose(gradient, mean_of(window, [module.arrived], 14), rtol=1e-12)


class SavesAfter(L.Callback):
    """Write a checkpoint once so many batches are through, wherever the window is."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches = batches
        self.path = path

    def on_train_batch_end(self, fitting: Any, *arguments: Any) -> None:
        if fitting.fit_loop.total_batch_idx + 1 == self.batches:
            fitting.save_checkpoint(self.path)


@pytest.mark.parametrize("batches", range(1, 15))
def test_a_fit_resumed_anywhere_begins_with_a_whole_window(tmp_path: Path, batches: int) -> None:
    """Gradients are in no checkpoint: what a window had before it is lost, and counts for none.

    Lightning begins an unstateful loader anew, and takes as many batches as were left.
    """
    path = tmp_path / "saved.ckpt"
    policy = Asks(SEVEN_BATCHES, of_one=2.0)
    whole, module = Names(14), Names(14)
    options: dict[str, Any] = {"strategy": "auto", "max_epochs": 3}
    before = BatchSizeScheduler(policy, **NO_LIMIT)
    trainer(1, callbacks=[before, SavesAfter(batches, path)], **options).fit(whole, names(14, 2))
    trainer(1, callbacks=[BatchSizeScheduler(policy, **NO_LIMIT)], **options).fit(
        module, names(14, 2), ckpt_path=path
    )

    done = sum(window.stop <= batches for window in windows(7, 3, SEVEN_BATCHES))
    lengths = [SEVEN_BATCHES[(done + i) % 6] for i in range(21)]
    first_epoch = windows(7 - batches % 7, 1, lengths)
    rest = windows(7, (21 - batches) // 7 - (batches % 7 == 0), lengths[len(first_epoch) :])
    begin = first_epoch[-1].stop
    expected = [*first_epoch, *(range(w.start + begin, w.stop + begin) for w in rest)]
    assert len(module.arrived) == 21 - batches
    for window, gradient in zip(expected, module.gradients, strict=True):
        np.testing.assert_allclose(gradient, mean_of(window, [module.arrived], 14), rtol=1e-12)


def test_the_beginning_of_a_window_is_copied_with_it_and_a_pickle_needs_no_package() -> None:
    copied = copy.deepcopy({"window": Accumulation(3, 5)})["window"]
    pickled = pickle.dumps(Accumulation(3, 5))

    assert (copied, copied.begin, 7 % copied) == (3, 5, 2)
    assert pickle.loads(pickled) == 3
    assert b"noisescale" not in pickled
