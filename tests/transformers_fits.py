# SPDX-License-Identifier: Apache-2.0
"""Short trainings by the Trainer of transformers, and the gradients of all their micro-batches."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
import torch
from fits import data, network
from ranks import as_torchrun, on_ranks
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from noisescale.hugging_face import NoiseScaleCallback

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


class Part(NamedTuple):
    """One micro-batch of a step."""

    gradient: np.ndarray
    examples: int
    labels: int


class RecordingTrainer(Trainer):
    """Keeps what every micro-batch's gradient is, by a copy of the model in double precision."""

    copied: Callable[[], nn.Module]
    precision: torch.dtype = torch.float64

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[list[Part]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        plain = self.copied()
        plain.load_state_dict(self.model.state_dict())
        half = self.precision in (torch.bfloat16, torch.float16)
        inputs = dict(inputs)
        if not half:
            plain = plain.double()
        autocast = torch.autocast("cpu", self.precision) if half else nullcontext()
        with autocast:
            xs = inputs if half or "x" not in inputs else {**inputs, "x": inputs["x"].double()}
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


class Fit(NamedTuple):
    """What there is to know after training."""

    log_history: list[dict[str, float]]
    steps: list[list[Part]]
    parameters: list[Tensor]
    state: dict[str, Any]
    noise_scale: Any


def fit(
    *callbacks: TrainerCallback,
    kind: type[Trainer] = Trainer,
    model: Callable[[], nn.Module] = Classifier,
    examples: Callable[[], list[dict[str, Tensor]]] = digits,
    resume: str | None = None,
    prepare: Callable[[Trainer], None] | None = None,
    extras: dict[str, Any] | None = None,
    **options: Any,
) -> Fit:
    """Train 7 steps and return what came of it."""
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


def fits(ranks: int, **options: Any) -> list[Fit]:
    """`fit` with a callback, on every rank."""

    def one() -> Fit:
        return fit(NoiseScaleCallback(window=50), kind=RecordingTrainer, **options)

    return [one()] if ranks == 1 else on_ranks(ranks, as_torchrun(one))
