# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleMonitor: the gradient noise scale of a Lightning run, measured and logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from noisescale.batches.batch_counter import check_batch_size
from noisescale.batches.batch_size import rows_in
from noisescale.batches.data_order import warning_of_order
from noisescale.batches.row_groups import (
    RowGroups,
    check_groups_are_used,
    checked_row_groups,
)
from noisescale.batches.weights import GuessedTerms, checked_weight, guess_terms_in, terms_in
from noisescale.checks import check_function
from noisescale.collectives import any_rank
from noisescale.collectors.collector import ACCUMULATE
from noisescale.collectors.groups import Groups
from noisescale.guard import Guard, NotMeasured, never_ends_training
from noisescale.history.metric_names import check_monitor_name, prefix_of
from noisescale.lightning import trainer_access
from noisescale.lightning.monitor.meters import (
    has_several,
    ids_of_trained,
    meters_for,
    trained_parameters,
    way_of_measuring,
    with_assigned_groups,
)
from noisescale.lightning.monitor.one_loss import STEPS_APART, OneLoss, Verdict
from noisescale.lightning.monitor.reporting import (
    folders_of_loggers,
    hand_over_records,
    report_run,
    warn_if_text_alone,
)
from noisescale.lightning.monitor.unseen_steps import UnseenSteps
from noisescale.lightning.supported import check_supported, refuse_namesakes
from noisescale.meter.capture import KnownToHost
from noisescale.meter.choosing import several_gradients_a_step
from noisescale.meter.extra import Extra, ExtraMeasurement
from noisescale.meter.measuring_callback import MeasuringCallback
from noisescale.meter.options import MeterOptions, SmallBatch
from noisescale.meter.run_log import RunLog, nothing_measured
from noisescale.prediction.closing import closing_lines
from noisescale.printable import arguments

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class _Fit:
    """The state of a fit, from batch to batch."""

    counter: trainer_access.BatchCounter = field(default_factory=trainer_access.BatchCounter)
    trained: set[int] = field(default_factory=set)
    layouts: ExitStack = field(default_factory=ExitStack)
    batch: Any = None
    """The batch, until its weight and its groups have been asked for."""
    batch_idx: int = 0
    local_batch_size: float = 0
    weight: float | Tensor | None = None
    """The weight of the batch in the loss, in a measured step with `weight_fn`."""
    terms: Tensor | GuessedTerms | None = None
    """The tokens of the batch, in a measured step without `weight_fn`."""
    row_groups: RowGroups | None = None
    """The groups of the rows of the batch, in a measured step with `group_fn`."""
    rows_of_batch: int | None = None
    """The rows of the batch, if `batch_size_fn` counts something else."""
    by_engine: bool = False
    """Whether an engine accumulates and steps, see `engine_steps`."""
    stepped: bool = False
    """Whether an optimizer has stepped since the batch began."""
    several: bool = False
    """Whether the module steps several optimizers by hand."""
    options: MeterOptions | None = None
    """The options of the meters."""
    one_loss: OneLoss | None = None
    """Looks at the first steps of several optimizers; None once what they step on is known."""
    stepped_together: set[int] | None = None
    """Optimizers of one loss that have taken the step, by index; None: there are none."""
    unseen: UnseenSteps | None = None
    """Steps by hand that no meter can close, of optimizers not seen to step otherwise."""
    count_distinct: Callable[[Any], float] | None = None
    """Counts the distinct examples of a batch, if the loader repeats each example."""
    groups_in: Callable[[Any], Any] | None = None
    """The function from a batch to the groups of its rows, if there is one."""


_MORE_DEVICES = (
    ', or use more devices (`Trainer(devices=2, strategy="ddp")`; this also works with'
    ' `accelerator="cpu"`).'
)
_BY_TRAINER = (
    "Accumulate two or more micro-batches in each step (`Trainer(accumulate_grad_batches=2)`)"
)
_BY_HAND = (
    f"{ACCUMULATE} in each step (call `manual_backward` for each of several batches before the"
    " optimizer's `step`)"
)
_SMALLER = (
    "An epoch has one batch, and Lightning steps at its end: use half the batch size in the data"
    " loader and `accumulate_grad_batches=2`"
)

_HOW_TO_SHUFFLE = "Shuffle them (`DataLoader(..., shuffle=True)`), unless their order is random."


class NoiseScaleMonitor(MeasuringCallback, trainer_access.Callback):
    """Measure the simple gradient noise scale during training and log it.

    Add it to the callbacks of a Trainer, of `lightning` or of `pytorch_lightning`:

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[NoiseScaleMonitor()])

    It compares gradients of small batches with the gradient of the step. Under DDP or FSDP a small
    batch is one rank's. In one process that accumulates it is one micro-batch. In one process that
    does not accumulate it is half of the batch. See `small_batch`. The training is bitwise the same
    with and without the monitor. Where gradients cannot be measured, a warning has the reason and
    what to change, and training goes on.

    Every logger gets these keys at Lightning's own log steps. Values are finite. Noise-scale values
    appear once their interval has an upper end; the lower bound is always logged.
    `trainer.callback_metrics` has these keys, also where epochs and validations end, for
    `ModelCheckpoint(monitor=...)`. A value that is not known is NaN there, at which `EarlyStopping`
    stops: pass it `check_finite=False`, or let it use the lower bound.

    | key | meaning |
    |---|---|
    | `noise_scale/simple` | B_simple = tr(Σ)/‖G‖², in `unit` |
    | `noise_scale/simple_low`, `noise_scale/simple_high` | the ends of its interval |
    | `noise_scale/efficiency` | B_simple/(B_simple + B): progress per example |
    | `noise_scale/lower_bound` | the lower end of the interval, always |
    | `noise_scale/grad_sq_norm`, `noise_scale/noise_trace` | ‖G‖² and tr(Σ) of the same steps |
    | `noise_scale/batch_size` | the global batch size of that step |
    | `noise_scale/seconds_per_step` | measured, without validation and checkpoints |
    | `noise_scale/skipped_steps` | steps left out so far: not finite, or nothing to compare |
    | `noise_scale/between`, `noise_scale/within` | between groups of rows, in groups, and within \
      them, in rows, with `group_fn`; each also with `_low` and `_high` |
    | `noise_scale/group/<name>` | B_simple of a group of parameters, with `groups` |
    | `noise_scale/<name>`, `noise_scale/<name>_low`, `noise_scale/<name>_high` | what is measured \
    beside, with `extra` |

    All columns of `monitor.history` are recorded at the same steps in the file `noise_scale.jsonl`,
    in the folder of each logger that has one. `noisescale predict`, `watch`, `compare` and
    TensorBoard's tab read it there. W&B and MLflow store it with the run.

    Several optimizers (manual optimization) that step together on one loss, as Muon and AdamW do,
    have one noise scale: the first step is not measured, as it shows that. Else each is measured on
    its own parameters, as the two of a GAN. The keys of the first are those above; the keys of the
    second begin with `noise_scale/optimizer_1/`.

    The averaged gradient is read in `on_before_optimizer_step`, before Lightning clips it. A
    gradient that is changed earlier, in `on_after_backward`, spoils the comparison. Decoupled
    weight decay (AdamW) is not part of the gradient. `ddp_fork` and `ddp_spawn` train in other
    processes, which return `callback_metrics` alone: read the results there or in a logger.

    Args:
        window: Measured steps to average over, or "auto"; see `NoiseScaleEstimator`.
        every_n_steps: Measure every n-th optimizer step. "auto" measures as often as
            `max_overhead` allows. Windows count measured steps.
        batch_size_fn: A function from a batch to the number of examples in it on this rank, in
            `unit`. Default: the first dimension that the tensors share, or the length of a list of
            examples. Where both are possible a warning says which is used. Tokens need a function,
            and so do batches with several augmented copies of one example, which count once.
        unit: What `batch_size_fn` counts. It is recorded with the run, and predictions name it.
            "tokens" needs a `batch_size_fn`.
        groups: Groups of parameters that get a noise scale each, from the same pass: a dict from
            names to regular expressions, or a function. See `NoiseScaleMeter`.
        confidence: Coverage of the interval, between 0 and 1.
        small_batch: What is compared with the step's gradient: "rank", "micro_batch" or "half".
            "auto" uses the first of these that a step has several of. See `NoiseScaleMeter`.
        extra: What is measured beside, such as `NoiseAlongGradient`. See `ExtraMeasurement`.
        cut: Names of the submodules at whose outputs the halves of a batch are separated. Default:
            the modules that the training step calls. See `NoiseScaleMeter`.
        backward_twice: Whether a backward pass may go twice through Functions, hooks and saved
            tensors that are not known. See `NoiseScaleMeter`.
        max_overhead: The share of the run's time that measuring may take: 0.01 is 1 % throughout.
            Default: 5 % of the first ten minutes at most, then 1 %. See `NoiseScaleMeter`.
        weight_fn: A function from a batch to its weight, where the loss is one mean over the tokens
            (or positives, or groups) of a step. The weight is their number in the batch, or a
            tensor with the number in each row. It is called in measured steps. Where each batch's
            loss is a mean of its own none is needed. See the page "Weights".
        group_fn: A function from a batch to the group of each row, where rows are not independent
            of each other: the completions of one prompt, pairs, augmented copies. A tensor or a
            list of numbers or names. Halves of a batch then have whole groups, and rows of one
            group may act on each other in the loss. It is called in measured steps. Micro-batches
            and ranks need no function, but whole groups. See the page "Ways of training".
        report: At the end of the fit, print what other batch sizes and more devices would cost, and
            save it with figures as `noise_scale.html` in the run's folder. W&B and MLflow get the
            page too. The page needs plotly: `pip install "noisescale[report]"`.
        name: Separates several monitors of one Trainer, in checkpoints, files and logs. The keys
            begin with `noise_scale/<name>/`. One monitor needs no name.

    Raises:
        ValueError: If an argument is out of its range, `group_fn` has no effect, or `unit` is
            "tokens" without a `batch_size_fn`.
        TypeError: If `batch_size_fn`, `weight_fn` or `group_fn` is not callable, or `groups` has a
            wrong type.
        MisconfigurationException: When a fit starts, if two monitors have the same name.

    Examples:
        >>> monitor = NoiseScaleMonitor(window=200)
        >>> print(monitor.noise_scale)
        not measured yet

    References:
        McCandlish et al. 2018, arXiv:1812.06162.
    """

    def __init__(
        self,
        window: int | Literal["auto"] = "auto",
        every_n_steps: int | Literal["auto"] = "auto",
        batch_size_fn: Callable[[Any], float] | None = None,
        unit: str = "examples",
        groups: Groups | None = None,
        confidence: float = 0.95,
        *,
        small_batch: SmallBatch = "auto",
        extra: Sequence[Extra] = (),
        cut: Sequence[str] | None = None,
        backward_twice: bool = False,
        max_overhead: float | None = None,
        weight_fn: Callable[[Any], Any] | None = None,
        group_fn: Callable[[Any], Any] | None = None,
        report: bool = False,
        name: str | None = None,
    ) -> None:
        if name is not None:
            check_monitor_name(name)
        check_function("batch_size_fn", batch_size_fn, "the number of examples in it")
        check_function("weight_fn", weight_fn, "the number of tokens in its loss")
        check_function("group_fn", group_fn, "the group of each row")
        options = MeterOptions.from_arguments(locals())
        options.check_unit_is_counted(batch_size_fn)
        if group_fn is not None:
            check_groups_are_used("group_fn", options.small_batch)
        super().__init__(options, trainer_access.MisconfigurationException)
        self._batch_size_fn = batch_size_fn
        self._weight_fn = weight_fn
        self._group_fn = group_fn
        self._name = name
        self._report = report
        self._followed: tuple[Extra, float] | None = None
        self._fit = _Fit()
        self._loaded: dict[str, Any] | None = None
        self._handed_on: dict[str, Any] = {}

    @property
    def _arguments(self) -> str:
        own: dict[str, Any] = {
            "batch_size_fn": self._batch_size_fn,
            "weight_fn": self._weight_fn,
            "group_fn": self._group_fn,
            "report": self._report,
            "name": self._name,
        }
        return arguments(NoiseScaleMonitor, **vars(self._options), **own)

    @property
    def name(self) -> str | None:
        """The name that separates this monitor from other monitors of the same Trainer."""
        return self._name

    @property
    def state_key(self) -> str:
        """The key of the monitor's state in a checkpoint; without a name as in all versions."""
        unnamed = super().state_key
        return unnamed if self._name is None else self._generate_state_key(name=self._name)

    def follow(
        self, extra: Extra | None = None, confidence: float = 0.95, *, consequence: str = ""
    ) -> None:
        """Measure in the next fits for decisions: as often as a scheduler needs.

        Args:
            extra: What to measure beside in the next fit.
            confidence: Coverage of the interval of that.
            consequence: What to say if the next fit cannot be measured: what follows from that.
        """
        super().follow(consequence=consequence)
        self._followed = extra and (extra, confidence)

    @property
    def compares_within_batches(self) -> bool:
        """Whether the user chose to compare halves of a batch."""
        return self._options.cut is not None or self._options.small_batch == "half"

    @property
    def local_batch_size(self) -> float | None:
        """The examples of this rank in the batch under way; None if nothing is measured."""
        return self._fit.local_batch_size if self._measuring else None

    def examples_in(self, batch: Any) -> float:
        """Return the number of examples in a batch, by `batch_size_fn`."""
        size = (self._count or self._fit.counter)(batch)
        check_batch_size(size, "batch_size_fn", "return")
        return float(size)

    @property
    def _count(self) -> Callable[[Any], float] | None:
        """The function that counts the examples of a batch; None: its rows are counted."""
        return self._batch_size_fn or self._fit.count_distinct

    @property
    def _may_count_rows(self) -> bool:
        """Whether what `batch_size_fn` counts may be rows: not tokens, nor groups of rows."""
        counts_others = self._options.counts_tokens or self._group_fn is not None
        return self._batch_size_fn is not None and not counts_others

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A fit that goes on (from a checkpoint, or on this Trainer) continues the averages.
        state = self._loaded
        if state is None:
            state = self.state_dict() if trainer.global_step else {}
        self._loaded = None
        self._handed_on = state
        self._fit = _Fit(trainer_access.BatchCounter(trainer))
        self._fit.by_engine = trainer_access.engine_steps(trainer)
        self._guard = Guard(trainer_access.MisconfigurationException)
        self._forget()
        by_hand = not pl_module.automatic_optimization
        self._how_to_have_several = (_BY_HAND if by_hand else _BY_TRAINER) + _MORE_DEVICES
        monitors = [
            c for c in trainer_access.callbacks_of(trainer) if isinstance(c, NoiseScaleMonitor)
        ]
        refuse_namesakes([monitor.name for monitor in monitors])
        self._fit.trained = ids_of_trained(trainer)
        if not self._fit.trained:
            reason = (
                "No parameter of an optimizer requires a gradient. Unfreeze parameters before"
                " training starts."
                if trained_parameters(trainer)
                else "`configure_optimizers` must return the optimizers that step, got none. Return"
                " them; by manual optimization call `step` of those that `self.optimizers()`"
                " returns."
            )
            self._tell_that_nothing_is_measured(NotMeasured(reason))
            return
        followed, self._followed = self._followed, None
        saved = state.get("optimizers", ())
        self._fit.several = has_several(trainer)
        if self._fit.several:
            if len(saved) == 1:
                self._fit.stepped_together = set()
            elif not (saved or self._options.extra or followed):  # these need one optimizer
                ranks, device = trainer.world_size, trainer.strategy.root_device
                self._fit.one_loss = OneLoss(
                    trainer.optimizers, lambda here: any_rank(here, device) if ranks > 1 else here
                )

        def make() -> list[RunLog]:
            check_supported(trainer)
            options = with_assigned_groups(self._options, trainer)
            if followed is not None:
                options = replace(options, extra=[*options.extra, _at_confidence(*followed)])
            self._news = way_of_measuring(trainer, options)
            self._fit.options = options
            together = self._fit.stepped_together is not None
            return meters_for(trainer, options, name=self._name, together=together)

        self._measure(trainer, make)
        self._pause(True)  # from batch to batch, see `on_train_batch_end`
        if self.meters and by_hand:
            self._fit.unseen = UnseenSteps(trainer.optimizers, self._guard)
        device = trainer.strategy.root_device
        # Ranks of tensor parallelism have the same examples.
        ranks = trainer.world_size if trainer_access.tensor_parallel_size(trainer) == 1 else 1
        accumulation = trainer.accumulate_grad_batches
        self._begin(saved, ranks, device, accumulation)

    def _measure(self, trainer: pl.Trainer, make: Callable[[], list[RunLog]]) -> None:
        self._make_meters(make, trainer.strategy.root_device, trainer.world_size)
        for logged in self.meters:
            logged.meter.suspects = trainer_access.hooks_between_passes(trainer)

    @never_ends_training
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (state := self._loaded) is not None:  # some strategies restore after their setup
            self._loaded = None
            for logged, saved in zip(self.meters, state.get("optimizers", ()), strict=False):
                logged.resume(saved)
        if pl_module.automatic_optimization and trainer.num_training_batches == 1:
            self._how_to_have_several = _SMALLER + _MORE_DEVICES
            for logged in self.meters:
                of_meter = logged.meter.how_to_compare
                logged.meter.how_to_compare = of_meter.replace(ACCUMULATE, _SMALLER)
        for logged in self.meters:
            logged.meter.last_step = trainer_access.last_step_of(trainer)
        batches = getattr(trainer_access.first_loader(trainer), "batch_sampler", None)
        # A sampler that repeats examples has this method: methods/repeated_augmentation.py.
        sampler = getattr(batches, "sampler", None)
        self._fit.count_distinct = getattr(sampler, "distinct_in", None)
        of_sampler = None if self._batch_size_fn else getattr(sampler, "groups_in", None)
        self._fit.groups_in = self._group_fn or of_sampler
        self._publish(trainer)
        with self._guard("The order of the data was not looked at"):
            loader = trainer_access.first_loader(trainer)
            self._caution = warning_of_order(loader, _HOW_TO_SHUFFLE)
        if self._measuring and trainer.is_global_zero:
            for logger in trainer.loggers:
                with self._guard("There are no charts of the noise scale in TensorBoard"):
                    if writer := trainer_access.summary_writer_of(logger):
                        self._add_charts(writer)
            self._record(trainer)
            if self._report:
                warn_if_text_alone()
        elif trainer.is_global_zero and not self._handed_on:
            self._record_why_nothing(lambda: folders_of_loggers(trainer), self._prefix)

    def _record(self, trainer: pl.Trainer) -> None:
        """Have the history recorded in the folders of loggers. On one rank alone."""
        if trainer_access.has_log_steps(trainer):
            with self._guard("The rows of the noise scale are not recorded in a file"):
                folders = folders_of_loggers(trainer)
                for logged in self.meters:
                    logged.record_in(folders)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._measuring:
            with self._leaving_step_out():
                self._fit.local_batch_size = self.examples_in(batch)
                self._fit.batch = batch
                self._fit.weight = self._fit.terms = self._fit.row_groups = None
                self._weigh()
            self._counted = True
            if self._measuring:
                self._begin_batch(trainer, batch, batch_idx)

    @never_ends_training
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        automatic = pl_module.automatic_optimization
        if self._fit.unseen is not None:
            self._fit.unseen.note_pass()
        fit = self._fit
        if fit.one_loss is not None:
            fit.one_loss.look_at_pass(loss, fit.local_batch_size)
        elif fit.stepped_together:  # and others have not
            self._judge(trainer, "steps apart")
        with self._leaving_step_out():
            self._weigh()  # by hand a batch may have several steps
        for logged in self.meters:
            if logged.meter.measuring:
                logged.meter.before_backward(
                    loss,
                    self._fit.local_batch_size,
                    # By hand gradients are clipped before the optimizer's hook, if at all.
                    capture_average=not automatic,
                    host=KnownToHost(None if automatic else self._fit.batch_idx, self._fit.terms),
                    weight=self._fit.weight,
                    row_groups=self._fit.row_groups,
                    rows=self._fit.rows_of_batch,
                    last=trainer_access.steps_now(trainer) if automatic else None,
                )

    @never_ends_training
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if not self._measuring or self._fit.by_engine:
            return
        automatic = pl_module.automatic_optimization
        # No function of ours comes before the step is closed, where the other ranks wait.
        which = trainer.optimizers.index(optimizer) if self._fit.several else 0
        if self._fit.unseen is not None and not self._fit.unseen.is_closed_by(which):
            return
        if self._fit.one_loss is not None:
            self._judge(trainer, self._fit.one_loss.look_at_step(which))
            if self._fit.stepped_together is not None or not self._measuring:
                return
        elif (stepped := self._fit.stepped_together) is not None:
            if which in stepped:
                self._judge(trainer, "steps apart")
                return
            # The gradients are there at the first step of all, and may be dropped after it.
            closed = bool(stepped)
            stepped.add(which)
            if len(stepped) == len(trainer.optimizers):
                stepped.clear()
            if closed:
                return
            which = 0
        logged = self.meters[which]
        if automatic and self._fit.stepped:
            logged.meter.stop(several_gradients_a_step(optimizer))
        self._fit.stepped = True
        # By hand losses are divided as the module likes: by the passes of a step, it is assumed.
        divisor = trainer.accumulate_grad_batches if automatic else None
        if self._close_step(which, divisor) and trainer_access.should_log(trainer):
            self._log(trainer, logged, trainer_access.log_step(trainer))

    def _stop_unseen(self, reasons: Mapping[int, NotMeasured]) -> None:
        """Stop to measure optimizers whose steps are not seen, or all that have one noise scale."""
        if reasons and self._fit.stepped_together is not None:
            reasons = {0: next(iter(reasons.values()))}
        if reasons:
            self._stop_meters(reasons)

    def _judge(self, trainer: pl.Trainer, verdict: Verdict | None) -> None:
        """Measure several optimizers as the first steps have shown that it has to be."""
        fit, looking = self._fit, self._fit.one_loss
        if verdict is None:
            return
        fit.one_loss = None
        if verdict == "steps apart":
            for logged in self.meters:
                logged.meter.stop(NotMeasured(STEPS_APART))
            self._tell_of_unmeasured()
        elif verdict == "one loss" and looking is not None and fit.options is not None:
            options, fit.stepped_together = fit.options, set()
            self._close_meters(interrupted=False)
            self._measure(
                trainer, lambda: meters_for(trainer, options, name=self._name, together=True)
            )
            for logged in self.meters:
                logged.meter.count_step(looking.examples)
            if trainer.is_global_zero:
                self._record(trainer)

    @never_ends_training
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._measuring and self._fit.by_engine:  # which has stepped by now, or accumulates
            # Lightning divides losses, and the engine once more.
            closed = self._close_step(0, trainer.accumulate_grad_batches**2)
            if closed and trainer_access.should_log(trainer):
                self._log(trainer, self.meters[0], trainer_access.log_step(trainer))
        self._fit.batch = None
        self._pause(True)
        if self._fit.unseen is not None:
            self._stop_unseen(self._fit.unseen.take())
        self._tell_news()
        if trainer_access.is_last_batch(trainer) or trainer_access.looks_after_batch(
            trainer, self._prefix
        ):
            self._publish(trainer)

    @never_ends_training
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._interrupt()
        if trainer_access.is_fitting(trainer):
            self._publish(trainer)

    @never_ends_training
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish(trainer)  # an epoch that ends early is not known to before

    @never_ends_training
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._interrupt()
        # A run that is killed and goes on from here does not log again what was before.
        for logger in trainer.loggers:
            with self._guard(f"{type(logger).__name__} did not save the last metrics"):
                logger.save()
        self._hand_over(trainer)

    @never_ends_training
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fit.unseen is not None:
            self._stop_unseen(self._fit.unseen.take_all())
        for logged in self.meters:
            if logged.meter.measuring and logged.unfinished:
                step = max(trainer_access.log_step(trainer) - 1, 0)
                self._log(trainer, logged, step, at_end=True)
            logged.end()
        self._hand_over(trainer)
        if trainer.is_global_zero and not self._report:
            name = type(self).__name__
            if said := closing_lines(self._histories, self._folder, host=name):
                trainer_access.rank_zero_info(f"{name}: {said}")

    @never_ends_training
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._report and self._measuring:
            with self._guard("There is no report of the noise scale"):
                histories = [logged.history for logged in self.meters]
                report_run(trainer, histories, self._guard, self._name)

    @never_ends_training
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._loaded = None  # what validate and test load belongs to no fit
        self._consequence = ""
        self._fit.counter = trainer_access.BatchCounter()  # nor does this one keep the Trainer
        self._stop(interrupted=False)

    @never_ends_training
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._hand_over(trainer)
        self._stop(interrupted=True)

    def _hand_over(self, trainer: pl.Trainer) -> None:
        """Give the records to loggers that keep files, as far as there are any by now."""
        written = [record for record in self._records if record.exists()]
        hand_over_records(trainer, written, self._guard)

    def state_dict(self) -> dict[str, Any]:
        if not self.meters:
            return self._handed_on
        return {"optimizers": [logged.state_dict() for logged in self.meters]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _log(self, trainer: pl.Trainer, logged: RunLog, step: int, *, at_end: bool = False) -> None:
        reading = logged.read(step, at_end=at_end)
        self._tell_of_withheld()
        if trainer_access.has_log_steps(trainer):
            for logger in trainer.loggers:
                with self._guard(f"{type(logger).__name__} did not log the noise scale"):
                    logger.log_metrics(reading.loggable, step=step)
        # What is not known is NaN, not left out: ModelCheckpoint takes NaN for the worst value, and
        # EarlyStopping stops and says why (`check_finite=False` goes on). A monitored key that is
        # missing makes EarlyStopping raise, ModelCheckpoint too once there was a validation. One
        # that stays would pass for a new measurement.
        trainer_access.publish(trainer, reading.metrics)
        if logged is self.meters[0]:
            trainer_access.show_in_progress_bar(
                trainer, self._prefix.rstrip("/"), reading.estimate.short()
            )

    @property
    def _prefix(self) -> str:
        """The prefix of the monitor's metrics, common to all optimizers."""
        return prefix_of(0, self._name)

    def _publish(self, trainer: pl.Trainer) -> None:
        """Put metrics into `callback_metrics`, for early stopping, checkpoints and schedules.

        These read them when epochs and validations end, whatever `log_every_n_steps` is. Loggers
        and the history follow `log_every_n_steps`. Reads the device if there is something new.
        """
        if not self.meters:
            trainer_access.publish(trainer, nothing_measured(self._prefix))
        for logged in self.meters:
            if logged.has_news:
                trainer_access.publish(trainer, logged.look().metrics)

    def _tell(self, message: str) -> None:
        trainer_access.rank_zero_warn(message)

    def _inform(self, message: str) -> None:
        trainer_access.rank_zero_info(message)

    @never_ends_training
    def _begin_batch(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        # First: all ranks look at every batch, also where something below fails on one of them.
        self._look_for_shared_examples(lambda: trainer_access.tensors_of(batch))
        fit = self._fit
        fit.batch_idx, fit.rows_of_batch, fit.stepped = batch_idx, fit.counter.rows, False
        if self._count is not None:
            count = partial(trainer_access.count_examples, trainer)
            fit.rows_of_batch = rows_in(
                batch, fit.local_batch_size if self._may_count_rows else None, count
            )
        self._pause(False)
        if batch_idx == 0 and not fit.trained.issuperset(trained := ids_of_trained(trainer)):
            fit.trained |= trained
            self._tell(
                "Parameters have been unfrozen since the fit started. NoiseScaleMonitor only"
                " measures the parameters that were trained at its start. To measure all of them,"
                " resume the training from a checkpoint."
            )

    def _weigh(self) -> None:
        """Take weight and groups of a batch of a measured step, or what it shows of a weight."""
        fit, batch = self._fit, self._fit.batch
        if batch is None:
            return
        if not any(logged.meter.measuring and logged.meter.due for logged in self.meters):
            return
        fit.batch = None
        if fit.groups_in is not None and self._options.small_batch in ("auto", "half"):
            fit.row_groups = checked_row_groups(fit.groups_in(batch), "group_fn")
        if self._weight_fn is not None:
            fit.weight = checked_weight(self._weight_fn(batch))
        else:
            fit.terms = terms_in(batch)
            if fit.terms is None:
                with suppress(Exception):  # containers that users make themselves may raise any
                    fit.terms = guess_terms_in(batch)

    def _stop(self, *, interrupted: bool) -> None:
        with self._guard("The charts of the noise scale were not closed"):
            self._fit.layouts.close()
        if self._fit.unseen is not None:
            self._fit.unseen.close()
            self._fit.unseen = None
        self._close_meters(interrupted=interrupted)

    def _add_charts(self, writer: SummaryWriter) -> None:
        from noisescale.meter.tensorboard_layout import add_charts

        meters = [logged.meter for logged in self.meters]
        levels = self._fit.groups_in is not None
        added = add_charts(
            writer, meters, self._options, self._guard, levels=levels, monitor=self._name
        )
        self._fit.layouts.enter_context(added)


def _at_confidence(extra: Extra, confidence: float) -> Extra:
    @wraps(extra, updated=())
    def make(options: MeterOptions, optimizer: Optimizer | None) -> ExtraMeasurement:
        return extra(replace(options, confidence=confidence), optimizer)

    return make
