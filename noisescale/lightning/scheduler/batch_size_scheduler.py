# SPDX-License-Identifier: Apache-2.0
"""BatchSizeScheduler: the batch size follows the noise scale while a Lightning Trainer trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from noisescale.checks import check_confidence, is_positive, refuse, require_choice
from noisescale.guard import Guard, NotMeasured
from noisescale.lightning import trainer_access
from noisescale.lightning.monitor.noise_scale_monitor import NoiseScaleMonitor
from noisescale.lightning.scheduler.device_batches import check_resizable
from noisescale.lightning.scheduler.schedulable import check_schedulable
from noisescale.lightning.scheduler.scheduled_fit import ScheduledFit, TrainerChanges, check_saved
from noisescale.lightning.scheduler.schedules import PROGRESS, ProgressBy, default_progress
from noisescale.meter.meter import Meter
from noisescale.plan import Plan
from noisescale.printable import arguments
from noisescale.refusal import Refusal
from noisescale.scheduling.decision import Move
from noisescale.scheduling.find import Find
from noisescale.scheduling.learning_rate import LearningRateScaling
from noisescale.scheduling.policies import PolicyLike, count_of
from noisescale.scheduling.settings import (
    CONFIDENCE,
    DECIDE_EVERY_N_STEPS,
    SchedulerOptions,
    Settings,
)

if TYPE_CHECKING:
    import pytorch_lightning as pl

_ROOT = "batch_size/"


def _checked_examples(given: float | str) -> float:
    found = count_of(given) if isinstance(given, str) else given
    if found is None or not is_positive(found):
        remedy = 'Write, for example, 500_000 or "2M".'
        refuse("max_examples", "be a positive number of examples", repr(given), remedy)
    return float(found)


class BatchSizeScheduler(trainer_access.Callback):
    """Let the batch size follow the gradient noise scale, and the learning rate the batch size.

    Add it to the callbacks of a Trainer, of `lightning` or of `pytorch_lightning`:

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[BatchSizeScheduler()])

    The loader's batches stay as they are; a step takes more or fewer of them. Between two steps, at
    the same step on all ranks, the policy chooses a batch size from the noise scale of the last
    steps. The batch size changes only if the interval of the noise scale calls for it, see `Gate`.
    With `max_device_batch_size` the loader's batches change too, from one epoch to the next.

    Every window of batches is exact, however its length changes: no gradient is used twice, none is
    lost, and the mean is over the batches that are in it, also in the short last window of an
    epoch. If the loader has no length, its end is known only at its last batch: then the gradient
    of the last window is rescaled before it is clipped.

    At Lightning's log steps every logger gets these keys:

    | key | meaning |
    |---|---|
    | `batch_size/wanted` | global batch that the policy asked for last, in examples |
    | `batch_size/planned` | global batch of the plan, from the mean of the batches that came |
    | `batch_size/given` | global batch that the steps had since the last log step, as they came |
    | `batch_size/lr_factor` | factor on the learning rate that the run's own schedule gives |
    | `batch_size/best`, `batch_size/best_low`, `batch_size/best_high` | the estimate of `Find` |
    | `batch_size/loss_slope` | slope of the training loss, which `Find` goes by |
    | `batch_size/noise_scale` | noise scale of the last steps, for decisions; only if resolved |

    Every move is printed on the console and written to TensorBoard as the text `batch_size/moves`.
    `trainer.callback_metrics` also has the metrics at the ends of epochs and validations. NaN means
    that a metric is not known.

    If the policy needs the noise scale and gradients cannot be measured, a warning says so once,
    and the batch size stays as it is.

    Learning-rate schedules never see the factor: it is applied only while the optimizer steps.

    A function of your own can be the policy, too. Set `needs_noise_scale = True` on it (or on its
    class): then the noise scale is measured, and the function is called every
    `decide_every_n_steps`. Without this attribute it is called at every step, and each step waits
    for the ranks and the device. It then gets a noise scale only if a monitor is among the
    callbacks, and otherwise one that is not resolved. A function for `lr_scaling` gets b = 0 if
    nothing is measured.

    Args:
        policy: "auto" or "find": the best batch size for the examples of the run, see `Find`; if
            its end is not known, "tradeoff". "tradeoff": √(r·B_simple), where r is the run's
            critical batch size so far; "ratio": B_simple; "norm_test": 4·B_simple; "doubling":
            twice the batch once B_simple exceeds twice the batch; "seesaw", "smith": grow when your
            schedule lowers the learning rate; "nanochat": a quarter, then half of the batch in the
            first tenth of the run; a text as "0:64 500k:128", by examples. Or a mapping
            to global batch sizes from steps ({0: 64, 1000: 128}) or from examples ({"0": 64, "2M":
            128}), a `Policy`, or a function from (noise scale, plan, progress) to a global batch
            size.
        min_batch_size: Least global batch, in examples. Default: one batch a device.
        max_batch_size: Largest global batch, in examples. Default: 1/50 of the run's examples, so
            that at least 50 steps would be left; none for a mapping, or if the run's end is not
            known.
        lr_scaling: "sqrt" or "capped_sqrt" (for Adam), "adascale" (for SGD),
            "linear", "malladi", "saturating", "none" or a function, see `factors_for`. "auto":
            "adascale" for SGD if the policy uses the noise scale; for "seesaw", "smith" and
            "doubling" the published rule; else "sqrt".
        monitor: The monitor that measures. Default: the monitor among the Trainer's callbacks (of
            several, the one without a name, else the first), or a new one.
        max_device_batch_size: Largest batch of the loader, in rows on one device. Default: the
            loader's batches stay as they are.
        progress: The clock of your learning-rate schedules that count steps. "run": the share of
            the run that is over; a schedule sized by `trainer.estimated_stepping_batches` then ends
            with the run. The share is counted in examples if epochs end the run, in optimizer steps
            if `max_steps` does. If the end is not known, "run" is the same as "examples".
            "examples": steps of the first batch size. "steps": optimizer steps, as Lightning
            counts; `policy="auto"` is then "tradeoff". "gain": AdaScale's scale-invariant steps, of
            which a run may have more or fewer than a schedule, and by which shares of the run go. A
            resumed run keeps its clock.
        confidence: Coverage of the noise scale's interval, which allows or holds back a move.
        decide_every_n_steps: Steps between decisions on the noise scale. Each decision waits for
            the device once. Schedules by steps change the batch size at the exact step, whatever
            this is.
        max_examples: The fit ends after so many examples of all devices, as a number or as a text
            such as "2M", unless its epochs or steps end before. Schedules sized by
            `trainer.estimated_stepping_batches` end with it. Give it instead of `max_steps` alone,
            which larger batches make a run of more examples.
        weight_fn: See `NoiseScaleMonitor`, for the monitor that is made here. Pass it to your own
            monitor if there is one.
        group_fn: As `weight_fn`.
        batch_size_fn: As `weight_fn`. It also counts where no noise scale is measured.

    Raises:
        ValueError: If an argument is out of its range; when training starts, if no plan meets
            the bounds.
        TypeError: If an argument has a wrong type.
        MisconfigurationException: When a fit starts under an unsupported Trainer.

    Examples:
        >>> scheduler = BatchSizeScheduler("ratio", max_batch_size=4096, lr_scaling="adascale")
        >>> scheduler.moves
        []

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix D. Johnson et al. 2020,
        arXiv:2007.05105, for AdaScale.
    """

    def __init__(
        self,
        policy: PolicyLike = "auto",
        min_batch_size: float | None = None,
        max_batch_size: float | None = None,
        lr_scaling: LearningRateScaling = "auto",
        monitor: NoiseScaleMonitor | None = None,
        *,
        max_device_batch_size: int | None = None,
        progress: ProgressBy | None = None,
        confidence: float = CONFIDENCE,
        decide_every_n_steps: int = DECIDE_EVERY_N_STEPS,
        max_examples: float | str | None = None,
        weight_fn: Callable[[Any], Any] | None = None,
        group_fn: Callable[[Any], Any] | None = None,
        batch_size_fn: Callable[[Any], float] | None = None,
    ) -> None:
        super().__init__()
        if progress is not None:
            require_choice("progress", progress, PROGRESS, "Choose one.")
        self._options = SchedulerOptions(
            policy=policy,
            lr_scaling=lr_scaling,
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_device_batch_size=max_device_batch_size,
            decide_every_n_steps=decide_every_n_steps,
        )
        settings = Settings.from_options(self._options)
        self._max_examples = None if max_examples is None else _checked_examples(max_examples)
        self._measured = settings.needs_noise_scale
        self._extra = settings.policy.extra
        check_confidence(confidence)
        self._progress = progress
        self._needs_monitor = self._measured or progress == "gain"
        self._confidence = confidence
        self._monitor = monitor
        self._batch_size_fn = batch_size_fn
        counts = {"batch_size_fn": batch_size_fn}
        functions = {"weight_fn": weight_fn, "group_fn": group_fn} | counts
        self._for_monitor = {name: one for name, one in functions.items() if one is not None}
        if monitor is not None or not self._needs_monitor:
            got = "one, and a monitor" if monitor is not None else "one, and no need of a monitor"
            needed = [] if monitor is not None else [*counts]
            self._refuse_functions("be None where the scheduler makes no monitor", got, needed)
        self._own_monitor = NoiseScaleMonitor(
            batch_size_fn=batch_size_fn, weight_fn=weight_fn, group_fn=group_fn
        )
        self._guard = Guard()
        self._loaded: dict[str, Any] | None = None
        self._taken: TrainerChanges | None = None  # since a fit has started
        self._fit: ScheduledFit | None = None  # since its first batch
        self._warned = self._warned_of_steps = False
        self._counter: trainer_access.BatchCounter | None = None  # of a fit without a monitor
        self._monitors: list[NoiseScaleMonitor] = []

    def __repr__(self) -> str:
        """Show arguments other than `monitor` that are not the defaults, and the plan of a fit."""
        plan = f": {self.plan}" if self.plan is not None else ""
        own = {
            "progress": self._progress,
            "confidence": self._confidence,
            "max_examples": self._max_examples,
            **self._for_monitor,
        }
        given = arguments(BatchSizeScheduler, **vars(self._options), **own)
        return f"{type(self).__name__}({given}){plan}"

    def _refuse_functions(self, requirement: str, got: str, needed: Sequence[str] = ()) -> None:
        """Refuse what is meant for the monitor that is made here, where none is made."""
        for name in self._for_monitor:
            if name not in needed:
                remedy = f"Pass it to the monitor: `NoiseScaleMonitor({name}=...)`."
                refuse(name, requirement, got, remedy)

    @property
    def moves(self) -> list[Move]:
        """The last thousand changes of the batch size in this fit."""
        return [] if self._fit is None else list(self._fit.controller.moves)

    @property
    def plan(self) -> Plan | None:
        """How a step is made up now (`Plan`); None before training."""
        return None if self._fit is None else self._fit.controller.plan

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # The monitor has to see a gradient before it is rescaled here, so it comes first. The
        # list is replaced, as Lightning is going through it.
        others = [
            callback for callback in trainer_access.callbacks_of(trainer) if callback is not self
        ]
        if self._monitor is None:
            found = [callback for callback in others if isinstance(callback, NoiseScaleMonitor)]
            found.sort(key=lambda monitor: monitor.name is not None)  # stable: else the first
            if found:
                self._refuse_functions("be None if a monitor is among the callbacks", "one")
            if found or self._needs_monitor:
                self._monitor = found[0] if found else self._own_monitor
        if self._monitor is not None:
            stays = "BatchSizeScheduler leaves the batch size as it is." if self._measured else ""
            self._monitor.follow(self._extra, self._confidence, consequence=stays)
            if self._monitor not in others:
                others.insert(0, self._monitor)
            where = others.index(self._monitor) + 1
            trainer_access.set_callbacks(trainer, [*others[:where], self, *others[where:]])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # As the monitor does: from a checkpoint, or on this Trainer.
        saved = self._loaded
        if saved is None:
            saved = self.state_dict() if trainer.global_step else {}
        self._loaded = None
        check_saved(saved)
        self._taken = self._fit = self._counter = None
        self._monitors = [
            one
            for one in trainer_access.callbacks_of(trainer)
            if isinstance(one, NoiseScaleMonitor)
        ]
        check_schedulable(trainer, self)
        self._taken = TrainerChanges(trainer, self._options.max_device_batch_size, saved)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (saved := self._loaded) is not None and self._taken is not None:
            self._loaded = None  # some strategies restore after their setup
            check_saved(saved)
            self._taken.close()
            self._taken = TrainerChanges(trainer, self._options.max_device_batch_size, saved)
        self._publish(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer_access.is_fitting(trainer):
            self._publish(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._skip_backward:
            return  # averaged weights are being prepared: nothing is trained
        if self._fit is None:
            try:
                self._fit = self._begin(trainer, batch)
                if choice := self._fit.controller.choice:
                    self._tell(trainer, choice)
                if isinstance(self._fit.controller.settings.policy, Find):
                    self._warn_of_steps(trainer, self._fit)
                self._warn_of_schedule(trainer, self._fit)
                self._add_charts(trainer, self._fit)
            except NotMeasured as uncountable:
                if not self._measured:
                    raise trainer_access.MisconfigurationException(str(uncountable)) from None
                return  # the monitor has told that the batch size stays as it is
        if batch_idx == 0:
            self._fit.schedules.begin_epoch(trainer)
        if self._fit.begins_step(trainer, batch_idx):
            self._decide(trainer, self._fit)
            self._fit.begin_step(trainer, batch_idx)
            for logged in (logged for monitor in self._monitors for logged in monitor.meters):
                self._fit.controller.tell(logged.meter)
        self._count(trainer, self._fit, batch)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        if self._fit is not None:
            self._fit.add_loss(trainer, loss)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._fit is None:
            return
        self._fit.rescale_short_step(trainer, optimizer)
        if trainer_access.should_log(trainer):
            self._log(trainer, self._fit, trainer_access.log_step(trainer), in_step=True)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if (
            self._fit is None
            or trainer.fit_loop._skip_backward
            or not trainer_access.steps_now(trainer)
        ):
            return
        if trainer_access.is_last_batch(trainer) or trainer_access.looks_after_batch(
            trainer, _ROOT
        ):
            self._publish(trainer)
        if surprise := self._fit.count_step(trainer, batch):
            trainer_access.rank_zero_warn(f"BatchSizeScheduler: {surprise}")
        if self._fit.is_over:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit is not None:
            average = None if self._meter is None else self._meter.average_moments
            if (changed := self._fit.resize(trainer, average)) is not None:
                self._tell(trainer, str(changed))
        self._publish(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = max(trainer_access.log_step(trainer) - 1, 0)
        if self._fit is None:
            return
        if step != self._fit.logged_step:
            self._log(trainer, self._fit, step, in_step=False)
        if stayed := self._fit.controller.reason_to_stay:
            self._tell(trainer, stayed)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._loaded = None  # what validate and test load belongs to no fit
        self._stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def state_dict(self) -> dict[str, Any]:
        if self._fit is not None:
            return self._fit.state_dict()
        return {} if self._taken is None else self._taken.saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _begin(self, trainer: pl.Trainer, batch: Any) -> ScheduledFit:
        taken = self._taken
        assert taken is not None
        loaders = trainer.fit_loop._combined_loader
        if taken.loaders is not None and loaders is not None:
            check_resizable(loaders.flattened)
        least, examples = 1, self._examples_in(trainer, batch)
        if self._needs_monitor and self._monitor is not None:
            # A run that accumulates in one process is measured by its micro-batches, and keeps two:
            # whether halves of a batch would do, one process finds out at a step without others.
            halves = self._monitor.compares_within_batches and examples > 1
            needed = 1 if trainer.world_size > 1 or halves else 2
            if self._meter is not None:
                needed = max(self._meter.least_micro_batches, needed)
            least = min(needed, taken.accumulation)
        progress = self._progress or default_progress(taken.saved, measured=self._needs_monitor)
        try:
            return ScheduledFit(
                trainer, taken, examples, least, self._options, progress, self._max_examples
            )
        except Refusal as refused:
            if "max_batch_size" not in refused.arguments:
                raise
            counted = f"The first batch of a device counts as {examples:g} examples"
            remedy = f"{refused.remedy} {counted}: if it holds another number, use `batch_size_fn`."
            raise Refusal(refused.arguments, refused.requirement, refused.got, remedy) from refused

    @property
    def _meter(self) -> Meter | None:
        """The meter that decisions go by; None if nothing is measured."""
        return None if self._monitor is None else self._monitor.meter

    def _decide(self, trainer: pl.Trainer, fit: ScheduledFit) -> None:
        """Change the batch size if that is due and called for."""
        controller = fit.controller
        # Reading it waits for the device: not at every step for a schedule that goes by steps.
        reads = self._needs_monitor or controller.settings.takes_noise_scale
        move = controller.decide_if_due(
            self._meter if reads else None,
            confidence=self._confidence,
            device_batch_size=controller.plan.device_batch_size,
        )
        if move is not None:
            self._tell(trainer, str(move))
            if move.after.batch_size > move.before.batch_size:
                self._warn_of_steps(trainer, fit)
            if fit.schedules.drifts(trainer) and not self._warned:
                self._warned = True
                trainer_access.rank_zero_warn(
                    "The learning-rate schedule counts optimizer steps, and the run now has more or"
                    ' fewer of them than the schedule was made for. Pass `progress="run"` to'
                    " BatchSizeScheduler: then the schedule ends with the run."
                )

    def _warn_of_schedule(self, trainer: pl.Trainer, fit: ScheduledFit) -> None:
        """Say what a policy that follows the schedule makes of one that does not fall."""
        policy, given = fit.controller.settings.policy, self._options.policy
        ahead = fit.controller.ahead
        if not policy.follows_schedule:
            return
        name = repr(given) if isinstance(given, str) else policy.kind
        grows = f"`policy={name}` grows the batch where a schedule lowers the learning rate"
        stays = "The batch size stays"
        remedy = '`policy="tradeoff"` needs no schedule: it pays for fewer steps with some loss.'
        if not trainer.lr_scheduler_configs:
            trainer_access.rank_zero_warn(
                f"BatchSizeScheduler: {grows}, and the module has no schedule. {stays}, unless the"
                " module lowers the learning rate itself. Return a schedule from"
                f" `configure_optimizers`. {remedy}"
            )
        elif ahead is not None and ahead.never_falls:
            trainer_access.rank_zero_warn(
                f"BatchSizeScheduler: {grows}, and this run's schedule never lowers it. {stays}."
                f" {remedy}"
            )
        elif ahead is not None and ahead.restarts:
            trainer_access.rank_zero_warn(
                f"BatchSizeScheduler: {grows}, and this run's schedule raises it again"
                f" {ahead.restarts} times: the batch size falls there. Leave `policy` at"
                ' "auto", which goes by no schedule.'
            )

    def _warn_of_steps(self, trainer: pl.Trainer, fit: ScheduledFit) -> None:
        """Say once that a run of a number of steps takes more examples for a larger batch."""
        if self._warned_of_steps or fit.controller.progress.ends_by != "steps":
            return
        self._warned_of_steps = True
        examples = self._max_examples or trainer.max_steps * fit.controller.base_batch_size
        wanted = f"pass `max_examples={examples:.0f}` to BatchSizeScheduler, and "
        trainer_access.rank_zero_warn(
            f"`max_steps={trainer.max_steps}` ends this run, whatever the size of a step. So a"
            " larger batch takes more examples here, and no fewer steps. For the same examples in"
            f" fewer steps, {'' if self._max_examples else wanted}leave `max_steps` out."
        )

    def _log(self, trainer: pl.Trainer, fit: ScheduledFit, step: int, *, in_step: bool) -> None:
        fit.note_logged(step, in_step=in_step)
        metrics = self._metrics(fit)
        if trainer_access.has_log_steps(trainer):
            for logger in trainer.loggers:
                with self._guard(f"The batch size was not logged to {type(logger).__name__}"):
                    logger.log_metrics(metrics, step=step)
        self._publish(trainer)

    def _metrics(self, fit: ScheduledFit) -> dict[str, float]:
        controller = fit.controller
        metrics = controller.metrics | {_ROOT + "given": fit.given}
        if self._monitor is not None and (now := self._monitor.noise_scale).resolved:
            metrics[_ROOT + "noise_scale"] = now.value
        return metrics

    def _add_charts(self, trainer: pl.Trainer, fit: ScheduledFit) -> None:
        """Show the batch size on TensorBoard's Custom Scalars page."""
        for logger in trainer.loggers if trainer.is_global_zero else ():
            with self._guard("The batch size is not on TensorBoard's Custom Scalars page"):
                if writer := trainer_access.summary_writer_of(logger):
                    from noisescale.meter.tensorboard_layout import batch_size_charts, merge_into

                    page = batch_size_charts(fit.controller.settings.policy.logged)
                    merge_into(writer, page, self._guard).close()

    def _publish(self, trainer: pl.Trainer) -> None:
        """Put all metrics where other callbacks look for them; NaN stands for unknown values."""
        with self._guard("The batch size is not in `callback_metrics`"):
            names = (
                "wanted",
                "planned",
                "given",
                "lr_factor",
                *(["noise_scale"] if self._monitor else []),
            )
            unknown = dict.fromkeys((_ROOT + name for name in names), math.nan)
            known = {} if self._fit is None else self._metrics(self._fit)
            trainer_access.publish(trainer, unknown | known)

    def _tell(self, trainer: pl.Trainer, text: str) -> None:
        trainer.lightning_module.print(f"BatchSizeScheduler: {text}")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                with self._guard("A move of the batch size is not in TensorBoard"):
                    if writer := trainer_access.summary_writer_of(logger):
                        writer.add_text("batch_size/moves", text, trainer_access.log_step(trainer))

    def _count(self, trainer: pl.Trainer, fit: ScheduledFit, batch: Any) -> None:
        examples = fit.controller.plan.device_batch_size
        with self._guard("The examples of a batch cannot be counted, and are taken as usual"):
            counted = None if self._monitor is None else self._monitor.local_batch_size
            examples = self._examples_in(trainer, batch) if counted is None else counted
        fit.count_batch(trainer, examples)

    def _examples_in(self, trainer: pl.Trainer, batch: Any) -> float:
        if self._monitor is None and self._batch_size_fn is None:
            if self._counter is None:
                self._counter = trainer_access.BatchCounter(trainer, "BatchSizeScheduler")
            return float(self._counter(batch))
        return (self._monitor or self._own_monitor).examples_in(batch)

    def _stop(self) -> None:
        """Leave the Trainer and the optimizers as they were."""
        for changed in (self._taken, self._fit):
            if changed is not None:
                changed.close()
