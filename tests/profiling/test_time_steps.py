# SPDX-License-Identifier: Apache-2.0
import math
import random
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import pytorch_lightning
import torch
from fits import CLASSES, FEATURES, data, loss_of
from refused import refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from noisescale.profiling import blocks
from noisescale.profiling.time_steps import time_steps
from noisescale.step_time import StepTiming

QUICK: dict[str, Any] = {"steps": 5, "warm_up": 1, "accelerator": "cpu"}


def slow(
    package: ModuleType = L,
    per_batch: float = 0.001,
    per_example: float = 0.0,
    too_large: int = 10**9,
    hiccups: tuple[int, ...] = (),
) -> Any:
    """Takes its time by the clock of `NOW`, and no other; notes the sizes of its batches."""

    class Slow(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
            self.net[0].eval()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            examples = len(batch[0])
            if examples >= too_large:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
            NOW[0] += per_batch + per_example * examples + 0.3 * (batch_idx in hiccups)
            torch.rand(1), np.random.rand(), random.random()
            SIZES.append(examples)
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    return Slow()


SIZES: list[int] = []
NOW = [0.0]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on in training steps alone: times are exact on the busiest machine."""
    monkeypatch.setattr(blocks, "time", SimpleNamespace(perf_counter=lambda: NOW[0]))


def plans(timings: list[StepTiming]) -> list[tuple[float, int]]:
    return [(timing.device_batch_size, timing.accumulation) for timing in timings]


@pytest.mark.parametrize(
    ("takes", "examples", "sizes", "said"),
    [
        (
            *({"per_batch": 0.003}, 1437, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
            "size of 2,048 would be more than all data (1,437 examples)",
        ),
        ({"per_batch": 0.0, "per_example": 0.02}, 1000, (1, 2, 4), "size of 4 the examples per"),
        ({"too_large": 5}, 1000, (1, 2, 4), "size of 8 does not fit in memory"),
    ],
    ids=["with the data", "where examples a second grow no more", "where memory ends"],
)
def test_the_ladder_ends(takes: Any, examples: int, sizes: tuple[int, ...], said: str) -> None:
    reasons, seen = list[str](), list[StepTiming]()

    timings = time_steps(
        slow(**takes),
        data(examples),
        on_stop=reasons.append,
        on_fit=lambda fit: seen.append(fit.timing),
        **QUICK,
    )

    assert plans(timings) == [(size, k) for size in sizes for k in (1, 2)]
    assert seen == timings
    (reason,) = reasons
    assert said in reason


def test_a_step_takes_the_time_of_its_micro_batches() -> None:
    timings = time_steps(
        slow(per_batch=0.01, per_example=0.005), data(), [4, 2], accumulation=[3, 1], **QUICK
    )

    assert plans(timings) == [(2, 1), (2, 3), (4, 1), (4, 3)]
    for timing in timings:
        slept = timing.accumulation * (0.01 + 0.005 * timing.device_batch_size)
        assert timing.seconds == pytest.approx(slept)
        assert (timing.devices, timing.nodes) == (1, 1)


def test_the_first_steps_and_a_hiccup_are_left_out() -> None:
    options = {**QUICK, "warm_up": 3}

    (timing,) = time_steps(
        slow(per_batch=0.02, hiccups=(0, 1, 2, 4)), data(), [4], accumulation=[1], **options
    )

    assert timing.seconds == pytest.approx(0.02)


class Stream(IterableDataset[Any]):
    def __init__(self, examples: int) -> None:
        self.examples = data(examples)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.examples[i] for i in range(len(self.examples))])


def doubled(examples: list[Any]) -> Any:
    return torch.utils.data.default_collate(examples * 2)


@pytest.mark.parametrize(
    ("source", "size", "drawn"),
    [
        (data(10), 32, 32),  # more than there is
        (DataLoader(data(), batch_size=3, collate_fn=doubled), 8, 16),
        (Stream(100), 8, 8),
    ],
    ids=["data", "a loader keeps how it puts batches together", "a stream is taken as it comes"],
)
def test_batches_are_drawn_from(source: Any, size: int, drawn: int) -> None:
    SIZES.clear()

    time_steps(slow(), source, [size], accumulation=[2], **QUICK)

    assert set(SIZES) == {drawn}
    assert len(SIZES) == (5 + 1) * 2


def test_memory_ends_in_several_ways_and_other_errors_go_on() -> None:
    module, errors = slow(), list[Exception]()

    def fail(*_: Any) -> None:
        raise errors[-1]

    module.on_train_batch_start = fail
    for text in (
        "CUDA error: out of memory",
        "MPS backend out of memory (MPS allocated: 9 GB)",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes",
    ):
        errors.append(RuntimeError(text))
        assert time_steps(module, data(), [1], **QUICK) == []
    errors.append(MemoryError())
    assert time_steps(module, data(), [1], **QUICK) == []
    errors.append(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match=r"^shapes do not match$"):
        time_steps(module, data(), **QUICK)


@pytest.mark.parametrize(
    ("package", "too_large"), [(L, 8), (pytorch_lightning, 10**9)], ids=["one", "the other"]
)
def test_nothing_is_changed_by_profiling(package: ModuleType, too_large: int) -> None:
    module = slow(package, too_large=too_large)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    earlier = package.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    module._trainer = earlier
    examples = data()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    timings = time_steps(module, examples, [4, 8], **QUICK)

    assert len(timings) == (2 if too_large == 8 else 4)
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.trainer is earlier
    assert module.training
    assert not module.net[0].training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == str(states[2])


class Module(L.LightningDataModule):
    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders
        self.transferred: list[int] = []

    def setup(self, stage: str) -> None:
        self.ready = True

    def train_dataloader(self) -> Any:
        assert self.ready
        return self.loaders

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transferred.append(len(batch[0]))
        return batch


def test_a_data_module_keeps_its_hooks_and_is_as_it_was() -> None:
    module = Module(DataLoader(data(), batch_size=3))
    made = module.train_dataloader

    timings = time_steps(slow(), module, [8], accumulation=[1], **QUICK)

    assert plans(timings) == [(8, 1)]
    assert module.transferred == [8] * 6
    assert module.train_dataloader == made
    assert module.train_dataloader().batch_size == 3
    assert module.trainer is None


def test_a_stream_has_to_last() -> None:
    with refused("data", requirement="6 batches", got="3", remedy="Take fewer `steps`"):
        time_steps(slow(), Stream(30), [8], accumulation=[1], **QUICK)


def test_two_ranks_are_timed_together() -> None:
    timings = time_steps(slow(per_batch=0.01), data(), [4], devices=2, strategy="ddp_fork", **QUICK)

    assert [(t.accumulation, t.devices, t.nodes) for t in timings] == [(1, 2, 1), (2, 2, 1)]
    for timing in timings:
        assert timing.seconds == pytest.approx(0.01 * timing.accumulation)


def test_manual_optimization_is_timed_without_accumulation() -> None:
    module = slow()
    module.automatic_optimization = False

    timings = time_steps(module, data(), [4], **QUICK)

    assert [timing.accumulation for timing in timings] == [1]


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("device_batch_sizes", [4, 0], "0"),
        ("device_batch_sizes", [math.nan], "nan"),
        ("device_batch_sizes", [], "none"),
        ("accumulation", [1.5], "1.5"),
        ("steps", 4, "4"),
        ("warm_up", 0, "0"),
        ("data", [], "none"),
        ("data", 7, "int"),
    ],
)
def test_bad_arguments_are_refused(name: str, value: Any, got: str) -> None:
    with refused(name, got=got):
        time_steps(slow(), **{"data": data(), **QUICK, name: value})


def test_data_that_make_batches_themselves_are_refused() -> None:
    with refused("batch_size", got="None: its data set makes the batches"):
        time_steps(slow(), DataLoader(data(), batch_size=None), **QUICK)
    with refused("train_dataloader", got="list_iterator"):
        time_steps(slow(), Module(iter([])), **QUICK)
