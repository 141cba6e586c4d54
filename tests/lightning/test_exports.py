# SPDX-License-Identifier: Apache-2.0
"""What callbacks and users do with a model in mid-fit goes as it goes without the monitor."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import CLASSES, FEATURES, classifier, loader, network, trainer
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.loggers import TensorBoardLogger
from ranks import in_a_fork
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from noisescale import NoiseScaleMonitor

X = torch.ones(4, FEATURES)
WAYS: dict[str, dict[str, Any]] = {
    "example": {},
    "micro_batch": {"accumulate_grad_batches": 2},
}


def deep_copy(module: Any) -> None:
    twin = copy.deepcopy(module.net)
    twin(X).sum().backward()
    torch.jit.script(twin)


DONE: dict[str, Callable[[Any], Any]] = {
    "script": lambda module: torch.jit.script(module.net),
    "trace": lambda module: torch.jit.save(torch.jit.trace(module.net, X), io.BytesIO()),
    "export": lambda module: torch.export.export(module.net, (X,)),
    "strict export": lambda module: torch.export.export(module.net, (X,), strict=True),
    "copy": deep_copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module.net)),
    "save": lambda module: torch.save(module.net, io.BytesIO()),
    "summary": lambda module: L.utilities.model_summary.ModelSummary(module),
}


class Do(L.Callback):
    """Do something with the module at the end of each epoch, and within some batch."""

    def __init__(self, what: str) -> None:
        self.what, self.done = what, 0

    def on_train_epoch_end(self, fitting: Any, module: Any) -> None:
        DONE[self.what](module)
        self.done += 1

    def on_train_batch_start(self, fitting: Any, module: Any, batch: Any, batch_idx: int) -> None:
        # Dynamo refuses to go through a module in strict mode while there is a hook for all.
        if batch_idx == 4 and self.what != "strict export":
            self.on_train_epoch_end(fitting, module)


def fitted(*callbacks: Any, model: Any = None, **options: Any) -> tuple[Any, Any]:
    """Two epochs in one process, then a third; return the module and the Trainer."""
    module = classifier(net=network()) if model is None else model
    torch.manual_seed(0)
    fitting = trainer(1, strategy="auto", callbacks=list(callbacks), max_epochs=2, **options)
    fitting.fit(module, loader())
    fitting.fit_loop.max_epochs = 3
    fitting.fit(module, loader())
    return module, fitting


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", DONE)
def test_it_can_be_done_with_a_model_that_is_measured(what: str, way: Any) -> None:
    monitor, do = NoiseScaleMonitor(small_batch=way), Do(what)

    module, _ = fitted(monitor, do, **WAYS[way])

    assert do.done == (3 if what == "strict export" else 6)
    assert monitor.noise_scale.steps > 10
    without, _ = fitted(**WAYS[way])
    for ours, theirs in zip(module.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# Lightning has had it since 2.6.
WeightAveraging = getattr(of_lightning, "WeightAveraging", L.Callback)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that")
@pytest.mark.parametrize("way", WAYS)
def test_loggers_may_trace_it_and_averages_of_weights_copy_it(way: Any, tmp_path: Any) -> None:
    def averaged(*callbacks: Any) -> Any:
        logger = TensorBoardLogger(tmp_path, log_graph=True)
        module = classifier(net=network())
        module.example_input_array = X
        type(module).forward = lambda self, x: self.net(x)
        return fitted(*callbacks, WeightAveraging(), model=module, logger=logger, **WAYS[way])[0]

    monitor = NoiseScaleMonitor(small_batch=way)

    with_it, without = averaged(monitor), averaged()

    assert monitor.noise_scale.steps > 10
    for ours, theirs in zip(with_it.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Encoder(L.LightningModule):
    """Has a fast path for inference, which torch does not take where a module has hooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.outputs: list[Tensor] = []
        self.hooks: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.outputs.append(self(batch[0]))
        names = [event.name for event in profiler.events()]
        assert names.count("aten::_transformer_encoder_layer_fwd") == 2
        self.hooks.append(len(torch_modules._global_forward_hooks))
        return 0

    predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@in_a_fork
def test_validation_is_bitwise_what_it_is_without() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 5, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (48,), generator=generator)

    class InTheFit(L.Callback):
        def on_train_epoch_end(self, fitting: Any, module: Any) -> None:
            module.eval()
            with torch.no_grad():
                module.predict_step((x[:8], y[:8]), 0)
            module.train()

    def validated(*callbacks: Any) -> Encoder:
        model = Encoder()
        batches = DataLoader(TensorDataset(x, y), batch_size=8)
        fitting = trainer(
            1, strategy="auto", callbacks=[*callbacks, InTheFit()], val_check_interval=2
        )
        fitting.fit(model, batches, batches)
        fitting.validate(model, batches, verbose=False)
        fitting.predict(model, batches)
        return model

    monitor = NoiseScaleMonitor(every_n_steps=1)

    with_it = validated(monitor)
    without = validated()

    assert monitor.noise_scale.steps == pytest.approx(5)  # the first sets the level
    assert len(with_it.outputs) == len(without.outputs) == 2 + 3 * 6 + 1 + 6 + 6
    assert all(torch.equal(a, b) for a, b in zip(with_it.outputs, without.outputs, strict=True))
    assert with_it.hooks == without.hooks


def test_a_validation_that_fails_leaves_no_hook() -> None:
    module = classifier(net=network())
    there = set(torch_modules._global_forward_hooks)

    def failing(*_: Any) -> None:
        raise RuntimeError("on purpose")

    module.validation_step = failing
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(
            1,
            strategy="auto",
            callbacks=[NoiseScaleMonitor(small_batch="example")],
            num_sanity_val_steps=0,
        ).fit(module, loader(), loader())

    assert set(torch_modules._global_forward_hooks) <= there
