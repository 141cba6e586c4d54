# SPDX-License-Identifier: Apache-2.0
"""Short trainings by the Trainer of transformers, and the gradients of all their micro-batches.

Importing it takes seconds: quick tests do it in a fixture.
"""

import copy
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
import torch
from fits import data, network
from ranks import as_torchrun, on_ranks
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from noisescale.estimation.moments import GradientMoments
from noisescale.hugging_face import BatchSizeCallback as BatchSizeCallback
from noisescale.hugging_face import NoiseScaleCallback as NoiseScaleCallback
from noisescale.hugging_face import trainer_access as trainer_access
from noisescale.meter.estimates import MomentSums

LENGTH, WORDS = 10, 31


class Classifier(nn.Module):
    """Returns what the Trainer needs; `num_items_in_batch` is none of it."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = network() if net is None else net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def digits() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for x, y in data(60)]


def sentences() -> list[dict[str, Tensor]]:
    """Whose labels are masked up to a place that differs a lot."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(60):
        words = torch.randint(WORDS, (LENGTH,), generator=generator)
        labels = words.clone()
        labels[: int(torch.randint(LENGTH - 1, (1,), generator=generator))] = -100
        found.append({"input_ids": words, "labels": labels})
    return found


def numbered() -> list[dict[str, Tensor]]:
    return [{**one, "number": torch.tensor(i)} for i, one in enumerate(digits())]


class Stream(IterableDataset):
    """The same examples for ever, without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from numbered()


class Part(NamedTuple):
    """One micro-batch of a step."""

    gradient: np.ndarray
    examples: int
    labels: int


class RecordingTrainer(Trainer):
    """Keeps what every micro-batch's gradient is, by a copy of the model in double precision."""

    copied: Callable[[], nn.Module]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[list[Part]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        plain = self.copied()
        plain.load_state_dict(self.model.state_dict())
        xs, autocast = dict(inputs), nullcontext()
        if (precision := self.accelerator.mixed_precision) != "no":
            halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
            autocast = torch.autocast("cpu", halves[precision])
        else:
            plain = plain.double()
            xs = {k: v.double() if v.is_floating_point() else v for k, v in xs.items()}
        with autocast:
            loss = plain(**xs)["loss"]
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in plain.parameters()]).numpy()
        labels = inputs["labels"]
        counted = labels[:, 1:] if labels.dim() > 1 else labels
        part = Part(gradient, len(labels), int(counted.ne(-100).sum()))
        if not self.steps or self.stepped:
            self.steps.append([])
        self.steps[-1].append(part)
        self.stepped = self.accelerator.sync_gradients
        return super().training_step(model, inputs, num_items_in_batch)


class LossOfLogits(Trainer):
    """A loss the model knows nothing of, from two forward passes."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
        logits = [model(**inputs)["logits"] for _ in range(2)]
        return sum(nn.functional.cross_entropy(x, inputs["labels"]) for x in logits) / 2


class ScalingTrainer(Trainer):
    """Scales the gradients after the last pass of each step."""

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().training_step(*arguments, **options)
        if self.accelerator.sync_gradients:
            for p in self.model.parameters():
                p.grad.mul_(1.1)
        return loss


class CachingTrainer(Trainer):
    """As GradCache: the loss is a leaf, in whose hook the batch goes through in two chunks."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        def loss_of(x: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = model(x=x, labels=labels)["loss"]
            return loss

        with torch.no_grad():
            leaf = loss_of(**inputs)

        def go_through(gradient: Tensor) -> None:
            with torch.enable_grad():
                for x, y in zip(inputs["x"].chunk(2), inputs["labels"].chunk(2), strict=True):
                    (loss_of(x, y) / 2 * gradient).backward()

        leaf.requires_grad_().register_hook(go_through)
        return leaf


class OneForAll(Trainer):
    """Gives all ranks the same batches."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(digits(), batch_size=4)


class Seen(NamedTuple):
    """A step as a training took it."""

    ids: list[int]
    """The examples."""
    learning_rate: float
    """As the optimizer used it."""


class Numbered(Trainer):
    """Takes the numbers of the examples out of each batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ids: list[int] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        inputs = dict(inputs)
        self.ids += inputs.pop("number").tolist()
        return super().training_step(model, inputs, num_items_in_batch)


class Spy(TrainerCallback):
    """Keeps the examples of each step and the learning rate that the optimizer uses."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def watch(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        optimizer.optimizer.register_step_pre_hook(self._keep)

    def _keep(self, optimizer: Any, *_: Any) -> None:
        self.seen.append(Seen(self.trainer.ids, optimizer.param_groups[0]["lr"]))
        self.trainer.ids = []


class Stop(TrainerCallback):
    """Saves a checkpoint after a step, and ends the training."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            control.should_training_stop = control.should_save = True


class Fails(TrainerCallback):
    """Raises an error after so many steps, in the first training."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._failed = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._failed and state.global_step == self._step:
            self._failed = True
            raise RuntimeError("on purpose")


class Recorder(TrainerCallback):
    """Stands for TensorBoard's and others, which come before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logs.append(dict(logs))


class CountsHooks(TrainerCallback):
    """Counts the hooks between steps and in evaluation, where the model can be pickled, too."""

    def __init__(self) -> None:
        gc.collect()
        self._before = len(torch_modules._global_forward_hooks)
        self.seen: list[int] = []

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        pickle.dumps(copy.deepcopy(model))
        hooks = len(torch_modules._global_forward_hooks) - self._before
        self.seen.append(hooks + sum(len(m._forward_hooks) for m in model.modules()))

    on_prediction_step = on_step_end


class Fit(NamedTuple):
    """What there is to know after training."""

    log_history: list[dict[str, float]]
    steps: list[list[Part]]
    parameters: list[Tensor]
    state: dict[str, Any]
    noise_scale: Any

    @property
    def moments(self) -> GradientMoments:
        """What the callback found, averaged over all steps."""
        return MomentSums(**self.state["meter"]["estimates"]["sums"]).mean

    @property
    def logged(self) -> dict[str, float]:
        """At the last log step."""
        return [row for row in self.log_history if "loss" in row][-1]


def fit(
    *callbacks: TrainerCallback,
    kind: type[Trainer] = Trainer,
    model: Callable[[], nn.Module] = Classifier,
    examples: Callable[[], list[dict[str, Tensor]]] = digits,
    language: bool = False,
    resume: str | None = None,
    prepare: Callable[[Trainer], None] | None = None,
    extras: dict[str, Any] | None = None,
    **options: Any,
) -> Fit:
    """Train 7 steps and return what came of it; `language`: a model of sentences."""
    if language:
        model, examples = language_model, sentences
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
    defaults: dict[str, Any] = {
        "output_dir": mkdtemp(),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": 7,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
    }
    trainer = kind(
        model(),
        TrainingArguments(**{**defaults, **options}),
        train_dataset=examples(),
        callbacks=list(callbacks),
        **(extras or {}),
    )
    if isinstance(trainer, RecordingTrainer):
        trainer.copied = model
    if prepare is not None:
        prepare(trainer)
    trainer.train(resume_from_checkpoint=resume)
    (callback, *_) = [*(c for c in callbacks if isinstance(c, NoiseScaleCallback)), None]
    return Fit(
        trainer.state.log_history,
        getattr(trainer, "steps", []),
        [p.detach().clone() for p in trainer.model.parameters()],
        callback.state()["attributes"]["_loaded"] if callback else {},
        callback.noise_scale if callback else None,
    )


def each(ranks: int, one: Callable[[], Any]) -> list[Any]:
    """What a function returns on every rank."""
    return [one()] if ranks == 1 else on_ranks(ranks, as_torchrun(one))


def recorded(**options: Any) -> Fit:
    """`fit` with a callback and the gradients of all micro-batches."""
    return fit(NoiseScaleCallback(window=50), **{"kind": RecordingTrainer, **options})


def fits_by(
    wrapper: str,
    engine: Callable[[], dict[str, Any]] = dict,
    ranks: int = 2,
    small_batch: Any = "auto",
    **options: Any,
) -> list[tuple[Fit, list[str]]]:
    """Fits on ranks, and what they warn of; a class with the name `wrapper` has to wrap the model.

    `engine` returns the options of TrainingArguments that make accelerate use it, on a rank.
    """

    def one() -> tuple[Fit, list[str]]:
        kinds: set[str] = set()
        told: list[str] = []

        class Checked(Trainer):
            def training_step(self, *arguments: Any, **keywords: Any) -> Any:
                kinds.update(kind.__name__ for kind in type(self.model_wrapped).__mro__)
                return super().training_step(*arguments, **keywords)

        class Told(NoiseScaleCallback):
            def _tell(self, message: str) -> None:
                told.append(message)

        run = fit(Told(window=50, small_batch=small_batch), kind=Checked, **options, **engine())
        assert wrapper in kinds
        return run._replace(parameters=[]), told

    return each(ranks, one)


def check_growing_batch(engine: Callable[[], dict[str, Any]], **options: Any) -> None:
    """It trains under an engine as under DDP."""
    ddp = {name: value for name, value in options.items() if name != "parallelism_config"}
    plain, found = losses_of_a_growing_batch(**ddp), losses_of_a_growing_batch(engine, **options)
    assert len(plain[0]) < 12
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-4)


def losses_of_a_growing_batch(
    engine: Callable[[], dict[str, Any]] = dict, ranks: int = 2, **options: Any
) -> list[list[float]]:
    """Of each step, on every rank; the other arguments are those of `fits_by`."""

    def one() -> list[float]:
        grows = BatchSizeCallback({0: 8, 3: 24}, lr_scaling="none", max_batch_size=24)
        run = fit(grows, max_steps=12, **options, **engine())
        return [row["loss"] for row in run.log_history if "loss" in row]

    return each(ranks, one)
