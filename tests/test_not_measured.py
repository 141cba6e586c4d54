# SPDX-License-Identifier: Apache-2.0
"""What cannot be measured, in each host: one warning, and training is what it is without."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fits import CLASSES, FEATURES, classifier, data, loss_of, network, opaque_network, trainer
from tiers import slow, slow_but
from torch import Tensor, nn
from torch.utils.data import DataLoader

from noisescale import BatchSizeScheduler, NoiseScaleMeter, NoiseScaleMonitor
from noisescale.lightning.supported import _UNSUPPORTED_STRATEGIES

BATCH_SIZE, STEPS = 8, 6


class Twice(torch.optim.SGD):
    """Evaluates its closure at two places, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class LBFGS(torch.optim.LBFGS):
    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr, max_iter=3)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


def hooked() -> nn.Module:
    net = network()
    net[1].register_full_backward_hook(lambda *_: None)
    return net


@dataclass(frozen=True)
class Case:
    """What cannot be measured."""

    says: str
    """What the warning says: the reason or the remedy."""
    net: Callable[[], nn.Module] = network
    options: dict[str, Any] = field(default_factory=dict)
    """Of the meter, monitor or callback."""
    optimizer: Any = torch.optim.SGD
    uncountable: bool = False
    """Whether the batches are."""
    hosts: str = "loop lightning scheduler hugging-face"


CASES = {
    "BatchNorm": Case("got a BatchNorm that normalizes over the batch", normalized),
    "one backward pass": Case("the Function fits._Spoils, which may keep state", opaque_network),
    "hooks on modules": Case("must have no backward hooks on its modules", hooked),
    "BatchNorm, halves": Case("got a BatchNorm", normalized, {"small_batch": "half"}),
    "LBFGS": Case(
        "LBFGS takes several gradients a step, at different weights. Use a first-order",
        optimizer=LBFGS,
        hosts="loop lightning scheduler",  # transformers' Trainer has no closures
    ),
    "SAM": Case(
        "Twice takes several gradients a step", optimizer=Twice, hosts="lightning scheduler"
    ),
    "batches of unknown size": Case(
        "`batch_size_fn` must be given for batches whose size cannot be inferred",
        uncountable=True,
        hosts="lightning scheduler",
    ),
    "strategy": Case("is SingleDeviceStrategy: it hides", hosts="lightning scheduler"),
    "distributed type": Case("is XLA: XLA traces", hosts="hugging-face"),
    "nothing trained": Case("must have parameters that require a gradient", hosts="loop"),
}

QUICK = {"BatchNorm", "SAM", "batches of unknown size", "strategy", "distributed type"}
"""Of the hosts that have a Trainer. A loop tries all."""

Weights = list[Tensor]


def in_a_loop(case: Case, *, measured: bool) -> Weights:
    net = case.net()
    optimizer = case.optimizer(net.parameters(), lr=0.1)
    of = network().requires_grad_(False) if case is CASES["nothing trained"] else net
    meter = NoiseScaleMeter(of, optimizer=optimizer, **case.options) if measured else None
    for batch in list(loader(case))[:STEPS]:

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            if meter is None:
                loss.backward()
            else:
                meter.backward(loss, BATCH_SIZE)
            return loss

        if case.optimizer is LBFGS:
            optimizer.step(closure)
        else:
            closure()
        if meter is not None:
            meter.step()
        if case.optimizer is not LBFGS:
            optimizer.step()
    if meter is not None:
        assert meter.not_measured is not None
        assert not meter.measuring
        assert (meter.steps, meter.measured_steps) == (STEPS, 0)
        assert str(meter.noise_scale) == "not measured yet"
        meter.close()
    return weights_of(net)


def in_lightning(case: Case, *, measured: bool, scheduled: bool = False) -> Weights:
    monitor = NoiseScaleMonitor(**case.options)
    scheduler = [BatchSizeScheduler("ratio", monitor=monitor)] if scheduled else []
    module = classifier(net=case.net())
    module.configure_optimizers = lambda: case.optimizer(module.parameters(), lr=0.1)
    if case.uncountable:
        module.training_step = lambda batch, batch_idx: loss_of(module.net, map(torch.stack, batch))
    callbacks = [monitor, *scheduler] if measured else []
    fitting = trainer(1, strategy="auto", callbacks=callbacks, max_steps=STEPS)
    fitting.fit(module, loader(case))
    assert not scheduler or not scheduler[0].moves
    return weights_of(module)


def in_hugging_face(case: Case, *, measured: bool) -> Weights:
    from transformers_fits import Classifier, fit

    from noisescale.hugging_face import NoiseScaleCallback

    callbacks = [NoiseScaleCallback(**case.options)] if measured else []
    run = fit(
        *callbacks,
        model=lambda: Classifier(case.net()),
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=STEPS,
    )
    logged = any("noise_scale" in key for row in run.log_history for key in row)
    assert logged == (measured and not case.says)
    return run.parameters


def loader(case: Case) -> DataLoader[Any]:
    def columns(rows: Any) -> Any:
        return [list(column) for column in zip(*rows, strict=True)]

    return DataLoader(data(), BATCH_SIZE, collate_fn=columns if case.uncountable else None)


def weights_of(module: nn.Module) -> Weights:
    return [p.detach().clone() for p in module.parameters()]


HOSTS: dict[str, Callable[..., Weights]] = {
    "loop": in_a_loop,
    "lightning": in_lightning,
    "scheduler": lambda case, measured: in_lightning(case, measured=measured, scheduled=True),
    "hugging-face": in_hugging_face,
}


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is warned of and logged, of ours."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "transformers")]
    listener = Listener(logging.INFO)
    for logger in loggers:
        logger.addHandler(listener)
    # Another test's script may have made the first one less talkative.
    levelled = [logging.getLogger("lightning.pytorch.utilities.rank_zero"), *loggers]
    levels = [logger.level for logger in levelled]
    for logger in levelled:
        logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
        for logger, level in zip(levelled, levels, strict=True):
            logger.setLevel(level)
    said += [str(one.message) for one in caught]
    of_order = "The train loader takes the data in their order"
    said[:] = [one for one in said if not one.startswith(of_order)]
    said[:] = [one for one in said if "oise scale" in one or "NoiseScale" in one]


@pytest.mark.parametrize(
    ("host", "case"),
    [
        (host, name) if host == "loop" or name in QUICK else slow(host, name)
        for name, case in CASES.items()
        for host in case.hosts.split()
    ],
)
def test_one_warning_says_why_and_training_is_what_it_is_without(
    host: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "distributed type":
        from noisescale.hugging_face import trainer_access

        monkeypatch.setattr(trainer_access, "distributed_type", lambda: "XLA")
    if case == "strategy":
        monkeypatch.setitem(_UNSUPPORTED_STRATEGIES, "SingleDeviceStrategy", "it hides gradients")
    with heard() as without:
        expected = HOSTS[host](CASES[case], measured=False)
    with heard() as said:
        found = HOSTS[host](CASES[case], measured=True)

    assert without == []
    (told, *ends) = sorted(said, key=lambda one: "has nothing to measure" not in one)
    assert "has nothing to measure" in told
    # Lightning's fit ends with the same reason, whatever has scrolled past since.
    assert len(ends) == (host in ("lightning", "scheduler"))
    assert all("Not measured" in one and CASES[case].says in one for one in ends)
    assert CASES[case].says in told
    assert "Training goes on" in told
    stays = "BatchSizeScheduler leaves the batch size as it is." in told
    assert stays == (host == "scheduler")
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("host", slow_but(["lightning", "hugging-face"], "lightning"))
def test_how_it_measures_is_said_once_it_is_known(host: str) -> None:
    """Under Hugging Face the unit is said of models of transformers, and of all others."""
    with heard() as said:
        HOSTS[host](Case(""), measured=True)

    what = "compares the halves of a batch" if host == "lightning" else "counted in examples"
    assert sum(what in one for one in said) == 1
    others = [one for one in said if what not in one]
    assert len(others) == (host == "lightning")  # the verdict at the end
    assert all("\nNext: " in one for one in others)
