# SPDX-License-Identifier: Apache-2.0
"""What the scheduler refuses, what it says, what it leaves behind; and that it may do nothing."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import classifier, fit, loader, trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler as Accumulates
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from named_batches import Asks, Names, Stops, events, fitted, mean_of, names, stays, windows
from refused import refused
from tiers import slow, slow_after
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.methods.inner_product import InnerProductTest
from noisescale.refusal import Refusal


def scheduler(*lengths: int, **options: Any) -> BatchSizeScheduler:
    """Of batches of two."""
    policy: Any = Asks(lengths, of_one=2.0) if lengths else stays
    return BatchSizeScheduler(policy, **{"max_batch_size": 10**6, **options})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("policy", "trade"),  # as all that `SchedulerOptions` has
        ("progress", "tokens"),
        ("confidence", 95),
        ("max_examples", "many"),
        ("max_examples", 0),
    ],
)
def test_wrong_arguments_are_refused_at_once(argument: str, value: Any) -> None:
    with refused(argument, got=repr(value)):
        BatchSizeScheduler(**{argument: value})


class Scheduled(Names):
    optimizer_class: Any = torch.optim.SGD

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.parameters(), lr=0.1)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 3}]


class FailsWhereLarge(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        if self.param_groups[0]["lr"] > 0.1:
            raise RuntimeError("on purpose")
        return super().step()


class Fails(L.Callback):
    def on_train_batch_end(self, *arguments: Any) -> None:
        if arguments[-1] == 5:
            raise RuntimeError("on purpose")


def left_behind(fitting: Any) -> dict[str, Any]:
    """What of a Trainer and its optimizers a scheduler changes for the time of a fit."""
    (optimizer,) = fitting.optimizers
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return {
        "accumulation": (type(fitting.accumulate_grad_batches), fitting.accumulate_grad_batches),
        "frequencies": [config.frequency for config in fitting.lr_scheduler_configs],
        "source": type(fitting.fit_loop._data_source).__name__,
        "hooks": tuple(map(len, hooks)),
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


AS_BEFORE = {
    "accumulation": (int, 2),
    "frequencies": [3],
    "source": "_DataLoaderSource",
    "hooks": (0, 0),
    "lr": [0.1],
}


def gives(value: Any) -> Any:
    return lambda noise_scale, plan, progress: value if progress.steps else plan.batch_size


@pytest.mark.parametrize(
    ("policy", "options", "argument", "got"),
    [
        (gives(math.nan), {}, "policy", "nan at step 1"),
        (stays, {"max_batch_size": 3}, "max_batch_size", "3 < 4"),
        (gives(8), {"lr_scaling": lambda *_: -1.0}, "lr_scaling", "-1.0 for a batch size of 4"),
        (InnerProductTest(), {}, "optimizer", "SGD without"),  # momentum
    ],
)
def test_what_training_shows_to_be_wrong_is_refused_and_all_is_put_back(
    policy: Any, options: dict[str, Any], argument: str, got: str
) -> None:
    options = {"max_batch_size": 64, **options}
    callback = BatchSizeScheduler(policy, progress="examples", **options)
    fitting = trainer(1, callbacks=[callback], accumulate_grad_batches=2)

    with pytest.raises(Refusal) as error:
        fitting.fit(Scheduled(16), names(16, 2))

    assert (error.value.arguments, error.value.got.split(":")[0]) == ((argument,), got)
    assert left_behind(fitting) == AS_BEFORE


def unequal() -> Any:
    """Batches of 16 images whose boxes are more."""
    x = torch.linspace(-1, 1, 32).reshape(16, 2)
    batch = {"x": x, "boxes": torch.ones(37, 4), "kinds": torch.ones(37)}
    return DataLoader([batch] * 4, batch_size=None)  # type: ignore[arg-type]  # a list will do


class OfImages(Names):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return ((batch["x"] * self.weight).sum(1) - 1).square().mean()


def images_in(batch: Any) -> int:
    return len(batch["x"])


@pytest.mark.parametrize("policy", [stays, "ratio"])
def test_a_function_counts_with_and_without_a_noise_scale(policy: Any) -> None:
    counted = BatchSizeScheduler(policy, max_batch_size=64, batch_size_fn=images_in)

    fitted(counted, module=OfImages(2), data=unequal())

    assert counted.plan is not None
    assert counted.plan.batch_size == 16
    monitor = NoiseScaleMonitor()
    with refused("batch_size_fn", requirement="be None"):
        BatchSizeScheduler(policy, monitor=monitor, batch_size_fn=images_in)


def test_a_first_batch_that_is_too_large_or_not_counted_names_the_function() -> None:
    small = BatchSizeScheduler(stays, max_batch_size=12, batch_size_fn=images_in)
    with refused("max_batch_size", got="12 < 16", remedy="16 examples: if"):
        fitted(small, module=OfImages(2), data=unequal())

    with pytest.raises(MisconfigurationException, match=r"16, 37, 37\. Pass a function"):
        fitted(scheduler(), module=OfImages(2), data=unequal())


@pytest.mark.parametrize("fails", ["", "after a batch", "in a step"])
def test_after_a_fit_or_an_error_all_is_as_before(fails: str) -> None:
    callback = scheduler(1, 3, progress="examples", max_device_batch_size=8)
    callbacks = [callback, Fails()] if fails == "after a batch" else [callback]
    fitting = trainer(1, callbacks=callbacks, accumulate_grad_batches=2)
    module = Scheduled(16)
    module.optimizer_class = FailsWhereLarge if fails == "in a step" else torch.optim.SGD

    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        fitting.fit(module, names(16, 2))

    left = left_behind(fitting)
    assert {**left, "lr": [0.1]} == AS_BEFORE
    assert left["lr"] == [0.1] or fails != "in a step"
    assert callback.moves


class ByHand(Names):
    automatic_optimization = False


class Untrained(Names):
    def configure_optimizers(self) -> Any:
        return None


class Engine(SingleDeviceStrategy):
    handles_gradient_accumulation = True


class Another(BatchSizeScheduler):
    @property
    def state_key(self) -> str:
        return "another"


@pytest.mark.parametrize(
    ("setting", "got", "options"),
    [
        ("automatic_optimization", "False", {"module": ByHand(16)}),
        ("configure_optimizers", "None", {"module": Untrained(16)}),
        ("strategy", "Engine", {"strategy": Engine(torch.device("cpu"))}),
        ("callbacks", "GradientAccumulationScheduler", {"beside": Accumulates({0: 1, 2: 4})}),
        ("callbacks", "two of BatchSizeScheduler", {"beside": Another(stays)}),
        # There may be fewer batches later.
        ("val_check_interval", "4", {"val_check_interval": 4}),
    ],
)
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_trainers_under_which_a_step_cannot_change_are_refused(
    setting: str, got: str, options: dict[str, Any]
) -> None:
    options = {**options}
    module = options.pop("module", None) or Names(16)
    beside = [options.pop("beside")] if "beside" in options else []
    callbacks = [scheduler(max_device_batch_size=8), *beside]
    fitting = trainer(1, callbacks=callbacks, **options)

    with refused(setting, error=MisconfigurationException) as error:
        fitting.fit(module, names(16, 2))

    assert error.value.got.split(":")[0] == got
    assert type(fitting.accumulate_grad_batches) is int
    assert type(fitting.fit_loop._data_source).__name__ == "_DataLoaderSource"


@pytest.mark.parametrize(
    ("accumulate", "ranks", "batches"),
    slow_after(2, [(3, 1, 12), (3, 1, 13), (1, 1, 13), (1, 2, 13), (3, 2, 12), (3, 2, 13)]),
)
def test_where_the_batch_size_stays_training_is_bitwise_identical(
    accumulate: int, ranks: int, batches: int
) -> None:
    """But for the short last window of 13 batches by 3: Lightning divides its one by three."""

    def parameters(*callbacks: Any) -> list[list[Tensor]]:
        return fit(
            *callbacks,
            ranks=ranks,
            accumulate_grad_batches=accumulate,
            max_epochs=2,
            train_loader=loader(4, examples=4 * batches * ranks),
            gradient_clip_val=0.5,
            results=lambda _, module: [p.detach().clone() for p in module.parameters()],
        )

    with_it = parameters(NoiseScaleMonitor(), BatchSizeScheduler(stays))
    without = parameters(NoiseScaleMonitor())

    alike = batches % accumulate == 0
    for ours, theirs in zip(with_it, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) == alike


def test_tensorboard_gets_scalars_at_log_steps_and_every_move_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = scheduler(1, 3, 2, lr_scaling="linear")
    fitting = fitted(
        callback,
        module=Names(26),
        data=names(26, 2),
        logger=TensorBoardLogger(tmp_path),
        log_every_n_steps=2,
    )

    logged = events(tmp_path)
    lengths = [1, 3, 2, 1, 3, 2, 1]
    assert len(callback.moves) == 6

    def scalars(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in logged.Scalars(f"batch_size/{name}")]

    at = [1, 3, 5, 6]  # the last step, too
    assert scalars("wanted") == [(step, 2.0 * lengths[step]) for step in at]
    assert scalars("planned") == scalars("wanted")
    assert scalars("given") == [(1, 4.0), (3, 3.0), (5, 5.0), (6, 2.0)]  # means of both steps
    assert scalars("lr_factor") == [(step, float(lengths[step])) for step in at]
    texts = [
        event.tensor_proto.string_val[0].decode()
        for event in logged.Tensors("batch_size/moves/text_summary")
    ]
    assert texts == [str(move) for move in callback.moves]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "BatchSizeScheduler" in line] == [
        f"BatchSizeScheduler: {text}" for text in texts
    ]
    assert fitting.callback_metrics["batch_size/given"] == 2
    layout = logged.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    assert b"batch_size/planned" in layout
    assert b"batch_size/best" not in layout


def test_the_noise_scale_that_is_decided_on_is_logged_once_a_step(tmp_path: Path) -> None:
    monitor, callback = NoiseScaleMonitor(), BatchSizeScheduler("ratio", max_batch_size=64)
    fitting = fitted(
        callback,
        monitor,
        module=classifier(lr=0.01),
        data=loader(4, examples=320),
        logger=TensorBoardLogger(tmp_path),
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        max_epochs=2,
    )

    logged = events(tmp_path)
    assert [e.step for e in logged.Scalars("batch_size/given")] == list(range(fitting.global_step))
    values = [event.value for event in logged.Scalars("batch_size/noise_scale")]
    assert len(values) > 10
    assert values[-1] == pytest.approx(monitor.noise_scale.value)


@pytest.mark.parametrize(("every", "kind"), [(1, float), (1000, torch.tensor)])
def test_every_row_of_a_run_has_the_learning_rate_of_its_steps_the_last_one_too(
    every: int, kind: Callable[[float], Any]
) -> None:
    monitor, at_epoch_ends = NoiseScaleMonitor(every_n_steps=1), []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            at_epoch_ends.append(float(trainer.callback_metrics["noise_scale/learning_rate"]))

    fitted(
        BatchSizeScheduler({0: 8, 2: 16}, lr_scaling="linear", max_batch_size=16),
        monitor,
        Look(),
        module=classifier(lr=kind(0.01)),
        data=loader(4, examples=120),
        log_every_n_steps=every,
        accumulate_grad_batches=2,
        max_epochs=2,
    )

    rates = monitor.history["learning_rate"]
    assert rates[-1] == pytest.approx(0.02)
    assert at_epoch_ends == pytest.approx([0.02, 0.02])
    if every == 1:
        assert rates[:2] == pytest.approx(0.01)
        assert rates[2:] == pytest.approx(0.02)


def test_its_repr_has_what_was_given() -> None:
    scheduler = BatchSizeScheduler({0: 8}, max_batch_size=64, progress="run", confidence=0.9)

    given = "policy={0: 8}, max_batch_size=64, progress='run', confidence=0.9"
    assert repr(scheduler) == f"BatchSizeScheduler({given})"
    assert repr(BatchSizeScheduler()) == "BatchSizeScheduler()"


def test_a_monitor_is_put_in_where_the_policy_needs_one() -> None:
    def kinds(*callbacks: Any) -> list[str]:
        fitting = fitted(*callbacks, module=classifier(), data=loader(), max_steps=2)
        return [type(callback).__name__ for callback in fitting.callbacks][:2]

    both = ["NoiseScaleMonitor", "BatchSizeScheduler"]
    given = NoiseScaleMonitor()
    assert kinds(BatchSizeScheduler("ratio")) == both
    assert kinds(BatchSizeScheduler(stays)) == both[1:]
    assert kinds(BatchSizeScheduler(stays, progress="gain")) == both
    assert kinds(BatchSizeScheduler("ratio", monitor=given)) == both
    assert given.noise_scale.steps > 0


def test_a_second_fit_goes_on_and_what_validate_loads_does_not_disturb(tmp_path: Path) -> None:
    """From where the first ended, not from what that one was resumed from or `test` has loaded."""

    class Tested(Names):
        def test_step(self, batch: Tensor) -> None:
            pass

    def counted() -> tuple[int, float]:
        saved = callback.state_dict()["controller"]
        return saved["steps"], saved["examples"]

    callback = scheduler(1, 2, 3)
    module, path = Tested(24), tmp_path / "first.ckpt"
    fitted(callback, module=module, data=names(24, 2), max_epochs=1).save_checkpoint(path)
    assert counted() == (6, 24)

    callback = scheduler(1, 2, 3)
    fitting = fitted(callback, module=module, data=names(24, 2), ckpt_path=path, max_epochs=2)
    assert counted() == (12, 48)
    fitting.test(module, names(24, 2), ckpt_path=path, verbose=False)
    assert counted() == (12, 48)
    fitting.fit_loop.max_epochs = 3
    fitting.fit(module, names(24, 2))
    assert counted() == (18, 72)

    fitted(callback, module=Tested(24), data=names(24, 2), max_epochs=1)
    assert counted() == (6, 24)


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_it_works_in_the_other_package(ranks: int) -> None:
    import pytorch_lightning

    found = fit(
        BatchSizeScheduler({0: 16, 3: 64}, max_batch_size=64),
        NoiseScaleMonitor(),
        ranks=ranks,
        package=pytorch_lightning,
        results=lambda fitting, _: str(fitting.callbacks[1].plan),
    )

    plan = {1: "8 x 8 micro-batches x 1 device", 2: "8 x 4 micro-batches x 2 devices"}[ranks]
    assert found == [f"64 = {plan}"] * ranks


@pytest.mark.parametrize(
    ("options", "accumulate", "most", "ends"),
    [
        ({}, 1, 8, {"max_epochs": 2}),  # of 400 examples
        ({}, 16, 32, {"max_epochs": 2}),  # it began with more, and does not grow
        ({}, 2, 4, {"max_steps": 50, "max_epochs": -1}),  # of 200
        ({}, 1, 1000, {"max_epochs": -1, "max_time": "00:01:00:00"}),
        ({"policy": {0: 1000}}, 1, 1000, {"max_epochs": 2}),
        ({"max_examples": 300}, 1, 6, {"max_epochs": 2}),
        ({"min_batch_size": 64}, 1, 64, {"max_epochs": 2}),
    ],
)
def test_by_default_a_run_keeps_fifty_steps(
    options: dict[str, Any], accumulate: int, most: int, ends: dict[str, Any]
) -> None:
    callback = BatchSizeScheduler(**{"policy": lambda *_: 1000.0, "lr_scaling": "none", **options})
    ends = {"accumulate_grad_batches": accumulate, **ends}

    fitted(callback, Stops(steps=2), module=Names(200), data=names(200, 2), **ends)

    assert callback.plan is not None
    assert callback.plan.batch_size == most


class Wants(Asks):
    needs_noise_scale = True


@pytest.mark.parametrize(
    ("policy", "compared", "size", "least"),
    [
        (Wants, {"small_batch": "micro_batch"}, 2, 2),
        (Asks, {"small_batch": "micro_batch"}, 2, 1),
        (Wants, {}, 1, 2),
        (Wants, {}, 2, 2),
        (Wants, {"small_batch": "half"}, 2, 1),
        (Wants, {"cut": "net"}, 2, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:A batch of 1 has no halves to compare")
@pytest.mark.filterwarnings("ignore:A step of one micro-batch in one process")
def test_one_process_that_compares_micro_batches_keeps_two_of_them(
    policy: Any, compared: dict[str, Any], size: int, least: int
) -> None:
    """Halves that nobody asked for may be refused: by then one micro-batch is all there is."""
    module: Any = Names(24 * size)
    data = names(24 * size, size)
    if "cut" in compared:  # which names a module, and `Names` has none
        module, data = classifier(), loader(size, 24 * size)
    callback = BatchSizeScheduler(policy((1,)), max_batch_size=64)
    monitor = NoiseScaleMonitor(**compared)

    fitted(callback, monitor, module=module, data=data, accumulate_grad_batches=4)

    assert callback.plan is not None
    assert callback.plan.accumulation == least


class Overflows(Names):
    """Its third step has a gradient that is not finite."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (math.inf if batch_idx == 3 else 1.0)


def test_under_a_grad_scaler_gradients_are_unscaled_and_steps_left_out() -> None:
    """The last window of the stream is short; what overflows takes its window along."""
    module = Overflows(14)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    fitted(
        scheduler(1, 2, 3, 3, lr_scaling="linear"),
        module=module,
        data=names(14, 2, sized=False),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
    )

    expected = [window for window in windows(7, 1, (1, 2, 3, 3)) if 3 not in window]
    assert module.rates == pytest.approx([0.1, 0.2, 0.3])  # the third step is left out
    for window, gradient in zip(expected, module.gradients, strict=True):
        assert gradient == pytest.approx(mean_of(window, [module.arrived], 14))
    assert module.optimizer.param_groups[0]["lr"] == 0.1


def test_beside_weight_averaging_the_last_epoch_trains_nothing() -> None:
    """Lightning's callback accumulates over an epoch of its own, to prepare batch norms."""

    class Normed(Names):
        def __init__(self) -> None:
            super().__init__(24)
            self.norm = torch.nn.BatchNorm1d(1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.norm(batch[:, None].float())
            return super().training_step(batch, batch_idx)

    module, callback = Normed(), scheduler(1, 3)
    averages = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1, annealing_epochs=1)

    fitting = fitted(averages, callback, module=module, data=names(24, 2), max_epochs=3)

    assert len(module.arrived) == 4 * 12
    assert callback.state_dict()["controller"]["steps"] == len(windows(12, 3, (1, 3)))
    assert type(fitting.accumulate_grad_batches) is int
    assert fitting.accumulate_grad_batches == 1


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_the_inner_product_test_measures_along_the_momentum_and_moves(ranks: int) -> None:
    class Line(L.LightningModule):
        """Near its best, and of two inputs one counts: momentum points along the gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([0.08, 0.08]))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return ((x @ self.weight - y) ** 2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-5, momentum=0.9)

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16_000, 2, generator=generator), torch.randn(16_000, generator=generator)
    noise = TensorDataset(x * torch.tensor([1.0, 0.1]), y)

    callback = BatchSizeScheduler(InnerProductTest(0.3), max_batch_size=512, lr_scaling="none")
    monitor = NoiseScaleMonitor(every_n_steps=1)
    found = fit(
        callback,
        monitor,
        ranks=ranks,
        model=Line(),
        train_loader=DataLoader(noise, batch_size=64 // ranks, shuffle=True),
        results=lambda *_: (
            monitor.meter.extra_noise_scales["along_gradient"].steps,
            [(move.after.batch_size, move.reason) for move in callback.moves],
        ),
    )

    if ranks == 1:  # a fit without the scheduler has no need of momentum
        fitted(monitor, module=classifier(), data=loader())
    assert all(one == found[0] for one in found)
    steps, moves = found[0]
    assert steps >= 8
    assert moves
    assert all("along the gradient" in reason for _, reason in moves)
