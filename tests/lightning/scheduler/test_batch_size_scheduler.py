# SPDX-License-Identifier: Apache-2.0
"""What the scheduler refuses, what it says, what it leaves behind; and that it may do nothing."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from fits import classifier, fit, loader, trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from named_batches import Asks, Names, mean_of, names, windows
from ranks import as_torchrun, on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.methods.inner_product import InnerProductTest


def stays(noise_scale: Any, plan: Any, progress: Any) -> float:
    return float(plan.batch_size)


def scheduler(*lengths: int, **options: Any) -> BatchSizeScheduler:
    """Of batches of two."""
    policy: Any = Asks(lengths, of_one=2.0) if lengths else stays
    return BatchSizeScheduler(policy, **{"max_batch_size": 10**6, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"policy": "trade"},
            ValueError,
            '`policy` must be one of "auto", "tradeoff", "ratio", "norm_test", "doubling",'
            ' "seesaw", "smith", "bounded_seesaw", a mapping from steps to batch sizes or a'
            " function, got 'trade'. Leave it at \"auto\".",
        ),
        (
            {"policy": 64},
            TypeError,
            '`policy` must be a name, a mapping or a function, got 64. Leave it at "auto".',
        ),
        (
            {"lr_scaling": "square"},
            ValueError,
            '`lr_scaling` must be one of "auto", "none", "linear", "sqrt", "capped_sqrt",'
            ' "malladi", "adascale", "saturating" or a function, got \'square\'. Leave it'
            ' at "auto".',
        ),
        (
            {"policy": "smith", "lr_scaling": "sqrt"},
            ValueError,
            '`lr_scaling` must be "linear" with `policy="smith"`, got \'sqrt\'. Leave it at'
            ' "auto".',
        ),
        (
            {"progress": "tokens"},
            ValueError,
            '`progress` must be one of "run", "steps", "examples", "gain", got \'tokens\'.'
            " Choose one.",
        ),
        (
            {"min_batch_size": 64, "max_batch_size": 32},
            ValueError,
            "`min_batch_size` must not exceed `max_batch_size`, got 64 > 32. Exchange them.",
        ),
        (
            {"max_batch_size": "all"},
            TypeError,
            "`max_batch_size` must be a number of examples or None, got 'all'. Give the global"
            " batch size, over all devices.",
        ),
        (
            {"max_device_batch_size": 0.5},
            ValueError,
            "`max_device_batch_size` must be a positive whole number, got 0.5. Leave it out for"
            " the default.",
        ),
        (
            {"confidence": 95},
            ValueError,
            "`confidence` must lie between 0 and 1, got 95. Pass 0.95 for 95 %.",
        ),
        (
            {"decide_every_n_steps": 0},
            ValueError,
            "`decide_every_n_steps` must be a positive whole number, got 0. Leave it out for the"
            " default.",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refused:
        BatchSizeScheduler(**options)

    assert str(refused.value) == message


class Scheduled(Names):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 3}]


def left_behind(fitting: Any) -> dict[str, Any]:
    """What of a Trainer and its optimizers a scheduler changes for the time of a fit."""
    (optimizer,) = fitting.optimizers
    return {
        "accumulation": (type(fitting.accumulate_grad_batches), fitting.accumulate_grad_batches),
        "frequencies": [config.frequency for config in fitting.lr_scheduler_configs],
        "source": type(fitting.fit_loop._data_source).__name__,
        "hooks": len(optimizer._optimizer_step_pre_hooks)
        + len(optimizer._optimizer_step_post_hooks),
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


AS_BEFORE = {
    "accumulation": (int, 2),
    "frequencies": [3],
    "source": "_DataLoaderSource",
    "hooks": 0,
    "lr": [0.1],
}


def gives(value: Any) -> Any:
    return lambda noise_scale, plan, progress: value if progress.steps else plan.batch_size


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            gives(math.nan),
            {},
            "`policy` must give a positive number of examples, got nan at step 1. Return"
            " `plan.batch_size` to stay.",
        ),
        (
            gives(0),
            {},
            "`policy` must give a positive number of examples, got 0 at step 1. Return"
            " `plan.batch_size` to stay.",
        ),
        (
            gives("64"),
            {},
            "`policy` must give a positive number of examples, got '64' at step 1. Return"
            " `plan.batch_size` to stay.",
        ),
        (
            stays,
            {"max_batch_size": 3},
            "`max_batch_size` must be at least the batch size that the run starts with, got 3 < 4."
            " Raise it, or start with fewer examples a step.",
        ),
        (
            stays,
            {"min_batch_size": 5, "max_batch_size": 5},
            "`min_batch_size` and `max_batch_size` must leave room for a plan, got 5 to 5 for 1"
            " device and at least 1 micro-batch of 2 examples each. Widen them, or change the batch"
            " size of the loader.",
        ),
        (
            gives(8),
            {"lr_scaling": lambda batch_size, base, critical: -1.0},
            "`lr_scaling` must give a positive, finite factor, got -1.0 for a batch size of 4."
            " Return 1.0 to leave the learning rate alone.",
        ),
        (
            stays,
            {"lr_scaling": "malladi", "max_batch_size": 8},
            '`lr_scaling="malladi"` must be used with an optimizer that has betas, got SGD. Choose'
            ' "adascale" or "linear".',
        ),
    ],
)
def test_what_training_shows_to_be_wrong_is_refused_and_all_is_put_back(
    policy: Any, options: dict[str, Any], message: str
) -> None:
    options = {"max_batch_size": 64, "max_device_batch_size": None, **options}
    callback = BatchSizeScheduler(policy, progress="examples", **options)
    fitting = trainer(1, strategy="auto", callbacks=[callback], accumulate_grad_batches=2)

    with pytest.raises(ValueError, match="must") as refused:
        fitting.fit(Scheduled(16), names(16, 2))

    assert str(refused.value) == message
    assert left_behind(fitting) == AS_BEFORE


class Raises(L.Callback):
    def on_train_batch_end(self, *arguments: Any) -> None:
        if arguments[-1] == 5:
            raise RuntimeError("out of luck")


@pytest.mark.parametrize("fails", [True, False])
def test_after_a_fit_or_an_error_all_is_as_before(fails: bool) -> None:
    callback = scheduler(1, 3, progress="examples", max_device_batch_size=8)
    callbacks = [callback, Raises()] if fails else [callback]
    fitting = trainer(1, strategy="auto", callbacks=callbacks, accumulate_grad_batches=2)

    if fails:
        with pytest.raises(RuntimeError, match="out of luck"):
            fitting.fit(Scheduled(16), names(16, 2))
    else:
        fitting.fit(Scheduled(16), names(16, 2))

    assert {**left_behind(fitting), "lr": [0.1]} == AS_BEFORE
    assert callback.moves


def test_a_step_that_fails_leaves_the_learning_rate() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            if self.param_groups[0]["lr"] != 0.1:
                raise RuntimeError("in the step")
            return super().step()

    class Module(Names):
        def configure_optimizers(self) -> Any:
            self.optimizer: Any = Fails(self.parameters(), lr=0.1)
            return self.optimizer

    module = Module(16)
    with pytest.raises(RuntimeError, match="in the step"):
        trainer(1, strategy="auto", callbacks=[scheduler(1, 3)]).fit(module, names(16, 2))

    assert module.optimizer.param_groups[0]["lr"] == 0.1


def refusal(*callbacks: Any, module: Any = None, **options: Any) -> str:
    fitting = trainer(1, callbacks=list(callbacks), **{"strategy": "auto", **options})
    with pytest.raises(MisconfigurationException) as refused:
        fitting.fit(Names(16) if module is None else module, names(16, 2))
    assert type(fitting.accumulate_grad_batches) is int
    assert type(fitting.fit_loop._data_source).__name__ == "_DataLoaderSource"
    return str(refused.value)


class ByHand(Names):
    def __init__(self) -> None:
        super().__init__(16)
        self.automatic_optimization = False


def test_manual_optimization_is_refused() -> None:
    assert refusal(scheduler(), module=ByHand()) == (
        "`automatic_optimization` must be one that BatchSizeScheduler can work under, got False:"
        " the module decides itself when to step. Set it to True, or use `BatchSizeController` in"
        " your `training_step`."
    )


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_module_without_an_optimizer_is_refused() -> None:
    class Untrained(Names):
        def configure_optimizers(self) -> Any:
            return None

    assert refusal(scheduler(), module=Untrained(16)) == (
        "`configure_optimizers` must be one that BatchSizeScheduler can work under, got None:"
        " without an optimizer there are no steps. Return one, or leave the callback out."
    )


def test_engines_that_accumulate_themselves_are_refused() -> None:
    class Engine(SingleDeviceStrategy):
        handles_gradient_accumulation = True

    assert refusal(scheduler(), strategy=Engine(torch.device("cpu"))) == (
        "`strategy` must be one that BatchSizeScheduler can work under, got Engine: it accumulates"
        ' gradients inside its own engine. Use `strategy="ddp"`, or leave the callback out.'
    )


def test_another_accumulation_schedule_is_refused() -> None:
    assert refusal(scheduler(), GradientAccumulationScheduler({0: 1, 2: 4})) == (
        "`callbacks` must be one that BatchSizeScheduler can work under, got"
        " GradientAccumulationScheduler: both would set `accumulate_grad_batches`. Leave one of"
        " them out; `policy={0: 64, 1000: 128}` gives a schedule by steps."
    )


def test_a_second_scheduler_is_refused() -> None:
    class Another(BatchSizeScheduler):
        @property
        def state_key(self) -> str:
            return "another"

    assert refusal(scheduler(), Another(stays)) == (
        "`callbacks` must be one that BatchSizeScheduler can work under, got two of"
        " BatchSizeScheduler: both would set the batch size. Leave one of them out."
    )


def test_validation_after_so_many_batches_is_refused_where_there_may_be_fewer() -> None:
    resizes = scheduler(max_device_batch_size=8)

    assert refusal(resizes, val_check_interval=4) == (
        "`val_check_interval` must be one that BatchSizeScheduler can work under, got 4: an epoch"
        " may later have fewer batches than that. Give a part of an epoch, such as 0.5, or set"
        " `check_val_every_n_epoch=None`."
    )


@pytest.mark.parametrize("wanted", [(4.0, 8.0), (4.0, math.nan)], ids=["another", "none"])
def test_ranks_that_disagree_are_refused_on_all_of_them(wanted: tuple[float, float]) -> None:
    def policy(noise_scale: Any, plan: Any, progress: Any) -> float:
        return wanted[dist.get_rank()]

    def message() -> str:
        fitting = trainer(2, strategy="ddp", callbacks=[BatchSizeScheduler(policy)])
        with pytest.raises(RuntimeError) as refused:
            fitting.fit(Names(64), names(64, 2))
        assert type(fitting.accumulate_grad_batches) is int
        return str(refused.value)

    least, most = ("4", "8") if wanted[1] == 8 else ("0", "4")
    assert set(on_ranks(2, as_torchrun(message))) == {
        f"`policy` must give the same batch size on all ranks, got {least} to {most}. Compute it"
        " from its three arguments alone, which are equal on all ranks: not from random numbers, a"
        " clock, or a rank's own data."
    }


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("batches", [12, 13])
def test_where_the_batch_size_stays_training_is_bitwise_identical(
    accumulate: int, ranks: int, batches: int
) -> None:
    """But for the short last window of 13 batches by 3: Lightning divides its one by three."""

    def parameters(*callbacks: Any) -> list[list[Tensor]]:
        return fit(
            *callbacks,
            ranks=ranks,
            strategy="ddp_fork" if ranks > 1 else "auto",
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


def events(folder: Path) -> EventAccumulator:
    (path,) = folder.rglob("events.*")
    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    return accumulator


def test_tensorboard_gets_scalars_at_log_steps_and_every_move_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = scheduler(1, 3, 2, lr_scaling="linear")
    fitting = trainer(
        1,
        strategy="auto",
        callbacks=[callback],
        logger=TensorBoardLogger(tmp_path),
        log_every_n_steps=2,
    )
    fitting.fit(Names(26), names(26, 2))

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
    assert texts[0] == (
        "step 1: batch size 2 -> 6 = 2 x 3 micro-batches x 1 device, lr x 3: the policy asks for it"
    )
    assert fitting.callback_metrics["batch_size/given"] == 2


def test_no_step_is_logged_twice(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    trainer(1, strategy="auto", callbacks=[scheduler()], logger=logger, log_every_n_steps=1).fit(
        Names(8), names(8, 2)
    )

    assert [e.step for e in events(tmp_path).Scalars("batch_size/given")] == [0, 1, 2, 3]


def test_the_noise_scale_that_is_decided_on_is_logged(tmp_path: Path) -> None:
    (monitor, callback) = NoiseScaleMonitor(), BatchSizeScheduler("ratio", max_batch_size=64)
    trainer(
        1,
        strategy="auto",
        callbacks=[callback, monitor],
        logger=TensorBoardLogger(tmp_path),
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        max_epochs=3,
    ).fit(classifier(lr=0.01), loader(4, examples=320))

    values = [event.value for event in events(tmp_path).Scalars("batch_size/noise_scale")]
    assert len(values) > 10
    assert values[-1] == pytest.approx(monitor.noise_scale.value)


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("every", [1, 1000])
def test_every_row_of_a_run_has_the_learning_rate_of_its_steps_the_last_one_too(
    every: int, kind: Callable[[float], Any]
) -> None:
    monitor, at_epoch_ends = NoiseScaleMonitor(every_n_steps=1), []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            at_epoch_ends.append(float(trainer.callback_metrics["noise_scale/learning_rate"]))

    trainer(
        1,
        strategy="auto",
        callbacks=[BatchSizeScheduler({0: 8, 2: 16}, lr_scaling="linear"), monitor, Look()],
        log_every_n_steps=every,
        accumulate_grad_batches=2,
        max_epochs=2,
    ).fit(classifier(lr=kind(0.01)), loader(4, examples=320))

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
    def kinds(*callbacks: Any, **options: Any) -> list[str]:
        fitting = trainer(1, strategy="auto", callbacks=list(callbacks), max_epochs=1)
        fitting.fit(classifier(), loader())
        return [type(callback).__name__ for callback in fitting.callbacks][:2]

    assert kinds(BatchSizeScheduler("ratio")) == ["NoiseScaleMonitor", "BatchSizeScheduler"]
    assert kinds(BatchSizeScheduler(stays)) == ["BatchSizeScheduler"]
    assert kinds(BatchSizeScheduler(stays, progress="gain")) == [
        "NoiseScaleMonitor",
        "BatchSizeScheduler",
    ]
    given = NoiseScaleMonitor()
    assert kinds(BatchSizeScheduler("ratio", monitor=given)) == [
        "NoiseScaleMonitor",
        "BatchSizeScheduler",
    ]
    assert given.noise_scale.steps > 0


def test_a_second_fit_goes_on_and_what_validate_loads_does_not_disturb(tmp_path: Path) -> None:
    """From where the first ended, not from what that one was resumed from or `test` has loaded."""

    class Tested(Names):
        def test_step(self, batch: Tensor) -> None:
            pass

    callback = scheduler(1, 2, 3)
    module = Tested(24)
    fitting = trainer(1, strategy="auto", callbacks=[callback], max_epochs=1)
    fitting.fit(module, names(24, 2))
    first = callback.state_dict()["controller"]
    path = tmp_path / "first.ckpt"
    fitting.save_checkpoint(path)
    assert first["steps"] == 6

    resumed = scheduler(1, 2, 3)
    fitting = trainer(1, strategy="auto", callbacks=[resumed], max_epochs=2)
    fitting.fit(module, names(24, 2), ckpt_path=path)
    assert resumed.state_dict()["controller"]["steps"] == 12
    fitting.test(module, names(24, 2), ckpt_path=path, verbose=False)
    assert resumed.state_dict()["controller"]["steps"] == 12
    fitting.fit_loop.max_epochs = 3
    fitting.fit(module, names(24, 2))

    assert resumed.state_dict()["controller"]["steps"] == 18
    assert resumed.state_dict()["controller"]["examples"] == 72

    another = trainer(1, strategy="auto", callbacks=[resumed], max_epochs=1)
    another.fit(Tested(24), names(24, 2))

    assert resumed.state_dict()["controller"]["steps"] == 6


@pytest.mark.parametrize("package", [L, pytorch_lightning], ids=lambda p: p.__name__)
def test_it_works_in_both_packages(package: Any) -> None:
    def plan(fitting: Any, module: Any) -> str:
        return str(fitting.callbacks[1].plan)

    (first, second) = fit(
        BatchSizeScheduler({0: 16, 3: 64}, max_batch_size=64),
        NoiseScaleMonitor(),
        package=package,
        results=plan,
    )

    assert first == second == "64 = 8 x 4 micro-batches x 2 devices"


def asks_for_1000(noise_scale: Any, plan: Any, progress: Any) -> float:
    return 1000.0


@pytest.mark.parametrize(
    ("policy", "accumulate", "most", "options"),
    [
        (asks_for_1000, 1, 8, {"max_epochs": 2}),  # of 400 examples
        (asks_for_1000, 16, 32, {"max_epochs": 2}),  # it began with more, and does not grow
        (asks_for_1000, 2, 4, {"max_steps": 50, "max_epochs": -1}),  # of 200
        (asks_for_1000, 1, 6, {"max_epochs": 2, "max_examples": 300}),
        (asks_for_1000, 1, 1000, {"max_epochs": -1, "max_time": "00:00:00:01"}),
        ({0: 1000}, 1, 1000, {"max_epochs": 2}),
    ],
)
def test_by_default_a_run_keeps_fifty_steps(
    policy: Any, accumulate: int, most: int, options: dict[str, Any]
) -> None:
    max_examples = options.pop("max_examples", None)
    callback = BatchSizeScheduler(policy, max_examples=max_examples, lr_scaling="none")
    trainer(
        1, strategy="auto", callbacks=[callback], accumulate_grad_batches=accumulate, **options
    ).fit(Names(200), names(200, 2))

    assert callback.plan is not None
    assert callback.plan.batch_size == most


def test_a_minimum_raises_the_default_maximum() -> None:
    callback = BatchSizeScheduler(asks_for_1000, min_batch_size=64, lr_scaling="none")

    trainer(1, strategy="auto", callbacks=[callback], max_epochs=2).fit(Names(200), names(200, 2))

    assert callback.plan is not None
    assert callback.plan.batch_size == 64


def test_examples_of_a_short_last_window_are_counted_as_they_are() -> None:
    callback = BatchSizeScheduler(stays)

    trainer(1, strategy="auto", callbacks=[callback], accumulate_grad_batches=4, max_epochs=3).fit(
        Names(20), names(20, 2)
    )

    counted = callback.state_dict()["controller"]
    assert (counted["steps"], counted["examples"]) == (3 * 3, 3 * 20)


@pytest.mark.filterwarnings("ignore:A batch of 1 has no halves to compare")
@pytest.mark.filterwarnings("ignore:A step of one micro-batch in one process")
def test_one_process_that_compares_micro_batches_keeps_two_of_them() -> None:
    """Halves that nobody asked for may be refused: by then one micro-batch is all there is."""

    class Wants(Asks):
        needs_noise_scale = True

    for needs, compared, size, least in (
        (Wants, {"small_batch": "micro_batch"}, 2, 2),
        (Asks, {"small_batch": "micro_batch"}, 2, 1),
        (Wants, {}, 1, 2),
        (Wants, {}, 2, 2),
        (Wants, {"small_batch": "half"}, 2, 1),
        (Wants, {"cut": "net"}, 2, 1),
    ):
        module, batches = Names(24 * size), names(24 * size, size)
        if "cut" in compared:  # which names a module, and `Names` has none
            module, batches = classifier(), loader(size, 24 * size)
        callback = BatchSizeScheduler(needs((1,)), max_batch_size=64)
        trainer(
            1,
            strategy="auto",
            callbacks=[callback, NoiseScaleMonitor(**compared)],
            accumulate_grad_batches=4,
        ).fit(module, batches)

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

    trainer(
        1,
        strategy="auto",
        callbacks=[scheduler(1, 2, 3, 3, lr_scaling="linear")],
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
    ).fit(module, names(14, 2, sized=False))

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
    fitting = trainer(1, strategy="auto", callbacks=[averages, callback], max_epochs=3)
    fitting.fit(module, names(24, 2))

    assert len(module.arrived) == 4 * 12
    assert callback.state_dict()["controller"]["steps"] == len(windows(12, 3, (1, 3)))
    assert type(fitting.accumulate_grad_batches) is int
    assert fitting.accumulate_grad_batches == 1


@pytest.mark.parametrize("ranks", [1, 2])
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
    x, y = torch.randn(32_000, 2, generator=generator), torch.randn(32_000, generator=generator)
    noise = TensorDataset(x * torch.tensor([1.0, 0.1]), y)

    def results(fitted: Any, _: Any) -> Any:
        monitor = next(c for c in fitted.callbacks if isinstance(c, NoiseScaleMonitor))
        along = monitor.extra_noise_scales["along_gradient"]
        by = next(c for c in fitted.callbacks if isinstance(c, BatchSizeScheduler))
        return along.steps, [(move.after.batch_size, move.reason) for move in by.moves]

    monitor = NoiseScaleMonitor(every_n_steps=1)
    found = fit(
        BatchSizeScheduler(InnerProductTest(0.3), max_batch_size=512, lr_scaling="none"),
        monitor,
        ranks=ranks,
        strategy="ddp_fork" if ranks > 1 else "auto",
        model=Line(),
        train_loader=DataLoader(noise, batch_size=64 // ranks, shuffle=True),
        results=results,
    )

    if ranks == 1:  # a fit without the scheduler has no need of momentum
        trainer(1, strategy="auto", callbacks=[monitor]).fit(classifier(), loader())
    assert len(found) == ranks
    assert all(one == found[0] for one in found)
    steps, moves = found[0]
    assert steps >= 8
    assert moves
    assert all("noise along the gradient" in reason for _, reason in moves)


def test_without_momentum_the_inner_product_test_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one with momentum in all parameter"):
        trainer(1, strategy="auto", callbacks=[BatchSizeScheduler(InnerProductTest())]).fit(
            classifier(), loader()
        )
