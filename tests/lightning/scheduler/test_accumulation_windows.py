# SPDX-License-Identifier: Apache-2.0
"""Every step's gradient is the mean over the batches of its window, however windows change."""

import copy
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
from fits import fit
from hypothesis import given, settings
from hypothesis import strategies as st
from named_batches import Asks, Names, fitted, mean_of, names, windows
from tiers import slow_but
from torch import Tensor

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.scheduling.accumulation import Accumulation

SEVEN_BATCHES = (3, 2, 5, 1, 2, 4)  # several windows of epochs of seven batches are cut short


def asks(lengths: Sequence[int], of_one: float = 2.0) -> BatchSizeScheduler:
    return BatchSizeScheduler(Asks(lengths, of_one=of_one), max_batch_size=10**6)


def check_means(gradients: Any, expected: Sequence[range], of_rank: Any, examples: int) -> None:
    assert len(gradients) == len(expected)
    for window, gradient in zip(expected, gradients, strict=True):
        np.testing.assert_allclose(gradient, mean_of(window, of_rank, examples), rtol=1e-12)


@settings(max_examples=20, derandomize=True)
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
    module, data = Names(examples), names(examples, 2, sized=sized)

    fitted(
        asks(lengths),
        module=module,
        data=data,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
    )

    assert module.arrived == module.arrived[:batches] * epochs
    check_means(module.gradients, windows(batches, epochs, lengths), [module.arrived], examples)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_on_two_ranks_it_is_the_mean_over_both(sized: bool) -> None:
    """A stream is alike on both, a data set is dealt out."""
    examples = 28 if sized else 14

    results = fit(
        asks(SEVEN_BATCHES, of_one=4.0),
        model=Names(examples),
        train_loader=names(examples, 2, sized=sized),
        max_epochs=3,
        results=lambda _, module: (module.arrived, module.gradients),
    )

    of_rank = [arrived for arrived, _ in results]
    for _, gradients in results:
        check_means(gradients, windows(7, 3, SEVEN_BATCHES), of_rank, examples)


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
    """In a stream it is a mean before it is clipped: of k batches of one |g|² is 1/k."""
    divisors, module = Divisors(), Names(7)

    data = names(7, sized=sized)
    fitted(asks((3,), of_one=1.0), divisors, module=module, data=data, gradient_clip_val=0.3)

    assert divisors.seen == [3] * 6 + [last]
    norms = [math.hypot(*gradient) for gradient in module.gradients]
    assert norms == pytest.approx([0.3] * 3, rel=1e-5)


def measured(norms: StepNorms) -> tuple[float | None, ...]:
    return norms.small_sq_norm, norms.big_sq_norm, norms.small_batch, norms.big_batch


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_the_monitor_measures_short_windows_too(
    sized: bool, scheduler_first: bool, recorded: list[StepNorms]
) -> None:
    """Whichever is given first it sees gradients before they are rescaled, and knows the divisor.

    A batch of n has |g|² = 1/n, the mean of k of them 1/(n·k).
    """
    callbacks = [asks((3, 5, 2, 4)), NoiseScaleMonitor(small_batch="micro_batch")]

    fitted(
        *(callbacks if scheduler_first else callbacks[::-1]),
        module=Names(14),
        data=names(14, 2, sized=sized),
        accumulate_grad_batches=3,
        max_epochs=2,
    )

    lengths = [3, 4, 2, 4, 1]  # of 3, 5; of 2, 4, 3
    assert [len(w) for w in windows(7, 2, (3, 5, 2, 4))] == lengths
    assert [norms.examples for norms in recorded] == [2.0 * k for k in lengths]
    for norms, k in zip(recorded, lengths, strict=True):
        assert measured(norms) == pytest.approx((1 / 2, 1 / 2 / k, 2, 2 * k), rel=1e-6)


def test_the_monitor_measures_short_windows_on_two_ranks(recorded: list[StepNorms]) -> None:
    """A rank's gradient of k batches of n has |g|² = 1/(n·k), their mean over ranks half of it."""
    results = fit(
        asks((3, 5, 2, 4), of_one=4.0),
        NoiseScaleMonitor(small_batch="rank"),
        model=Names(28),
        train_loader=names(28, 2),
        max_epochs=2,
        results=lambda *_: list(recorded),
    )

    for of_rank in results:
        for norms, k in zip(of_rank, [3, 4, 2, 4, 1], strict=True):
            expected = (1 / 2 / k, 1 / 4 / k, 2 * k, 4 * k)
            assert measured(norms) == pytest.approx(expected, rel=1e-6)


def test_validation_within_a_window_leaves_its_gradients() -> None:
    """Lightning clears gradients before it validates, unless it believes to be accumulating."""

    class Validated(Names):
        def validation_step(self, batch: Tensor) -> None:
            pass

    module, data = Validated(14), names(14, 2)

    fitted(
        asks(SEVEN_BATCHES),
        module=module,
        data=data,
        validation=names(4, 2),
        val_check_interval=1,
        max_epochs=3,
    )

    check_means(module.gradients, windows(7, 3, SEVEN_BATCHES), [module.arrived], 14)


class SavesAfter(L.Callback):
    """Write a checkpoint once so many batches are through, wherever the window is."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches = batches
        self.path = path

    def on_train_batch_end(self, fitting: Any, *arguments: Any) -> None:
        if fitting.fit_loop.total_batch_idx + 1 == self.batches:
            fitting.save_checkpoint(self.path)


@pytest.mark.parametrize("batches", slow_but(range(1, 15), 1, 5, 7))
def test_a_fit_resumed_anywhere_begins_with_a_whole_window(tmp_path: Path, batches: int) -> None:
    """Gradients are in no checkpoint: what a window had before it is lost, and counts for none.

    Lightning begins an unstateful loader anew, and takes as many batches as were left.
    """
    path = tmp_path / "saved.ckpt"
    module, options = Names(14), {"data": names(14, 2), "max_epochs": 3}
    fitted(asks(SEVEN_BATCHES), SavesAfter(batches, path), module=Names(14), **options)
    fitted(asks(SEVEN_BATCHES), module=module, ckpt_path=path, **options)

    done = sum(window.stop <= batches for window in windows(7, 3, SEVEN_BATCHES))
    lengths = [SEVEN_BATCHES[(done + i) % 6] for i in range(21)]
    first_epoch = windows(7 - batches % 7, 1, lengths)
    rest = windows(7, (21 - batches) // 7 - (batches % 7 == 0), lengths[len(first_epoch) :])
    begin = first_epoch[-1].stop
    expected = [*first_epoch, *(range(w.start + begin, w.stop + begin) for w in rest)]
    assert len(module.arrived) == 21 - batches
    check_means(module.gradients, expected, [module.arrived], 14)


def test_the_beginning_of_a_window_is_copied_with_it_and_a_pickle_needs_no_package() -> None:
    copied = copy.deepcopy({"window": Accumulation(3, 5)})["window"]
    pickled = pickle.dumps(Accumulation(3, 5))

    assert (copied, copied.begin, 7 % copied) == (3, 5, 2)
    assert pickle.loads(pickled) == 3
    assert b"noisescale" not in pickled
