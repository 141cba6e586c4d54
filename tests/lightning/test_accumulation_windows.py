# SPDX-License-Identifier: Apache-2.0
"""Every step's gradient is the mean over the batches of its window, however windows change."""

from typing import Any

import numpy as np
import pytest
from fits import fit, trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from named_batches import Asks, Names, mean_of, names, windows
from torch.utils.data import DistributedSampler

from noisescale import BatchSizeScheduler

NO_LIMIT: dict[str, Any] = {"max_batch_size": 10**6}


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
    of_rank = [module.arrived[:batches]]
    assert module.arrived == of_rank[0] * epochs
    assert len(module.gradients) == len(expected)
    for window, gradient in zip(expected, module.gradients, strict=True):
        np.testing.assert_allclose(gradient, mean_of(window, of_rank, examples), rtol=1e-12)
