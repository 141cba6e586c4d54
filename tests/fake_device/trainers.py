# SPDX-License-Identifier: Apache-2.0
"""Short fits of trainers on the fake device, and what their batches transfer."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import torch
from fits import fit_here
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from ranks import as_torchrun, on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from fake_device.lightning import FakeAccelerator, FakeDDP
from fake_device.transfers import Transfers
from fake_device.ways import CLASSES, FEATURES, ROWS, Step, network
from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.batches.shared_examples import SharedExamples
from noisescale.hugging_face import NoiseScaleCallback
from noisescale.scheduling.controller import BatchSizeController

BATCHES, LOG_EVERY = 120, 10


class Watch:
    """Splits what a fit transfers into batches. Begin one with each batch of Lightning's."""

    def __init__(self, monitor: Any) -> None:
        self.steps: list[Step] = []
        self.occasion = ""
        """What the host may read for in this batch: ", read" where it logs, decides or ends."""
        self._monitor = monitor
        self._transfers: Transfers | None = None

    def begin(self, *, first: bool) -> None:
        """Begin a batch, before the monitor does; `first`: of the first step."""
        self.end()
        due = first or any(logged.meter.due for logged in self._monitor.meters)
        self._phase = "first measured" if first else "measured" if due else "unmeasured"
        self.occasion = ""
        self._transfers = Transfers()
        self._transfers.__enter__()

    def end(self) -> None:
        """End the batch under way."""
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.__exit__(None, None, None)
            self.steps.append(Step.of(self._phase + self.occasion, transfers))

    @contextmanager
    def decisions(self) -> Iterator[None]:
        """Note the batches with decisions, and the one where ranks compare their examples."""

        def noted(owner: type, name: str, occasion: str) -> Any:
            original = getattr(owner, name)

            def note(*arguments: Any, **options: Any) -> Any:
                self.occasion = occasion
                return original(*arguments, **options)

            return patch.object(owner, name, note)

        with (
            noted(BatchSizeController, "decide", ", read"),
            noted(SharedExamples, "_largest_share", ", compared"),
        ):
            yield


class LightningWatch(L.Callback):
    """To be the first of the callbacks."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._watch.begin(first=trainer.global_step == 0)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % LOG_EVERY == 0:
            self._watch.occasion = ", read"

    def on_train_epoch_end(self, *_: Any) -> None:
        self._watch.occasion = ", read"

    def on_train_end(self, *_: Any) -> None:
        self._watch.end()


class HuggingFaceWatch(TrainerCallback):  # type: ignore[misc]
    """To be the first of the callbacks."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self._watch.begin(first=state.global_step == 0)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step % LOG_EVERY == 0:
            self._watch.occasion = ", read"

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._watch.occasion = ", read"
        self._watch.end()


class Module(L.LightningModule):
    """Its forward pass returns what the Trainer of transformers needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self(*batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS * BATCHES, FEATURES, generator=generator)
    noise = torch.randn(len(x), CLASSES, generator=generator)
    return TensorDataset(x, (x[:, :CLASSES] + noise).argmax(1))


def lightning(*callbacks: Any, accumulation: int = 1, ranks: int = 1) -> list[Step]:
    """A fit with a monitor, which logs every `LOG_EVERY` steps."""
    alone = SingleDeviceStrategy(torch.device("fake", 0), accelerator=FakeAccelerator())
    of_ranks: dict[str, Any] = {"accelerator": "auto", "strategy": alone}
    if ranks > 1:
        of_ranks = {"strategy": FakeDDP()}
    of_ranks["accumulate_grad_batches"] = accumulation

    def fit() -> list[Step]:
        watch = Watch(monitor := NoiseScaleMonitor())
        batches = DataLoader(data(), batch_size=ROWS)
        with tempfile.TemporaryDirectory() as folder, watch.decisions():
            options = {"logger": CSVLogger(folder), "log_every_n_steps": LOG_EVERY, **of_ranks}
            every = LightningWatch(watch), monitor, *callbacks
            fit_here(*every, ranks=ranks, model=Module(), train_loader=batches, **options)
        return watch.steps

    steps: list[Step] = fit() if ranks == 1 else on_ranks(ranks, as_torchrun(fit))[0]
    return steps


def hugging_face() -> list[Step]:
    """A fit with a callback, which logs every `LOG_EVERY` steps."""
    watch = Watch(callback := NoiseScaleCallback())
    dataset = [{"x": x, "labels": y} for x, y in data()]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="fake:0"),
    ):
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            logging_steps=LOG_EVERY,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        callbacks = [HuggingFaceWatch(watch), callback]
        Trainer(Module(), arguments, train_dataset=dataset, callbacks=callbacks).train()
    return watch.steps


def scheduled(ranks: int) -> list[Step]:
    """A fit whose batch size changes, short as it is."""
    scheduler = BatchSizeScheduler("tradeoff", max_batch_size=8 * ROWS)
    return lightning(scheduler, accumulation=2, ranks=ranks)


FITS: Mapping[str, Callable[[], list[Step]]] = {
    "Lightning": lightning,
    "Lightning, scheduler": lambda: scheduled(1),
    "Lightning, DDP, scheduler": lambda: scheduled(2),
    "Hugging Face": hugging_face,
}
