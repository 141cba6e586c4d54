# SPDX-License-Identifier: Apache-2.0
"""BatchSizeCallback: the batch size grows while transformers' Trainer trains."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length

from noisescale.checks import check_confidence
from noisescale.collectors.deepspeed import innermost
from noisescale.guard import Guard
from noisescale.hugging_face import trainer_access
from noisescale.hugging_face.noise_scale_callback import NoiseScaleCallback
from noisescale.hugging_face.supported import split_examples, tensor_parallel_size
from noisescale.plan import Plan
from noisescale.printable import arguments
from noisescale.refusal import Refusal
from noisescale.scheduling.accumulation import Accumulation
from noisescale.scheduling.controller import BatchSizeController
from noisescale.scheduling.decision import Move
from noisescale.scheduling.learning_rate import LearningRateScaling
from noisescale.scheduling.policies import GivenByShare, PolicyLike
from noisescale.scheduling.settings import (
    CONFIDENCE,
    DECIDE_EVERY_N_STEPS,
    SchedulerOptions,
    Settings,
    default_cap,
)

_OWN_ENGINES = ("MEGATRON_LM", "XLA")
_STATE_FILE = "trainer_state.json"


class _Data(NamedTuple):
    """The data of a training, in micro-batches of one device."""

    first: int
    """The micro-batches of a step that the user chose."""
    batches: float
    """The micro-batches of an epoch; infinite for a stream without a length."""
    steps: int
    """The steps of the training at the first batch size."""

    @property
    def steps_per_epoch(self) -> float:
        """The steps of an epoch at the first batch size."""
        return math.ceil(self.batches / self.first) if math.isfinite(self.batches) else math.inf


class BatchSizeCallback(TrainerCallback, ExportableState):
    """Grow the batch size while transformers' Trainer trains, and the learning rate with it.

    Add it to the callbacks of a Trainer:

        trainer = Trainer(model, args, train_dataset=data, callbacks=[BatchSizeCallback()])

    Micro-batches stay as they are: a step takes more of them, a multiple of the number in
    `gradient_accumulation_steps`. It never takes fewer than at first, as the Trainer decides ahead
    how many steps an epoch may have. The Trainer's own weights of micro-batches
    (`num_items_in_batch`) hold for every window.

    The training ends after the examples that it would have without the callback, in fewer optimizer
    steps, whether `num_train_epochs` or `max_steps` says how many these are. The schedule of the
    learning rate keeps to the examples: it is stepped several times after a larger step.

    Every move is printed. The Trainer's logs get the keys `batch_size/wanted`,
    `batch_size/planned` and `batch_size/lr_factor`. The logged learning rate is the schedule's,
    without the factor.

    The Trainer's own `train_samples_per_second` is too low by the growth: it takes all steps for
    steps of the first batch size.

    A checkpoint's `trainer_state.json` counts steps of the first batch size, as its schedule does:
    by that number the Trainer finds the place in the data. A resumed training then goes on with
    the number of optimizer steps that it had.

    Args:
        policy: See `BatchSizeScheduler`.
        max_batch_size: Largest global batch, in rows. Default: 1/50 of the training's rows, so that
            at least 50 steps would be left; none for a mapping.
        lr_scaling: See `BatchSizeScheduler`.
        confidence: Coverage of the noise scale's interval, which allows or holds back a move.
        decide_every_n_steps: Steps between decisions on the noise scale.

    Raises:
        ValueError: If an argument is out of its range; when training starts, if the Trainer's
            settings do not let the batch size change.
        TypeError: If an argument has a wrong type.

    Examples:
        >>> BatchSizeCallback("tradeoff", max_batch_size=512)
        BatchSizeCallback(policy='tradeoff', max_batch_size=512)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix D.
    """

    def __init__(
        self,
        policy: PolicyLike = "auto",
        max_batch_size: float | None = None,
        lr_scaling: LearningRateScaling = "auto",
        *,
        confidence: float = CONFIDENCE,
        decide_every_n_steps: int = DECIDE_EVERY_N_STEPS,
    ) -> None:
        self._options = SchedulerOptions(
            policy=policy,
            lr_scaling=lr_scaling,
            max_batch_size=max_batch_size,
            decide_every_n_steps=decide_every_n_steps,
        )
        settings = Settings.from_options(self._options)
        if (extra := settings.policy.extra) is not None:
            raise Refusal(
                "policy",
                "need nothing but the noise scale under transformers' Trainer",
                f"one that needs {extra.__name__}",
                "Use `BatchSizeController` in a loop of your own.",
            )
        if isinstance(settings.policy, GivenByShare):
            raise Refusal(
                "policy",
                "never ask for fewer examples than at first, under transformers' Trainer",
                repr(policy),
                'Start with a quarter of the batch, and give the examples: "0:16 3k:32 10k:64".',
            )
        check_confidence(confidence)
        self._confidence = confidence
        self._monitor: NoiseScaleCallback | None = None
        self._controller: BatchSizeController | None = None
        self._data = _Data(1, math.inf, 0)
        self._of_epoch = 0  # micro-batches of this epoch
        self._goes_on = False  # whether the next epoch had begun before the training was resumed
        self._owed = 0  # steps of the schedule that the Trainer has taken too early
        self._loaded: dict[str, Any] = {}
        self._guard = Guard()
        self._stop_hearing: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        """Show the arguments that are not the defaults, and the plan of a training."""
        plan = f": {self.plan}" if self.plan is not None else ""
        given = arguments(BatchSizeCallback, **vars(self._options), confidence=self._confidence)
        return f"{type(self).__name__}({given}){plan}"

    @property
    def plan(self) -> Plan | None:
        """How a step is made up now; None before training.

        Its micro-batches are the micro-batches of a step that the user chose, taken together.
        """
        return None if self._controller is None else self._controller.plan

    @property
    def moves(self) -> list[Move]:
        """The last thousand changes of the batch size in this training."""
        return [] if self._controller is None else list(self._controller.moves)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self._stop_hearing()  # an earlier training may have ended by an error
        if self._controller is not None:
            self._controller.close()
        self._check(args, kwargs["model"])
        schedule = kwargs.get("lr_scheduler")
        schedule = getattr(schedule, "scheduler", schedule)  # accelerate wraps it
        if trainer_access.distributed_type() == "DEEPSPEED" and not isinstance(
            schedule, LRScheduler
        ):
            raise Refusal(
                "lr_scheduler",
                "be a schedule of torch under DeepSpeed, for BatchSizeCallback to advance it",
                type(schedule).__name__,
                "Leave `scheduler` and `optimizer` out of DeepSpeed's configuration.",
            )
        loader, first = kwargs["train_dataloader"], int(args.gradient_accumulation_steps)
        batches = float(len(loader)) if has_length(loader) else math.inf
        self._data = _Data(first, batches, state.max_steps)
        rows = float(args.train_batch_size)
        plan = Plan(rows * first, 1, args.world_size)
        optimizer = kwargs["optimizer"]
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, Optimizer):  # DeepSpeed's, with one of torch in it
            optimizer = innermost(optimizer)
        most = self._options.max_batch_size
        if most is None and Settings.from_options(self._options).policy.needs_a_cap:
            most = default_cap(self._data.steps * plan.batch_size, plan)
        self._controller = controller = BatchSizeController(
            plan,
            optimizer,
            self._options.policy,
            lr_scaling=self._options.lr_scaling,
            max_batch_size=most,
            decide_every_n_steps=self._options.decide_every_n_steps,
        )
        self._owed = 0
        self._loaded = (
            trainer_access.saved_state(self, state).get("attributes", {}).get("_loaded", {})
        )
        self._go_on(state, skips=not args.ignore_data_skip)
        controller.clock.end_with(steps_of_epochs=self._data.steps)
        if controller.settings.takes_noise_scale:
            self._find_monitor(state, needed=controller.settings.needs_noise_scale)
        if controller.settings.policy.needs_loss:
            hears = _Hears(partial(self._hear, args))
            hook = kwargs["model"].register_forward_hook(hears, with_kwargs=True)
            self._stop_hearing = hook.remove
        if choice := controller.choice:
            self._tell(state, choice)
        if controller.steps == 0 and (move := controller.begin()):
            self._tell(state, str(move))

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._controller is None:
            return
        if not self._goes_on:
            self._of_epoch = 0
            self._controller.clock.begin_epoch()
        self._goes_on = False
        self._begin_window(args)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._of_epoch += 1

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        controller = self._controller
        if controller is None:
            return
        self._of_epoch += 1
        window = args.gradient_accumulation_steps
        begin = window.begin if isinstance(window, Accumulation) else 0
        steps = (self._of_epoch - begin) / self._data.first
        controller.step(steps * controller.base_batch_size)
        due = controller.clock.advance(steps, ends_epoch=self._of_epoch >= self._data.batches)
        self._owed += due - 1  # the Trainer has stepped the schedule once
        schedule = kwargs.get("lr_scheduler")
        if isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau):
            for _ in range(max(self._owed, 0)):
                schedule.step()
        self._owed = min(self._owed, 0)
        meter = None if self._monitor is None else self._monitor.meter
        if move := controller.decide_if_due(meter, confidence=self._confidence):
            self._tell(state, str(move))
        if meter is not None:
            controller.tell(meter)
        if controller.settings.policy.done:
            self._stop_hearing()
        if controller.clock.time >= self._data.steps:
            _end(args, state, control)
        self._begin_window(args)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        controller = self._controller
        if controller is None or logs is None or "loss" not in logs:
            return
        trainer_access.add_to_logs(controller.metrics, logs, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._controller is None or not args.should_save:
            return
        folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        with self._guard("A training resumed from this checkpoint repeats examples"):
            path = folder / _STATE_FILE
            saved = json.loads(path.read_text())
            saved["global_step"] = round(self._controller.clock.time)
            path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._stop_hearing()
        if self._controller is not None:
            if stayed := self._controller.reason_to_stay:
                self._tell(state, stayed)
            self._controller.close()
            args.gradient_accumulation_steps = self._data.first

    def state(self) -> dict[str, Any]:
        """Return what goes into a checkpoint's `trainer_state.json`; runs no collective."""
        given = dict(vars(self._options), confidence=self._confidence)
        for name in ("min_batch_size", "max_device_batch_size"):
            del given[name]
        # JSON has no functions, and makes texts of numbers that are keys: those are examples then.
        for name in ("policy", "lr_scaling"):
            if callable(given[name]) or isinstance(given[name], Mapping):
                given[name] = str(getattr(given[name], "__qualname__", given[name]))
        saved = self._loaded
        if self._controller is not None:
            saved = {
                "controller": self._controller.state_dict(),
                "owed": self._owed,
            }
        return {"args": given, "attributes": {"_loaded": saved}}

    def _check(self, args: TrainingArguments, model: nn.Module) -> None:
        kind, tp_size = trainer_access.distributed_type(), tensor_parallel_size(model)
        refused = {
            "distributed_type": kind if kind in _OWN_ENGINES else None,
            "n_gpu": args.n_gpu if args.n_gpu > 1 else None,
            "auto_find_batch_size": True if args.auto_find_batch_size else None,
            "tp_size": tp_size if tp_size > 1 else None,
            **split_examples(args.parallelism_config),
        }
        if isinstance(args.gradient_accumulation_steps, Accumulation):
            raise Refusal(
                "gradient_accumulation_steps",
                "be the number that you chose",
                "what a training that ended by an error has left",
                "Make the `TrainingArguments` anew.",
            )
        why = "The number of micro-batches in a step cannot change there: leave the callback out."
        for name, value in refused.items():
            if value is not None:
                raise Refusal(name, "let BatchSizeCallback change a step", repr(value), why)

    def _find_monitor(self, state: TrainerState, *, needed: bool) -> None:
        found = trainer_access.callbacks_beside(self, NoiseScaleCallback)
        if not found and not needed:
            return
        if found:
            self._monitor = found[0]
        else:
            self._monitor = NoiseScaleCallback()
            trainer_access.add_beside(self, self._monitor, state, self._monitor.state())
        if not self._monitor.counts_rows:
            self._monitor.give_up()
            raise Refusal(
                "batch_size_fn",
                "be None for a NoiseScaleCallback that BatchSizeCallback goes by",
                "a function",
                "Let the noise scale be counted in rows, as batch sizes are.",
            )
        stays = "BatchSizeCallback leaves the batch size as it is." if needed else ""
        self._monitor.follow(consequence=stays)

    def _go_on(self, state: TrainerState, *, skips: bool) -> None:
        """Begin where the Trainer begins: in a resumed training, at the step of its checkpoint.

        Args:
            state: As the Trainer has loaded it: it counts steps of the first batch size.
            skips: Whether the Trainer skips the data of an epoch that had begun.
        """
        controller, data, step = self._controller, self._data, state.global_step
        assert controller is not None
        clock, taken = controller.clock, step
        if saved := self._loaded:
            controller.load_state_dict(saved["controller"])
            self._owed, taken = int(saved["owed"]), clock.taken
            if step != round(clock.time):
                trainer_access.warn(
                    f"BatchSizeCallback: the checkpoint says that data go on at step {step}, and"
                    f" {clock.time:.0f} steps of the first batch size were trained. Examples come"
                    " again. Resume from a checkpoint in `output_dir`, which has the right number."
                )
            trainer_access.go_on_from_step(state, controller.steps)
        per_epoch = data.steps_per_epoch
        in_epoch = step % int(min(per_epoch, data.steps)) if skips else 0
        self._of_epoch, self._goes_on = in_epoch * data.first, in_epoch > 0
        clock.go_on(taken, time=float(step), steps_per_epoch=per_epoch, already=float(in_epoch))

    def _hear(
        self, args: TrainingArguments, model: nn.Module, inputs: Mapping[str, Any], output: Any
    ) -> None:
        """Add the loss of a training pass."""
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if loss is None or self._controller is None or not trainer_access.trains(model):
            return
        # A sum of losses over the labels of the whole step, or the micro-batch's own mean.
        of_step = inputs.get("num_items_in_batch") is not None
        parts = self._batches_of_step(args) if of_step else 1
        self._controller.add_loss(loss * parts, args.train_batch_size)

    def _batches_of_step(self, args: TrainingArguments) -> int:
        """Return the micro-batches of the step under way: an epoch's last one may have fewer."""
        window = args.gradient_accumulation_steps
        begin = window.begin if isinstance(window, Accumulation) else 0
        return int(min(window, max(self._data.batches - begin, 1)))

    def _begin_window(self, args: TrainingArguments) -> None:
        """Let the next step have the plan's micro-batches."""
        assert self._controller is not None
        left = math.ceil(self._data.steps - self._controller.clock.time)
        length = min(self._controller.plan.accumulation, max(left, 1)) * self._data.first
        args.gradient_accumulation_steps = Accumulation(length, begin=self._of_epoch)

    def _tell(self, state: TrainerState, text: str) -> None:
        if state.is_world_process_zero:
            tqdm.write(f"BatchSizeCallback: {text}")


class _Hears:
    """A forward hook that tells inputs and output; in a copied or saved model it tells nothing."""

    def __init__(self, tell: Callable[..., None] | None = None) -> None:
        self._tell = tell

    def __call__(
        self, model: nn.Module, _: tuple[Any, ...], inputs: Mapping[str, Any], output: Any
    ) -> None:
        if self._tell is not None:
            self._tell(model, inputs, output)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Hears, ()


def _end(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """End the training, as the Trainer does after its last step, for which it would still wait."""
    control.should_training_stop = True
    if args.save_strategy == SaveStrategy.STEPS:
        control.should_save = True
    by_steps = args.eval_strategy == IntervalStrategy.STEPS
    if by_steps and args.eval_delay <= state.global_step:
        control.should_evaluate = True
