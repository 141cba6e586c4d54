# SPDX-License-Identifier: Apache-2.0
"""The training loss that a policy gets in a fit, and where the batch that it finds begins."""

from typing import Any

import pytest
from fits import classifier, fit_here, loader
from torch.nn import functional

from noisescale import BatchSizeScheduler
from noisescale.tradeoff.budget import slice_of

EXAMPLES, EPOCHS, BATCH = 2_000, 4, 2
FIRST = EXAMPLES * EPOCHS / 2000


def fitted(scheduler: BatchSizeScheduler, **options: Any) -> list[tuple[float, float, int]]:
    """The share of the run, the loss and the examples of each batch, as the module has them."""
    seen: list[tuple[float, float, int]] = []
    module = classifier()
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        fit = scheduler._fit
        assert fit is not None
        share = fit.controller.clock.share(fit.controller.steps)
        seen.append((share or 0.0, loss.item(), len(batch[0])))
        return loss

    module.training_step = training_step
    epochs = {"max_steps": -1, "max_epochs": EPOCHS}
    data = loader(BATCH, EXAMPLES)
    fit_here(scheduler, model=module, train_loader=data, **epochs, **options)
    return seen


@pytest.mark.parametrize("accumulate", [1, 5])
def test_losses_are_undivided_and_the_batch_begins_with_half_a_thousandth(accumulate: int) -> None:
    scheduler = BatchSizeScheduler("find", max_batch_size=512)
    seen = fitted(scheduler, accumulate_grad_batches=accumulate)

    assert scheduler.plan is not None
    assert (scheduler.moves[0].step, scheduler.moves[0].after.batch_size) == (0, FIRST)
    fit = scheduler._fit
    assert fit is not None
    slices = fit.controller.losses.slices
    assert [one.number for one in slices] == list(range(10))
    for one in slices:
        own = [(loss, n) for share, loss, n in seen if slice_of(share) == one.number]
        mean = sum(loss * n for loss, n in own) / sum(n for _, n in own)
        assert one.loss == pytest.approx(mean, rel=1e-6)


def test_a_loss_that_has_a_floor_leaves_the_batch_at_half_a_thousandth() -> None:
    scheduler, module = BatchSizeScheduler("find"), classifier()

    def smooth(batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return functional.cross_entropy(module.net(x), y, label_smoothing=0.1)

    module.training_step = smooth
    epochs = {"max_steps": -1, "max_epochs": EPOCHS}
    fit_here(scheduler, model=module, train_loader=loader(BATCH, EXAMPLES), **epochs)

    assert [move.after.batch_size for move in scheduler.moves] == [FIRST]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({}, "pass `max_examples=800`"),
        ({"max_examples": 9e3}, "fewer steps, leave `max_steps` out"),
    ],
)
def test_where_steps_end_the_run_the_batch_stays(given: Any, remedy: str) -> None:
    scheduler = BatchSizeScheduler("find", **given)
    with pytest.warns(UserWarning, match=remedy):
        fit_here(scheduler, train_loader=loader(BATCH, EXAMPLES), max_steps=400)

    assert scheduler.moves == []
