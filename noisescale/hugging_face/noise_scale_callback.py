# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleCallback: the gradient noise scale of a run of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from noisescale.batches.batch_counter import check_batch_size
from noisescale.batches.batch_size import rows_in
from noisescale.batches.data_order import warning_of_order
from noisescale.batches.row_groups import check_groups_are_used, checked_row_groups
from noisescale.checks import check_function
from noisescale.collectors.collector import ACCUMULATE
from noisescale.collectors.groups import Groups
from noisescale.guard import NotMeasured, never_ends_training
from noisescale.history.metric_names import ROOT
from noisescale.hugging_face import rollouts, trainer_access
from noisescale.hugging_face.backward_start import BackwardStart, differentiable
from noisescale.hugging_face.console import print_all, print_less
from noisescale.hugging_face.supported import check_supported, check_wrapper
from noisescale.meter.capture import KnownToHost
from noisescale.meter.choosing import assigned_groups
from noisescale.meter.extra import Extra
from noisescale.meter.measuring_callback import MeasuringCallback
from noisescale.meter.meter import Meter
from noisescale.meter.options import MeterOptions, SmallBatch
from noisescale.meter.run_log import RunLog
from noisescale.prediction.closing import closing_lines
from noisescale.printable import arguments

_IN_STEPS = f"{ACCUMULATE} in each step (`gradient_accumulation_steps=2`)"
_SMALLER = (
    "An epoch has one batch, and the Trainer steps at its end: use half of"
    " `per_device_train_batch_size` and `gradient_accumulation_steps=2`"
)
_MORE_DEVICES = (
    ", or use more devices (`torchrun --nproc-per-node 2`). A `compute_loss` that uses several"
    " outputs of the model always needs one of the two."
)


class NoiseScaleCallback(MeasuringCallback, TrainerCallback, ExportableState):
    """Measure the simple gradient noise scale during training and log it.

    Add it to the callbacks of a Trainer:

        trainer = Trainer(model, args, train_dataset=data, callbacks=[NoiseScaleCallback()])

    It compares gradients of small batches with the gradient of the step. Under DDP (`torchrun`,
    `accelerate launch`) a small batch is one rank's. In one process that accumulates it is one
    micro-batch. In one process that does not accumulate it is half of the batch. See
    `small_batch`. The training is bitwise the same with and without the callback.

    At the Trainer's own log steps the keys of `NoiseScaleMonitor` join its loss in
    `trainer.state.log_history` and in every tracker of the Trainer (TensorBoard, Weights & Biases,
    ...). All values are finite. The noise scale appears once its interval has an upper end. The
    console shows only the noise scale and its interval, or the lower bound.

    Gradients are measured before the Trainer clips and unscales them. Where the model divides its
    loss by the labels of the whole step (`num_items_in_batch`), each micro-batch and each rank is
    weighted by its own labels. The averages are saved in `trainer_state.json` of a checkpoint, and
    a resumed training continues them.

    Args:
        window: Measured steps to average over, or "auto"; see `NoiseScaleEstimator`.
        every_n_steps: See `NoiseScaleMeter`.
        batch_size_fn: From the keyword arguments of the model's forward pass, as a dict, to the
            number of examples in them on this rank, in `unit`. A batch that the model gets as one
            mapping, as in sentence-transformers, counts as its keyword arguments. A loss of several
            passes counts the first. Default: the first dimension that the tensors share, or the
            length of a list of examples. Where both are possible a warning says which is used.
            Flattened sequences and tokens need a function.
        unit: What `batch_size_fn` counts, which "tokens" needs. Default: "sequences" for a model of
            transformers that takes token ids, else "examples".
        groups: Groups of parameters that get a noise scale each, see `NoiseScaleMeter`.
        confidence: Coverage of the interval, between 0 and 1.
        small_batch: What is compared with the step's gradient, see `NoiseScaleMeter`.
        extra: What is measured beside, see `NoiseScaleMonitor`.
        cut: Names of the submodules at whose outputs the halves of a batch are separated, see
            `NoiseScaleMeter`.
        backward_twice: Whether a backward pass may go twice through Functions, hooks and saved
            tensors that are not known, see `NoiseScaleMeter`.
        max_overhead: The share of the run's time that measuring may take, see `NoiseScaleMeter`.
        group_fn: A function from the keyword arguments of the model to the group of each row, where
            rows are not independent of each other, see `NoiseScaleMonitor`. In TRL's trainers with
            several generations of a prompt (GRPO, RLOO) the prompts are found without.

    Raises:
        ValueError: If an argument is out of its range; when training starts, if it does not fit
            the way of training.
        TypeError: If `batch_size_fn` is not callable, or `groups` has a wrong type.

    Examples:
        >>> callback = NoiseScaleCallback(window=200)
        >>> print(callback.noise_scale)
        not measured yet

    References:
        McCandlish et al. 2018, arXiv:1812.06162.
    """

    def __init__(
        self,
        window: int | Literal["auto"] = "auto",
        every_n_steps: int | Literal["auto"] = "auto",
        batch_size_fn: Callable[[dict[str, Any]], float] | None = None,
        unit: str | None = None,
        groups: Groups | None = None,
        confidence: float = 0.95,
        *,
        small_batch: SmallBatch = "auto",
        extra: Sequence[Extra] = (),
        cut: Sequence[str] | None = None,
        backward_twice: bool = False,
        max_overhead: float | None = None,
        group_fn: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        check_function("batch_size_fn", batch_size_fn, "the number of examples in it")
        check_function("group_fn", group_fn, "the group of each row")
        given = locals() | {"unit": "examples" if unit is None else unit}
        options = MeterOptions.from_arguments(given)
        options.check_unit_is_counted(batch_size_fn)
        if group_fn is not None:
            check_groups_are_used("group_fn", options.small_batch)
        super().__init__(options)
        self._batch_size_fn, self._group_fn = batch_size_fn, group_fn
        self._rollouts: TrainingArguments | None = None
        """The arguments of a trainer with several completions of each prompt."""
        self._guesses_unit = unit is None and batch_size_fn is None
        self._loaded: dict[str, Any] = {}
        self._layouts = ExitStack()
        self._hooks: list[RemovableHandle] = []
        self._called: nn.Module | None = None
        self._on_forward: Callable[..., None] | None = None
        self._start: BackwardStart | None = None

    def give_up(self) -> None:
        """Take everything out of a training that does not begin."""
        self._stop(interrupted=True)

    @property
    def counts_rows(self) -> bool:
        """Whether an example is a row of the batch, as no function counts otherwise."""
        return self._batch_size_fn is None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self._stop(interrupted=True)  # an earlier training may have ended by an error
        self._forget()
        self._loaded = (
            trainer_access.saved_state(self, state).get("attributes", {}).get("_loaded", {})
        )
        model: nn.Module = kwargs["model"]
        scaler = getattr(kwargs["optimizer"], "scaler", None)
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        with self._guard("The order of the data was not looked at"):
            remedy = trainer_access.how_to_shuffle(args)
            self._caution = warning_of_order(kwargs.get("train_dataloader"), remedy)
        lone = trainer_access.has_one_batch(kwargs.get("train_dataloader"))
        self._how_to_have_several = (_SMALLER if lone else _IN_STEPS) + _MORE_DEVICES
        trainer_access.go_first(self)
        try:
            check_supported(args, trainer_access.distributed_type(), model)
            self._rollouts = args if rollouts.has_rollouts(args) else None
            if self._rollouts is not None:
                rollouts.check_rollouts(args, self._options.small_batch)
        except NotMeasured as reason:
            self._tell_that_nothing_is_measured(reason)
            self._record_nothing(args, state)
            return

        def measure(called: nn.Module) -> None:
            if self._guesses_unit:
                self._options = replace(self._options, unit=self._guessed_unit(model))
            groups = assigned_groups(called, self._options.groups)
            options = replace(self._options, groups=groups)

            def make() -> list[RunLog]:
                check_wrapper(called)
                of = Meter.from_options(called, options, optimizer, grad_scaler=scaler)
                loop = "transformers" if self._rollouts is None else "trl"
                return [RunLog(of, optimizer, loop=loop)]

            device = next(called.parameters()).device
            self._make_meters(make, device, args.world_size)
            if not self.meters:
                self._record_nothing(args, state)
                self._remove_hooks()
                return
            self.meters[0].meter.last_step = state.max_steps
            saved = [self._loaded] if self._loaded else []
            if lone:
                of_meter = self.meters[0].meter
                of_meter.how_to_compare = of_meter.how_to_compare.replace(ACCUMULATE, _SMALLER)
            self._begin(saved, args.world_size, device, args.gradient_accumulation_steps)
            self._called, self._on_forward = called, self._forward_hook(model)
            self._remove_hooks()  # the one that brought us here
            self._watch()
            if state.is_world_process_zero:
                with self._guard("The rows of the noise scale are not recorded in a file"):
                    self.meters[0].record_in(trainer_access.folders_of_logs(self, args))
                with self._guard("TensorBoard has no charts of the noise scale"):
                    self._add_charts()
            with self._guard("The console shows all keys of the noise scale"):
                for callbacks in trainer_access.lists_with(self):
                    print_less(callbacks, self._guard)

        self._hooks.append(trainer_access.on_first_training_pass(model, measure))

    def _add_charts(self) -> None:
        """Add charts to TensorBoard, for which the Trainer writes "train/" before each key."""
        for writer in trainer_access.tensorboard_writers(self):
            from noisescale.meter.tensorboard_layout import add_charts

            meters = [logged.meter for logged in self.meters]
            levels = self._group_fn is not None or self._rollouts is not None
            added = add_charts(
                writer, meters, self._options, self._guard, levels=levels, before="train/"
            )
            self._layouts.enter_context(added)

    def _record_nothing(self, args: TrainingArguments, state: TrainerState) -> None:
        if state.is_world_process_zero and not self._loaded:
            folders = trainer_access.folders_of_logs(self, args)
            self._record_why_nothing(lambda: folders, ROOT)

    def _guessed_unit(self, model: nn.Module) -> str:
        """Return what the first dimension of the inputs counts, which is shown with the batch size.

        A training that is resumed keeps its unit.
        """
        unit = "sequences" if trainer_access.takes_token_ids(model) else "examples"
        unit = unit if self._rollouts is None else rollouts.UNIT
        with self._guard("The noise scale may be counted in another unit than before"):
            if self._loaded:
                unit = str(self._loaded["document"][0]["unit"])
        reused = [] if self._rollouts is None else rollouts.news_of(self._rollouts)
        self._news = [f"  Noise scale is counted in {unit}", *reused]
        return unit

    @never_ends_training
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = None
        if self._measuring:
            self._watch()
            self._pause(False)

    @never_ends_training
    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._measuring:
            self._remove_hooks()
            self._pause(True)
            self._tell_news()

    @never_ends_training
    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._start = None

    @never_ends_training
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._start = None
        if self._measuring:
            self._close_step(0)

    @never_ends_training
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not self._measuring or logs is None:
            return
        logged = self.meters[0]
        # Not what evaluation logs; and at the end what is new since the last log step.
        at_end = "train_loss" in logs
        if "loss" in logs or (at_end and logged.unfinished):
            known = logged.read(state.global_step, at_end=at_end).loggable
            self._tell_of_withheld()
            trainer_access.add_to_logs(known, logs, state)

    @never_ends_training
    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._interrupt()

    on_predict = on_evaluate

    @never_ends_training
    def on_save(self, *_: Any, **__: Any) -> None:
        self._interrupt()
        trainer_access.hand_over_records(self, self._records, self._guard)

    @never_ends_training
    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        for logged in self.meters:
            logged.end()
        trainer_access.hand_over_records(self, self._records, self._guard)
        if state.is_world_process_zero:
            with self._guard("The verdict was not printed"):
                name = type(self).__name__
                if said := closing_lines(self._histories, self._folder, host=name):
                    tqdm.write(f"{name}: {said}")
        self._stop(interrupted=False)
        for callbacks in trainer_access.lists_with(self):
            print_all(callbacks)

    def state(self) -> dict[str, Any]:
        """Return what goes into a checkpoint's `trainer_state.json`; runs no collective."""
        arguments = dict(vars(self._options))
        # With `restore_callback_states_from_checkpoint` the Trainer makes a new callback of these.
        # JSON has no functions: their names make it fail there rather than go on without them.
        if self._batch_size_fn is not None:
            arguments["batch_size_fn"] = _name(self._batch_size_fn)
        if self._group_fn is not None:
            arguments["group_fn"] = _name(self._group_fn)
        if callable(groups := arguments["groups"]):
            arguments["groups"] = _name(groups)
        arguments["extra"] = [_name(one) for one in arguments["extra"]]
        measured = self.meters[0].state_dict() if self.meters else self._loaded
        return {"args": arguments, "attributes": {"_loaded": measured}}

    @property
    def _arguments(self) -> str:
        own: dict[str, Any] = {"batch_size_fn": self._batch_size_fn, "group_fn": self._group_fn}
        if self._guesses_unit:
            own["unit"] = None
        return arguments(NoiseScaleCallback, **vars(self._options) | own)

    def _watch(self) -> None:
        """Look at the forward passes of what the Trainer calls."""
        if not self._hooks and self._called is not None and self._on_forward is not None:
            hook = self._called.register_forward_hook(self._on_forward, with_kwargs=True)
            self._hooks.append(hook)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _forward_hook(self, model: nn.Module) -> Callable[..., None]:
        """Return the hook on the module that the Trainer calls.

        Losses are weighted as `model` weights them, see `loss_share`.
        """
        counter = trainer_access.BatchCounter()
        batch_size_of = self._batch_size_fn or counter

        def on_forward(
            called: nn.Module, given: tuple[Any, ...], inputs: Mapping[str, Any], output: Any
        ) -> None:
            tensors = list(differentiable(output)) if trainer_access.trains(called) else []
            if not tensors or not self.meters:
                return
            if self._start is not None:  # a loss of several forward passes: one micro-batch
                self._start.add(tensors)
                return
            self._start = start = BackwardStart(tensors)
            if len(given) == 1 and isinstance(given[0], Mapping):
                inputs = {**_leaves(given[0]), **inputs}
            examples = {k: v for k, v in inputs.items() if k != "num_items_in_batch"}
            with self._leaving_step_out():
                # First: all ranks look at every batch, also where something fails on one of them.
                self._look_for_shared_examples(
                    lambda: [x for x in examples.values() if isinstance(x, Tensor)]
                )
                batch_size = batch_size_of(examples)
                check_batch_size(batch_size, "batch_size_fn", "return")
                self._counted = True
                rows = counter.rows
                if self._batch_size_fn is not None:
                    counts_tokens = self._options.counts_tokens
                    rows = rows_in(examples, None if counts_tokens else batch_size)
                meter, share = self.meters[0].meter, trainer_access.loss_share(model, inputs)
                groups, of_means = None, False
                if meter.due and self._group_fn is not None:
                    groups = checked_row_groups(self._group_fn(dict(examples)), "group_fn")
                if meter.due and self._rollouts is not None:
                    found = rollouts.rows_in(examples, self._rollouts, groups)
                    groups, share, of_means = found
                    if self._options.small_batch == "rank":  # which needs none
                        groups = None
                loss = output.get("loss") if isinstance(output, Mapping) and meter.due else None
                if loss is not None and share is not None:  # a part of the mean over the step
                    loss = loss / share.sum()
                meter.before_backward(
                    cast(Tensor, start),
                    batch_size,
                    host=KnownToHost(mean_loss=loss),
                    capture_average=trainer_access.is_last_micro_batch(),
                    weight=share,
                    mean_of_means=of_means,
                    row_groups=groups,
                    rows=rows,
                    last=trainer_access.is_last_micro_batch(),
                )

        return on_forward

    def _tell(self, message: str) -> None:
        trainer_access.warn(message)

    def _inform(self, message: str) -> None:
        trainer_access.inform(message)

    def _stop(self, *, interrupted: bool) -> None:
        with self._guard("The charts of the noise scale were not closed"):
            self._layouts.close()
        self._start = None
        self._remove_hooks()
        self._called = self._on_forward = None
        self._close_meters(interrupted=interrupted)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))


def _leaves(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without what the model has put into it, as sentence-transformers do."""
    return {k: x for k, x in batch.items() if not isinstance(x, Tensor) or x.grad_fn is None}
