# SPDX-License-Identifier: Apache-2.0
"""Learning rates: the optimizer sees the factor, schedules never do, and the clock keeps them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from fits import classifier, loader, trainer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from named_batches import Asks, Names, names, windows
from torch.optim import lr_scheduler

from noisescale import BatchSizeScheduler, NoiseScaleMonitor

LENGTHS = (1, 3, 2, 6, 2)

SCHEDULES: dict[str, Callable[[Any, Any], Any]] = {
    "StepLR": lambda optimizer, _: lr_scheduler.StepLR(optimizer, 3),
    "ExponentialLR": lambda optimizer, _: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "OneCycleLR": lambda optimizer, _: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=30),
    "SequentialLR": lambda optimizer, _: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ],
        [4],
    ),
}


def every_step(schedule: Callable[[Any, Any], Any], **options: Any) -> Callable[[Any, Any], Any]:
    return lambda optimizer, of: {
        "scheduler": schedule(optimizer, of),
        "interval": "step",
        **options,
    }


def fitted(*callbacks: Any, schedule: Any = None, batches: int = 12, **options: Any) -> Names:
    """A run in this process on batches of two."""
    module = Names(2 * batches, schedule)
    loader = names(2 * batches, 2, sized=options.pop("sized", True))
    trainer(1, strategy="auto", callbacks=list(callbacks), **options).fit(module, loader)
    return module


def scheduler(lengths: Sequence[int] = LENGTHS, **options: Any) -> BatchSizeScheduler:
    return BatchSizeScheduler(
        Asks(lengths, of_one=2.0), max_batch_size=10**6, **{"lr_scaling": "linear", **options}
    )


def rates_of_schedule(schedule: Callable[[Any, Any], Any], steps: int) -> list[float]:
    """What torch alone makes of it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    made = schedule(optimizer, None)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return rates


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ("none", lambda k: 1.0),
        ("linear", lambda k: k),
        ("sqrt", math.sqrt),
        (lambda batch_size, base, critical: 1 + batch_size / base, lambda k: 1 + k),
    ],
    ids=["none", "linear", "sqrt", "callable"],
)
def test_the_optimizer_steps_with_the_factor(
    scaling: Any, factor: Callable[[float], float]
) -> None:
    module = fitted(scheduler(lr_scaling=scaling), max_epochs=2)

    lengths = [1, 3, 2, 6, 2, 1, 3, 2, 4]  # the last one is short: its factor is that of its plan
    wanted = [1, 3, 2, 6, 2, 1, 3, 2, 6]
    assert [sum(map(bool, g)) for g in module.gradients] == [2 * n for n in lengths]
    assert module.rates == pytest.approx([0.1 * factor(k) for k in wanted], rel=1e-12)
    assert module.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.filterwarnings("ignore:The learning-rate schedule counts optimizer steps")
def test_schedules_by_steps_are_what_they_are_without_the_factor(
    schedule: Callable[[Any, Any], Any],
) -> None:
    module = fitted(scheduler(progress="steps"), schedule=every_step(schedule), max_epochs=4)

    steps = len(windows(12, 4, LENGTHS))
    factors = [LENGTHS[step % len(LENGTHS)] for step in range(steps)]
    without = [rate / k for rate, k in zip(module.rates, factors, strict=True)]
    assert without == pytest.approx(rates_of_schedule(schedule, steps), rel=1e-12)


def test_plateaus_and_epochs_are_counted_as_ever() -> None:
    """ReduceLROnPlateau waits for a metric, StepLR by epochs for epochs: the clock leaves both."""

    class Plateau(Names):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("flat", 1.0)
            return super().training_step(batch, batch_idx)

    def by_plateau(optimizer: Any, _: Any) -> Any:
        made = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"scheduler": made, "monitor": "flat", "interval": "epoch"}

    def by_epochs(optimizer: Any, _: Any) -> Any:
        return {"scheduler": lr_scheduler.StepLR(optimizer, 2, gamma=0.5), "interval": "epoch"}

    for schedule, of_epoch in ((by_plateau, [1, 1, 0.5, 0.25]), (by_epochs, [1, 1, 0.5, 0.5])):
        module = Plateau(24, schedule)
        callback = scheduler((2, 4, 6), progress="examples", lr_scaling="none")
        trainer(1, strategy="auto", callbacks=[callback], max_epochs=4).fit(module, names(24, 2))

        assert module.rates == pytest.approx([0.1 * f for f in of_epoch for _ in range(3)])


def cosine(optimizer: Any, of: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, of.estimated_stepping_batches)


def one_cycle(optimizer: Any, of: Any) -> Any:
    """Raises when it is stepped once too often."""
    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=of.estimated_stepping_batches)


class Watches:
    """The learning rates that a schedule gives, and how often it was stepped."""

    def __init__(self, schedule: Callable[[Any, Any], Any]) -> None:
        self._schedule = schedule

    def __call__(self, optimizer: Any, of: Any) -> Any:
        self.made = self._schedule(optimizer, of)
        self.total = of.estimated_stepping_batches
        return {"scheduler": self.made, "interval": "step"}


@example(lengths=[9], batches=13, epochs=3, accumulate=1, rows=32)
@settings(max_examples=30, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    batches=st.integers(1, 13),
    epochs=st.integers(1, 3),
    accumulate=st.integers(1, 4),
    rows=st.sampled_from([None, 3, 32]),
)
def test_a_schedule_ends_with_the_last_epoch(
    lengths: list[int], batches: int, epochs: int, accumulate: int, rows: int | None
) -> None:
    """However many steps there were, of however large batches of the loader."""
    for schedule, progress in ((cosine, "examples"), (one_cycle, None)):
        watched = Watches(schedule)
        if schedule is one_cycle and batches * epochs < 4 * accumulate:
            continue  # torch wants more steps than that
        fitted(
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
    ("batches", "accumulate", "frequency"), [(12, 3, 1), (11, 1, 1), (11, 3, 1), (11, 3, 2)]
)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
@pytest.mark.parametrize("progress", [None, "steps", "examples", "gain"])
@pytest.mark.filterwarnings("ignore:NoiseScaleMonitor has nothing to measure")
def test_where_the_batch_size_stays_every_rate_is_identical(
    batches: int, accumulate: int, frequency: int, sized: bool, progress: Any
) -> None:
    """Lightning compares a frequency with the number of batches in the epoch."""

    def rates(*callbacks: Any) -> list[float]:
        return fitted(
            *callbacks,
            schedule=every_step(SCHEDULES["SequentialLR"], frequency=frequency),
            batches=batches,
            sized=sized,
            accumulate_grad_batches=accumulate,
            max_epochs=3,
        ).rates

    assert rates(scheduler((accumulate,), progress=progress)) == rates()


def test_by_examples_a_schedule_is_as_far_as_the_examples_are() -> None:
    """At a base of one batch it has been stepped n times before batch n."""
    module = fitted(
        scheduler(progress="examples", lr_scaling="none"),
        schedule=every_step(SCHEDULES["ExponentialLR"]),
        max_epochs=2,
    )

    begins = np.cumsum([0, 1, 3, 2, 6, 2, 1, 3, 2])
    assert module.rates == pytest.approx(0.1 * 0.9**begins, rel=1e-12)


def test_a_schedule_by_every_second_step_keeps_its_frequency() -> None:
    def every_second(optimizer: Any, of: Any) -> Any:
        made = lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"scheduler": made, "interval": "step", "frequency": 2}

    module = fitted(
        scheduler((1, 3, 2), progress="examples", lr_scaling="none"), schedule=every_second
    )

    begins = np.cumsum([0, 1, 3, 2, 1, 3])
    assert module.rates == pytest.approx(0.1 * 0.5 ** (begins // 2), rel=1e-12)


@pytest.mark.parametrize("lengths", [(8,), (1, 2, 3)])
@pytest.mark.parametrize("limits", [{"max_epochs": -1}, {"max_epochs": 1000}])
def test_where_steps_end_the_run_a_schedule_ends_with_the_last_step(
    lengths: Sequence[int], limits: dict[str, int]
) -> None:
    """20 steps of four batches are 6.7 epochs, whatever the batch size becomes."""
    watched = Watches(one_cycle)

    module = fitted(
        scheduler(lengths), schedule=watched, accumulate_grad_batches=4, max_steps=20, **limits
    )

    assert len(module.rates) == watched.total == watched.made.last_epoch == 20


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ((8,), 8),  # 4 epochs of 2 steps: they end the run, at first the 10 steps would
        ((1,), 10),
        ((4,), 10),
    ],
)
def test_where_both_may_end_the_run_a_schedule_ends_with_the_first_of_them(
    lengths: Sequence[int], steps: int
) -> None:
    watched = Watches(one_cycle)

    module = fitted(
        scheduler(lengths), schedule=watched, accumulate_grad_batches=4, max_steps=10, max_epochs=4
    )

    assert len(module.rates) == steps
    assert watched.made.last_epoch == watched.total == 10


def test_without_a_known_end_a_schedule_goes_by_examples() -> None:
    """A stream has no length, and nobody knows how many steps an hour has."""

    def by_hand(optimizer: Any, _: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=3 * 12)

    for limits in ({"max_epochs": 3}, {"max_epochs": -1, "max_time": "00:01:00:00"}):
        watched = Watches(by_hand)
        stop = Stops(after_epochs=3)
        fitted(scheduler(), stop, schedule=watched, sized=False, **limits)

        assert watched.made.last_epoch == 3 * 12


class Stops(L.Callback):
    def __init__(self, after_epochs: int) -> None:
        self._epochs = after_epochs

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 == self._epochs


IS_OVER = "ended before the run"


def test_by_gains_a_schedule_that_is_over_stays_at_its_end() -> None:
    """Half the batch is worth more than half a step: the last steps are past what it is for."""
    watched = Watches(one_cycle)
    callback = scheduler((2,), progress="gain", lr_scaling="none")

    with pytest.warns(UserWarning, match=IS_OVER) as warned:
        module = fitted(callback, schedule=watched, accumulate_grad_batches=4, max_epochs=4)

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


@pytest.mark.parametrize("schedule", [one_cycle, in_a_chain, in_a_sequence])
@pytest.mark.filterwarnings("ignore:The learning-rate schedule counts optimizer steps")
def test_more_optimizer_steps_than_a_schedule_has_do_not_end_the_run(schedule: Any) -> None:
    with pytest.warns(UserWarning, match=IS_OVER):
        module = fitted(
            scheduler((1,), progress="steps", lr_scaling="none"),
            schedule=every_step(schedule),
            accumulate_grad_batches=2,
            max_epochs=3,
        )

    assert len(module.rates) == 36
    assert len(set(module.rates[18:])) == 1


def test_a_metric_by_every_kth_step_is_waited_for_at_any_batch_size() -> None:
    """From batch 1 on windows of 2 end with batches 3, 5, ..., of which none is a multiple of 2."""

    class Plateau(Names):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("flat", 1.0)
            return super().training_step(batch, batch_idx)

    def by_plateau(optimizer: Any, _: Any) -> Any:
        made = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"scheduler": made, "monitor": "flat", "interval": "step", "frequency": 2}

    module = Plateau(26, by_plateau)
    callback = BatchSizeScheduler({0: 2, 1: 4}, max_batch_size=4, lr_scaling="none")
    trainer(1, strategy="auto", callbacks=[callback]).fit(module, names(26, 2))

    assert module.rates == [0.1 * f for f in (1, 1, 1, 1, 0.5, 0.5, 0.25)]


def test_a_schedule_that_another_callback_brings_replaces_the_first() -> None:
    """As averaging of weights does: what it replaces is not stepped any more."""

    class Swaps(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                (config,) = trainer.lr_scheduler_configs
                made = lr_scheduler.ConstantLR(config.scheduler.optimizer, 0.5, total_iters=10**6)
                trainer.strategy.lr_scheduler_configs = [type(config)(made, interval="step")]

    watched = Watches(SCHEDULES["ExponentialLR"])
    module = fitted(scheduler((3,), lr_scaling="none"), Swaps(), schedule=watched, max_epochs=2)

    assert watched.made.last_epoch == 12
    assert len(set(module.rates[4:])) == 1


def test_the_modules_own_hook_steps_it_as_often_as_it_is_due() -> None:
    seen: list[int] = []

    class Own(Names):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            seen.append(self.global_step)
            super().lr_scheduler_step(scheduler, metric)

    module = Own(24, every_step(SCHEDULES["ExponentialLR"]))
    trainer(1, strategy="auto", callbacks=[scheduler((2, 4))]).fit(module, names(24, 2))

    assert seen == [1] * 2 + [2] * 4 + [3] * 2 + [4] * 4


def test_malladi_scales_betas_and_eps_while_adam_steps() -> None:
    seen: list[tuple[Any, ...]] = []

    class Adam(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            group = self.param_groups[0]
            seen.append((group["lr"], *group["betas"], group["eps"]))
            super().step()
            return loss

    class WithAdam(Names):
        def configure_optimizers(self) -> Any:
            self.optimizer = Adam(self.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-6)
            return self.optimizer

    module = WithAdam(24)
    callback = BatchSizeScheduler(Asks((1, 4), of_one=2.0), max_batch_size=16, lr_scaling="malladi")
    trainer(1, strategy="auto", callbacks=[callback]).fit(module, names(24, 2))

    at_four = (0.2, 1 - 4 * 0.1, 1 - 4 * 0.05, 1e-6 / 2)
    assert seen[0] == (0.1, 0.9, 0.95, 1e-6)
    assert seen[1] == pytest.approx(at_four, rel=1e-12)
    assert len(seen) == 6  # 1 + 4 + 1 + 4 + 1 + 1 batches
    group = module.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.9, 0.95), 1e-6)


def test_one_warning_tells_that_a_schedule_by_steps_drifts() -> None:
    with pytest.warns(UserWarning, match="counts optimizer steps") as warned:
        fitted(scheduler(progress="steps"), schedule=every_step(SCHEDULES["StepLR"]))

    told = [w for w in warned if "counts optimizer steps" in str(w.message)]
    assert len(told) == 1


def by_hundredths(optimizer: Any, _: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.99)


def test_by_gains_a_schedule_goes_as_far_as_steps_are_worth() -> None:
    """AdaScale: a step of gain r moves the schedule by r steps, and has r times its rate."""
    rates: list[float] = []
    factors: list[float] = []

    class Notes(L.Callback):
        def on_before_optimizer_step(self, fitting: Any, module: Any, optimizer: Any) -> None:
            factors.append(fitting.callback_metrics["batch_size/lr_factor"].item())
            rates.append(optimizer.param_groups[0]["lr"] * factors[-1])

    class Scheduled(type(classifier())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [every_step(by_hundredths)(optimizer, self.trainer)]

    trainer(
        1,
        strategy="auto",
        callbacks=[
            BatchSizeScheduler(
                {0: 16, 6: 64, 12: 48}, 8, 64, lr_scaling="adascale", progress="gain"
            ),
            NoiseScaleMonitor(),
            Notes(),
        ],
        accumulate_grad_batches=2,
        max_epochs=2,
        log_every_n_steps=1,
    ).fit(Scheduled(), loader(8, examples=320))

    assert len(set(factors)) > 3
    assert 1 < max(factors) < 4
    passed = np.cumsum([0, *factors[:-1]])
    steps = np.floor(passed + 1e-4)
    assert np.abs(passed - steps)[7:].min() > 1e-3  # where rounding would decide it
    assert rates == pytest.approx(0.1 * 0.99**steps * factors, rel=1e-5)


def test_a_rate_set_in_the_middle_of_a_step_is_scaled_and_stays() -> None:
    """Lightning's steps run the module's hooks: what they set is not overwritten afterwards."""

    class Sets(Names):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 2:
                optimizer.param_groups[0]["lr"] = 0.7

    module = Sets(24)
    trainer(1, strategy="auto", callbacks=[scheduler((1, 3, 2, 4))]).fit(module, names(24, 2))

    assert module.rates == pytest.approx([0.1, 0.3, 1.4, 2.8, 0.7, 2.1])


@pytest.mark.parametrize("lr_scaling", ["adascale", "sqrt"])
def test_a_cosine_ends_with_the_run_whatever_the_learning_rate_follows(lr_scaling: Any) -> None:
    class Scheduled(type(classifier())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            steps = int(self.trainer.estimated_stepping_batches)
            cosine = lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return [optimizer], [{"scheduler": cosine, "interval": "step"}]

    module = Scheduled()
    callbacks = [BatchSizeScheduler({0: 16, 6: 64}, 8, 64, lr_scaling=lr_scaling)]
    trainer(1, strategy="auto", callbacks=callbacks, accumulate_grad_batches=2, max_epochs=2).fit(
        module, loader(8, examples=320)
    )

    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (None, "the module has no schedule. The batch size stays"),
        (lambda o, _: lr_scheduler.ConstantLR(o, 0.5, total_iters=3), "schedule never lowers it"),
        (
            lambda o, _: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
            "schedule raises it again 2 times",
        ),
    ],
    ids=["none", "rises", "restarts"],
)
def test_a_seesaw_says_what_it_makes_of_a_schedule_that_does_not_fall(
    schedule: Any, said: str
) -> None:
    made = None if schedule is None else every_step(schedule)
    with pytest.warns(UserWarning, match=said):
        fitted(BatchSizeScheduler("seesaw"), schedule=made)


@pytest.mark.parametrize("falls", [False, True])
def test_auto_says_once_what_it_makes_of_the_schedule(
    falls: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = every_step(lambda o, steps: lr_scheduler.CosineAnnealingLR(o, 40)) if falls else None

    fitted(BatchSizeScheduler(), schedule=schedule)

    said = capsys.readouterr().out
    assert said.count('policy="auto" is "bounded_seesaw"') == 1
    assert ("The learning rate never falls" in said) != falls


def test_a_bounded_seesaw_without_a_schedule_is_told_of() -> None:
    with pytest.warns(UserWarning, match="Only a batch that is far too small grows"):
        fitted(BatchSizeScheduler("bounded_seesaw"))


@pytest.mark.parametrize(
    ("options", "ends_by", "shares"),
    [
        ({"max_epochs": 2}, "examples", [0, 1 / 4, 1 / 2, 3 / 4]),
        ({"max_steps": 8, "max_epochs": -1}, "steps", [k / 8 for k in range(8)]),
        ({"max_epochs": -1, "limit_train_batches": 20, "max_time": "00:00:00:01"}, None, None),
    ],
)
def test_a_policy_knows_how_much_of_the_run_is_over(
    options: dict[str, Any], ends_by: str | None, shares: list[float] | None
) -> None:
    seen: list[Any] = []

    def policy(noise_scale: Any, plan: Any, progress: Any) -> float:
        seen.append((progress.share, progress.ends_by))
        return 160.0

    scheduler = BatchSizeScheduler(policy, max_batch_size=160, lr_scaling="none")
    trainer(1, strategy="auto", callbacks=[scheduler], accumulate_grad_batches=20, **options).fit(
        classifier(), loader(8, examples=320)
    )

    assert {by for _, by in seen} == {ends_by}
    if shares is None:
        assert {share for share, _ in seen} == {None}
    else:
        assert [share for share, _ in seen] == pytest.approx(shares)


def test_examples_end_the_fit_and_its_schedule() -> None:
    class Scheduled(type(classifier())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            line = lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=40)
            return [optimizer], [{"scheduler": line, "interval": "step"}]

    module = Scheduled()
    seen: list[int] = []
    scheduler = BatchSizeScheduler(
        {0: 16, 4: 48}, lr_scaling="none", max_examples="0.64k", min_batch_size=8
    )

    class Counts(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            seen.append(int(trainer.accumulate_grad_batches))

    trainer(
        1,
        strategy="auto",
        callbacks=[scheduler, Counts()],
        accumulate_grad_batches=2,
        max_steps=40,
        max_epochs=-1,
    ).fit(module, loader(8, examples=800))

    assert seen == [2, 2, 2, 2, *[6] * 12]  # 4 x 16 and 12 x 48 are 640
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-6)


def test_the_last_step_takes_the_examples_that_are_left() -> None:
    scheduler = BatchSizeScheduler({0: 16, 4: 48}, max_examples=64 + 48 + 20)
    fitting = trainer(
        1, strategy="auto", callbacks=[scheduler], accumulate_grad_batches=2, max_epochs=3
    )

    fitting.fit(classifier(), loader(8, examples=800))

    assert fitting.global_step == 6
    assert fitting.fit_loop.epoch_loop.total_batch_idx + 1 == 8 + 6 + 3


@pytest.mark.parametrize("given", ["many", 0, -5, math.nan])
def test_examples_that_are_no_number_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="`max_examples` must be a positive number of examples"):
        BatchSizeScheduler(max_examples=given)


def test_a_number_of_steps_takes_more_examples_for_a_larger_batch_and_says_so() -> None:
    fitting = trainer(
        1,
        strategy="auto",
        callbacks=[BatchSizeScheduler({0: 16, 2: 48})],
        accumulate_grad_batches=2,
        max_steps=6,
        max_epochs=-1,
    )

    with pytest.warns(UserWarning, match="pass `max_examples=96` to BatchSizeScheduler"):
        fitting.fit(classifier(), loader(8, examples=800))
