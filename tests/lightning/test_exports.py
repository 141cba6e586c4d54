# SPDX-License-Identifier: Apache-2.0
"""What callbacks and users do with a model in mid-fit goes as it goes without the monitor."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import zoo
from fits import FEATURES, classifier, fit_here, loader, network
from lightning.pytorch.loggers import TensorBoardLogger
from ranks import call_in_a_fork
from tiers import slow, slow_but
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.profiler import ProfilerActivity, profile

from noisescale import NoiseScaleMonitor

X = torch.ones(4, FEATURES)
WAYS: dict[str, Any] = {"half": {}, "micro_batch": {"accumulate_grad_batches": 2}}


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
QUICK = {("script", "half"), ("copy", "half"), ("copy", "micro_batch"), ("pickle", "half")}


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


def fitted(*callbacks: Any, model: Any = None, **options: Any) -> Any:
    """The module after two epochs in one process, and a third."""
    module = classifier(net=network()) if model is None else model
    torch.manual_seed(0)
    fitting = fit_here(*callbacks, model=module, max_epochs=2, **options)
    fitting.fit_loop.max_epochs = 3
    fitting.fit(module, loader())
    return module


def check_alike(one: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.parametrize(
    ("what", "way"),
    [case if case in QUICK else slow(*case) for case in itertools.product(DONE, WAYS)],
)
def test_it_can_be_done_with_a_model_that_is_measured(what: str, way: Any) -> None:
    monitor, do = NoiseScaleMonitor(every_n_steps=1, small_batch=way), Do(what)

    module = fitted(monitor, do, **WAYS[way])

    assert do.done == (3 if what == "strict export" else 6)
    assert monitor.noise_scale.steps > 10
    check_alike(module, fitted(**WAYS[way]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that")
@pytest.mark.parametrize("way", slow_but(WAYS, "half"))
def test_loggers_may_trace_it_and_averages_of_weights_copy_it(way: Any, tmp_path: Any) -> None:
    def averaged(*callbacks: Any) -> Any:
        logger = TensorBoardLogger(tmp_path, log_graph=True)
        module = classifier(net=network())
        module.example_input_array = X
        type(module).forward = lambda self, x: self.net(x)
        return fitted(*callbacks, zoo.averaging(), model=module, logger=logger, **WAYS[way])

    monitor = NoiseScaleMonitor(every_n_steps=1, small_batch=way)

    check_alike(averaged(monitor), averaged())
    assert monitor.noise_scale.steps > 10


class Encoder(zoo.Module):
    """Has a fast path for inference, which torch does not take where a module has hooks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(zoo.Encoder())
        self.hooks: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            answer = self.answer(batch)
        names = [event.name for event in profiler.events()]
        assert names.count("aten::_transformer_encoder_layer_fwd") == 2
        self.hooks.append(len(torch_modules._global_forward_hooks))
        self.answers.append(answer)
        return answer

    predict_step = validation_step

    def on_validation_batch_end(self, *_: Any) -> None:
        pass


def test_validation_is_bitwise_what_it_is_without() -> None:
    call_in_a_fork(check_validation)


def check_validation() -> None:
    batches = zoo.loader(48, 8, zoo.with_words)

    class InTheFit(L.Callback):
        def on_train_epoch_end(self, fitting: Any, module: Any) -> None:
            module.eval()
            with torch.no_grad():
                module.predict_step(next(iter(batches)), 0)
            module.train()

    def validated(*callbacks: Any) -> Encoder:
        model = Encoder()
        model.val_dataloader = lambda: batches
        options = {"train_loader": batches, "val_check_interval": 2}
        fitting = fit_here(*callbacks, InTheFit(), model=model, **options)
        fitting.validate(model, batches, verbose=False)
        fitting.predict(model, batches)
        return model

    monitor = NoiseScaleMonitor(every_n_steps=1)

    with_it = validated(monitor)
    without = validated()

    assert monitor.noise_scale.steps == pytest.approx(5)  # the first sets the level
    assert len(with_it.answers) == len(without.answers) == 2 + 3 * 6 + 1 + 6 + 6
    assert all(map(torch.equal, with_it.answers, without.answers))
    assert with_it.hooks == without.hooks


def test_a_validation_that_fails_leaves_no_hook() -> None:
    module = classifier(net=network())
    there = set(torch_modules._global_forward_hooks)

    def failing(*_: Any) -> None:
        raise RuntimeError("on purpose")

    module.validation_step, module.val_dataloader = failing, loader
    with pytest.raises(RuntimeError, match="on purpose"):
        fit_here(NoiseScaleMonitor(), model=module, num_sanity_val_steps=0)

    assert set(torch_modules._global_forward_hooks) <= there
