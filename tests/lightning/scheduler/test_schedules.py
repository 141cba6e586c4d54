# SPDX-License-Identifier: Apache-2.0
"""Learning rates: the optimizer sees the factor, schedules never do, and the clock keeps them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
from fits import classifier, fit_here, loader
from named_batches import Asks, Names, Stops, fitted, names, rates_in_a_plain_loop, windows
from tiers import slow
from torch.optim import lr_scheduler

from noisescale import BatchSizeScheduler, NoiseScaleMonitor

LENGTHS = (1, 3, 2, 6, 2)

Schedule = Callable[[Any, Any], Any]


def exponential(optimizer: Any, _: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


def in_parts(optimizer: Any, _: Any) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


def every_step(schedule: Schedule, **options: Any) -> Schedule:
    return lambda optimizer, of: {
        "scheduler": schedule(optimizer, of),
        "interval": "step",
        **options,
    }


def of_pairs(
    *callbacks: Any, schedule: Any = None, batches: int = 12, kind: Any = Names, **options: Any
) -> Names:
    """The module after a run in this process on batches of two."""
    module: Names = kind(2 * batches, schedule)
    data = names(2 * batches, 2, sized=options.pop("sized", True))
    fitted(*callbacks, module=module, data=data, **options)
    return module


def of_eights(*callbacks: Any, schedule: Any = None, examples: int = 320, **options: Any) -> Any:
    """The module and its Trainer after a run in this process, on two batches of 8 a step."""

    class Scheduled(type(classifier())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [every_step(schedule)(optimizer, self.trainer)] if schedule else []

    module = Scheduled()
    options = {"accumulate_grad_batches": 2, **options}
    return module, fitted(*callbacks, module=module, data=loader(8, examples), **options)


def scheduler(lengths: Sequence[int] = LENGTHS, **options: Any) -> BatchSizeScheduler:
    return BatchSizeScheduler(
        Asks(lengths, of_one=2.0), max_batch_size=10**6, **{"lr_scaling": "linear", **options}
    )


def test_the_optimizer_steps_with_the_factor() -> None:
    module = of_pairs(scheduler(lr_scaling="sqrt"), max_epochs=2)

    lengths = [1, 3, 2, 6, 2, 1, 3, 2, 4]  # the last one is short: its factor is that of its plan
    wanted = [1, 3, 2, 6, 2, 1, 3, 2, 6]
    assert [sum(map(bool, g)) for g in module.gradients] == [2 * n for n in lengths]
    assert module.rates == pytest.approx([0.1 * math.sqrt(k) for k in wanted], rel=1e-12)
    assert module.optimizer.param_groups[0]["lr"] == 0.1


def test_schedules_by_steps_are_what_they_are_without_the_factor_and_drift() -> None:
    with pytest.warns(UserWarning, match="counts optimizer steps") as warned:
        module = of_pairs(scheduler(progress="steps"), schedule=every_step(in_parts), max_epochs=4)

    steps = len(windows(12, 4, LENGTHS))
    factors = [LENGTHS[step % len(LENGTHS)] for step in range(steps)]
    without = [rate / k for rate, k in zip(module.rates, factors, strict=True)]
    assert without == pytest.approx(rates_in_a_plain_loop(in_parts, steps)[:-1], rel=1e-12)
    assert sum("counts optimizer steps" in str(w.message) for w in warned) == 1


class Plateau(Names):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("flat", 1.0)
        return super().training_step(batch, batch_idx)


def by_plateau(interval: str, **options: Any) -> Schedule:
    def made(optimizer: Any, _: Any) -> Any:
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"scheduler": plateau, "monitor": "flat", "interval": interval, **options}

    return made


def by_epochs(optimizer: Any, _: Any) -> Any:
    return {"scheduler": lr_scheduler.StepLR(optimizer, 2, gamma=0.5), "interval": "epoch"}


@pytest.mark.parametrize(
    ("schedule", "of_epoch"),
    [(by_plateau("epoch"), [1, 1, 0.5, 0.25]), (by_epochs, [1, 1, 0.5, 0.5])],
)
def test_plateaus_and_epochs_are_counted_as_ever(schedule: Schedule, of_epoch: list[float]) -> None:
    """ReduceLROnPlateau waits for a metric, StepLR by epochs for epochs: the clock leaves both."""
    callback = scheduler((2, 4, 6), progress="examples", lr_scaling="none")

    module = of_pairs(callback, kind=Plateau, schedule=schedule, max_epochs=4)

    assert module.rates == pytest.approx([0.1 * f for f in of_epoch for _ in range(3)])


def test_a_metric_by_every_kth_step_is_waited_for_at_any_batch_size() -> None:
    """From batch 1 on windows of 2 end with batches 3, 5, ..., of which none is a multiple of 2."""
    callback = BatchSizeScheduler({0: 2, 1: 4}, max_batch_size=4, lr_scaling="none")

    every_second = by_plateau("step", frequency=2)
    module = of_pairs(callback, kind=Plateau, schedule=every_second, batches=13)

    assert module.rates == [0.1 * f for f in (1, 1, 1, 1, 0.5, 0.5, 0.25)]


def cosine(optimizer: Any, of: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, int(of.estimated_stepping_batches))


def one_cycle(optimizer: Any, of: Any) -> Any:
    """Raises when it is stepped once too often."""
    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=of.estimated_stepping_batches)


class Watches:
    """The learning rates that a schedule gives, and how often it was stepped."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self, optimizer: Any, of: Any) -> Any:
        self.made = self._schedule(optimizer, of)
        self.total = of.estimated_stepping_batches
        return {"scheduler": self.made, "interval": "step"}


@pytest.mark.parametrize(
    ("lengths", "batches", "epochs", "accumulate", "rows"),
    [([9], 13, 3, 1, 32), ([1, 4, 2], 7, 2, 3, None), ([5, 1], 11, 3, 2, 3)],
)
def test_a_schedule_ends_with_the_last_epoch(
    lengths: list[int], batches: int, epochs: int, accumulate: int, rows: int | None
) -> None:
    """However many steps there were, of however large batches of the loader."""
    for schedule, progress in ((cosine, "examples"), (one_cycle, None)):
        watched = Watches(schedule)
        of_pairs(
            scheduler(lengths, progress=progress, max_device_batch_size=rows),
            schedule=watched,
            batches=batches,
            max_epochs=epochs,
            accumulate_grad_batches=accumulate,
        )

        # OneCycleLR is at its end one step before the last: that is what torch has it do.
        assert watched.made.last_epoch == watched.total
        if schedule is cosine:
            assert watched.made.get_last_lr() == pytest.approx([0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("counts", "sized", "progress"),
    [  # each value once or more
        ((12, 3, 1), True, None),
        ((11, 1, 1), False, "steps"),
        ((11, 3, 1), True, "examples"),
        ((11, 3, 2), False, "gain"),
        *(slow((11, 3, 2), True, progress) for progress in (None, "steps", "examples")),
    ],
)
@pytest.mark.filterwarnings("ignore:NoiseScaleMonitor has nothing to measure")
def test_where_the_batch_size_stays_every_rate_is_identical(
    counts: tuple[int, int, int], sized: bool, progress: Any
) -> None:
    """Lightning compares a frequency with the number of batches in the epoch."""
    batches, accumulate, frequency = counts

    def rates(*callbacks: Any) -> list[float]:
        return of_pairs(
            *callbacks,
            schedule=every_step(in_parts, frequency=frequency),
            batches=batches,
            sized=sized,
            accumulate_grad_batches=accumulate,
            max_epochs=3,
        ).rates

    assert rates(scheduler((accumulate,), progress=progress)) == rates()


def test_by_examples_a_schedule_is_as_far_as_the_examples_are() -> None:
    """At a base of one batch and every second step it was stepped n // 2 times before batch n."""
    module = of_pairs(
        scheduler((1, 3, 2), progress="examples", lr_scaling="none"),
        schedule=every_step(exponential, frequency=2),
    )

    begins = np.array([window.start for window in windows(12, 1, (1, 3, 2))])
    assert module.rates == pytest.approx(0.1 * 0.9 ** (begins // 2), rel=1e-12)


@pytest.mark.parametrize(
    ("lengths", "most", "epochs", "steps"),
    [
        # 20 steps of four batches are 6.7 epochs, whatever the batch size becomes.
        ((8,), 20, -1, 20),
        ((1, 2, 3), 20, 1000, 20),
        ((8,), 10, 4, 8),  # 4 epochs of 2 steps: they end the run, at first the 10 steps would
        ((1,), 10, 4, 10),
    ],
)
def test_where_steps_or_epochs_end_the_run_a_schedule_ends_with_the_first_of_them(
    lengths: Sequence[int], most: int, epochs: int, steps: int
) -> None:
    watched = Watches(one_cycle)
    options: dict[str, Any] = {"max_steps": most, "max_epochs": epochs}

    module = of_pairs(scheduler(lengths), schedule=watched, accumulate_grad_batches=4, **options)

    assert len(module.rates) == steps
    assert watched.made.last_epoch == watched.total == most


@pytest.mark.parametrize(
    "limits", [{"max_epochs": 3}, {"max_epochs": -1, "max_time": {"hours": 1}}]
)
def test_without_a_known_end_a_schedule_goes_by_examples(limits: dict[str, Any]) -> None:
    """A stream has no length, and nobody knows how many steps an hour has."""

    def by_hand(optimizer: Any, _: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=3 * 12)

    watched = Watches(by_hand)

    of_pairs(scheduler(), Stops(epochs=3), schedule=watched, sized=False, **limits)

    assert watched.made.last_epoch == 3 * 12


IS_OVER = "ended before the run"


def test_by_gains_a_schedule_that_is_over_stays_at_its_end() -> None:
    """Half the batch is worth more than half a step: the last steps are past what it is for."""
    watched = Watches(one_cycle)
    callback = scheduler((2,), progress="gain", lr_scaling="none")

    with pytest.warns(UserWarning, match=IS_OVER) as warned:
        module = of_pairs(callback, schedule=watched, accumulate_grad_batches=4, max_epochs=4)

    assert len(module.rates) == 24
    assert watched.made.last_epoch == watched.total == 12
    assert module.rates[-1] == module.optimizer.param_groups[0]["lr"]
    assert sum(IS_OVER in str(w.message) for w in warned) == 1


def in_a_chain(optimizer: Any, of: Any) -> Any:
    return lr_scheduler.ChainedScheduler([one_cycle(optimizer, of)])


def in_a_sequence(optimizer: Any, of: Any) -> Any:
    rest = of.estimated_stepping_batches - 5
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=rest),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


@pytest.mark.parametrize("schedule", [in_a_chain, in_a_sequence])
@pytest.mark.filterwarnings("ignore:The learning-rate schedule counts optimizer steps")
def test_more_optimizer_steps_than_a_schedule_has_do_not_end_the_run(schedule: Any) -> None:
    with pytest.warns(UserWarning, match=IS_OVER):
        module = of_pairs(
            scheduler((1,), progress="steps", lr_scaling="none"),
            schedule=every_step(schedule),
            accumulate_grad_batches=2,
            max_epochs=3,
        )

    assert len(module.rates) == 36
    assert len(set(module.rates[18:])) == 1


def test_a_schedule_that_another_callback_brings_replaces_the_first() -> None:
    """As averaging of weights does: what it replaces is not stepped any more."""

    class Swaps(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                (config,) = trainer.lr_scheduler_configs
                made = lr_scheduler.ConstantLR(config.scheduler.optimizer, 0.5, total_iters=10**6)
                trainer.strategy.lr_scheduler_configs = [type(config)(made, interval="step")]

    watched = Watches(exponential)
    module = of_pairs(scheduler((3,), lr_scaling="none"), Swaps(), schedule=watched, max_epochs=2)

    assert watched.made.last_epoch == 12
    assert len(set(module.rates[4:])) == 1


def test_the_modules_own_hook_steps_it_as_often_as_it_is_due() -> None:
    seen: list[int] = []

    class Own(Names):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            seen.append(self.global_step)
            super().lr_scheduler_step(scheduler, metric)

    of_pairs(scheduler((2, 4)), kind=Own, schedule=every_step(exponential))

    assert seen == [1] * 2 + [2] * 4 + [3] * 2 + [4] * 4


def test_by_gains_a_schedule_goes_as_far_as_steps_are_worth() -> None:
    """AdaScale: a step of gain r moves the schedule by r steps, and has r times its rate."""
    rates: list[float] = []
    factors: list[float] = []

    class Notes(L.Callback):
        def on_before_optimizer_step(self, fitting: Any, module: Any, optimizer: Any) -> None:
            factors.append(fitting.callback_metrics["batch_size/lr_factor"].item())
            rates.append(optimizer.param_groups[0]["lr"] * factors[-1])

    of_eights(
        BatchSizeScheduler({0: 16, 6: 64, 12: 48}, 8, 64, lr_scaling="adascale", progress="gain"),
        NoiseScaleMonitor(),
        Notes(),
        schedule=lambda optimizer, _: lr_scheduler.ExponentialLR(optimizer, 0.99),
        max_epochs=2,
        log_every_n_steps=1,
    )

    assert len(set(factors)) > 3
    assert 1 < max(factors) < 4
    passed = np.cumsum([0, *factors[:-1]])
    steps = np.floor(passed + 1e-4)
    assert np.abs(passed - steps)[7:].min() > 1e-3  # where rounding would decide it
    assert rates == pytest.approx(0.1 * 0.99**steps * factors, rel=1e-5)


@pytest.mark.parametrize(
    ("policy", "schedule", "said"),
    [
        ("seesaw", None, "has no schedule"),
        ("seesaw", lambda o, _: lr_scheduler.ConstantLR(o, 0.5, total_iters=3), "never lowers"),
        ("seesaw", lambda o, _: lr_scheduler.CosineAnnealingWarmRestarts(o, 4), "again 2 times"),
    ],
    ids=["none", "rises", "restarts"],
)
def test_a_seesaw_says_what_it_makes_of_a_schedule_that_does_not_fall(
    policy: Any, schedule: Any, said: str
) -> None:
    made = None if schedule is None else every_step(schedule)

    with pytest.warns(UserWarning, match=said):
        of_pairs(BatchSizeScheduler(policy), Stops(steps=1), schedule=made)


def test_auto_says_once_where_the_learning_rate_is_no_guide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit_here(BatchSizeScheduler(), train_loader=loader(64, 2_560), max_steps=-1, max_epochs=1)

    assert capsys.readouterr().out.count("so the learning rate is no guide") == 1


@pytest.mark.parametrize(
    ("options", "ends_by", "shares"),
    [
        ({"max_epochs": 2}, "examples", [0, 1 / 4, 1 / 2, 3 / 4]),
        ({"max_steps": 8, "max_epochs": -1}, "steps", [k / 8 for k in range(8)]),
        ({"max_epochs": -1, "max_time": "00:01:00:00"}, None, [None, None]),
    ],
)
def test_a_policy_knows_how_much_of_the_run_is_over(
    options: dict[str, Any], ends_by: str | None, shares: list[float | None]
) -> None:
    seen: list[Any] = []

    def policy(noise_scale: Any, plan: Any, progress: Any) -> float:
        seen.append((progress.share, progress.ends_by))
        return 40.0

    callback = BatchSizeScheduler(policy, max_batch_size=40, lr_scaling="none")
    stops = [Stops(epochs=1)] if ends_by is None else []
    of_eights(callback, *stops, examples=80, accumulate_grad_batches=5, **options)

    assert {by for _, by in seen} == {ends_by}
    assert [share for share, _ in seen] == (pytest.approx(shares) if ends_by else shares)


def test_examples_end_the_fit_and_its_schedule() -> None:
    seen: list[int] = []

    class Counts(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            seen.append(int(trainer.accumulate_grad_batches))

    module, _ = of_eights(
        BatchSizeScheduler(
            {0: 16, 4: 48}, lr_scaling="none", max_examples="0.64k", min_batch_size=8
        ),
        Counts(),
        schedule=lambda optimizer, _: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=40),
        examples=800,
        max_steps=40,
        max_epochs=-1,
    )

    assert seen == [2, 2, 2, 2, *[6] * 12]  # 4 x 16 and 12 x 48 are 640
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)


def test_the_last_step_takes_the_examples_that_are_left() -> None:
    callback = BatchSizeScheduler({0: 16, 4: 48}, max_examples=64 + 48 + 20)

    _, fitting = of_eights(callback, examples=800, max_epochs=3)

    assert fitting.global_step == 6
    assert fitting.fit_loop.epoch_loop.total_batch_idx + 1 == 8 + 6 + 3


def test_a_number_of_steps_takes_more_examples_for_a_larger_batch_and_says_so() -> None:
    with pytest.warns(UserWarning, match="`max_examples=96`"):
        of_eights(BatchSizeScheduler({0: 16, 2: 48}), max_steps=6, max_epochs=-1)
