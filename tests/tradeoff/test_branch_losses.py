# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from refused import refused
from tiers import slow

from noisescale.tradeoff.branch_losses import LOSS_SCATTER, fit_branch_losses

SIZES = [64, 256, 1024, 4096]


def loss(batch_size: float, drop: float = 0.1, critical: float = 500.0) -> float:
    return 2 + drop * batch_size / (batch_size + critical)


@pytest.mark.parametrize(("sweeps", "least"), [(60, 0.9), slow(300, 0.92)])
def test_the_interval_holds_the_truth_as_often_as_it_says(sweeps: int, least: float) -> None:
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(sweeps):
        losses = [loss(b) + generator.normal(0, 0.005) for b in SIZES]
        found = fit_branch_losses(SIZES, losses, 0.005).critical_batch_size
        held += found.low <= 500 <= found.high

    assert least <= held / sweeps <= 0.99


def test_orders_that_are_paired_tell_the_scatter_without_what_they_have_in_common() -> None:
    """The second order is worse by 0.05 throughout; what is left is 0.001 up and down."""
    sizes, wobble = [*SIZES, *SIZES], [0.001, -0.001, 0.001, -0.001]
    losses = [*(loss(b) + w for b, w in zip(SIZES, wobble, strict=True))]
    losses += [loss(b) - w + 0.05 for b, w in zip(SIZES, wobble, strict=True)]

    paired = fit_branch_losses(sizes, losses, orders=[*("a" for _ in SIZES), *("b" for _ in SIZES)])

    # Residuals of 0.001 each, 8 of them with (4 - 1)·(2 - 1) degrees of freedom.
    assert paired.scatter == pytest.approx(0.001 * (8 / 3) ** 0.5)
    assert fit_branch_losses(sizes, losses).scatter > 0.02
    assert fit_branch_losses(SIZES, losses[:4]).scatter == LOSS_SCATTER  # without repeats
    with refused("orders"):
        fit_branch_losses(sizes, losses, orders=["a"] * len(sizes))


def test_a_batch_size_keeps_up_only_with_all_smaller_ones() -> None:
    """None is worse than the one before by 0.01, the third is than the first."""
    found = fit_branch_losses([512, 64, 128, 256], [2.524, 2.500, 2.508, 2.516])

    assert found.keeping_up == 128
    assert fit_branch_losses([64, 128, 256], [2.5, 2.6, 2.5]).keeping_up is None
    assert fit_branch_losses([64, 128, 256], [2.5, 2.5, 2.5]).keeping_up == 256
    falling = fit_branch_losses(SIZES, [2.0, 1.9, 1.8, 1.7], 0.01)
    assert falling.critical_batch_size.high == np.inf
