# SPDX-License-Identifier: Apache-2.0
import math
import random
import re
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import pytorch_lightning
import torch
from fits import CLASSES, FEATURES, data, loss_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from noisescale.profiling import time_fit
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
    monkeypatch.setattr(time_fit, "time", SimpleNamespace(perf_counter=lambda: NOW[0]))


def sizes(timings: list[StepTiming]) -> list[float]:
    return [timing.device_batch_size for timing in timings]


def test_the_ladder_ends_with_the_data() -> None:
    reasons: list[str] = []

    timings = time_steps(
        slow(per_batch=0.003), data(20), accumulation=[1], on_stop=reasons.append, **QUICK
    )

    assert sizes(timings) == [1, 2, 4, 8, 16]
    assert reasons == ["A device batch size of 32 would be more than all data (20 examples)."]


def test_the_ladder_ends_where_examples_a_second_grow_no_more() -> None:
    reasons: list[str] = []

    timings = time_steps(
        slow(per_batch=0.0, per_example=0.02),
        data(1000),
        accumulation=[1],
        on_stop=reasons.append,
        **QUICK,
    )

    assert sizes(timings) == [1, 2, 4]
    assert reasons == ["Beyond a device batch size of 4 the examples per second grow no more."]


def test_a_step_takes_the_time_of_its_micro_batches() -> None:
    timings = time_steps(
        slow(per_batch=0.01, per_example=0.005), data(), [4, 2], accumulation=[3, 1], **QUICK
    )

    assert [(t.device_batch_size, t.accumulation) for t in timings] == [
        (2, 1), (2, 3), (4, 1), (4, 3)
    ]  # fmt: skip
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


def test_more_is_drawn_than_there_is() -> None:
    SIZES.clear()

    time_steps(slow(), data(10), [32], accumulation=[2], **QUICK)

    assert SIZES == [32] * (5 + 1) * 2


def test_out_of_memory_ends_the_ladder_and_keeps_what_was_timed() -> None:
    reasons: list[str] = []
    seen: list[StepTiming] = []

    timings = time_steps(
        slow(too_large=5),
        data(),
        on_stop=reasons.append,
        on_fit=lambda fit: seen.append(fit.timing),
        **QUICK,
    )

    assert [(t.device_batch_size, t.accumulation) for t in timings] == [
        (1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)
    ]  # fmt: skip
    assert seen == timings
    assert reasons == ["A device batch size of 8 does not fit in memory."]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        MemoryError(),
    ],
    ids=str,
)
def test_memory_ends_in_several_ways(error: Exception) -> None:
    module = slow()

    def fail(*_: Any) -> None:
        raise error

    module.on_train_batch_start = fail

    assert time_steps(module, data(), [1, 2], **QUICK) == []


def test_other_errors_go_on() -> None:
    module = slow()

    def fail(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    module.on_train_batch_start = fail

    with pytest.raises(RuntimeError, match=r"^shapes do not match$"):
        time_steps(module, data(), **QUICK)


@pytest.mark.parametrize("package", [L, pytorch_lightning], ids=lambda package: package.__name__)
@pytest.mark.parametrize("too_large", [10**9, 8], ids=["all fit", "out of memory"])
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

    assert sizes(timings) == [8]
    assert module.transferred == [8] * 6
    assert module.train_dataloader == made
    assert module.train_dataloader().batch_size == 3
    assert module.trainer is None


def test_a_loader_keeps_how_it_puts_batches_together() -> None:
    def doubled(examples: list[Any]) -> Any:
        return torch.utils.data.default_collate(examples * 2)

    SIZES.clear()
    loader = DataLoader(data(), batch_size=3, collate_fn=doubled)

    time_steps(slow(), loader, [8], accumulation=[1], **QUICK)

    assert SIZES == [16] * 6


class Stream(IterableDataset[Any]):
    def __init__(self, examples: int) -> None:
        self.examples = data(examples)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.examples[i] for i in range(len(self.examples))])


def test_a_stream_is_taken_as_it_comes_and_has_to_last() -> None:
    SIZES.clear()

    time_steps(slow(), Stream(50), [8], accumulation=[1], **QUICK)

    assert SIZES == [8] * 6
    with pytest.raises(
        ValueError,
        match=r"^`data` must last for 6 batches, got 3\. Take fewer `steps`, or give more data\.$",
    ):
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
    ("arguments", "message"),
    [
        (
            {"device_batch_sizes": [4, 0]},
            "`device_batch_sizes` must be whole and at least 1, got 0. Give 8, for instance.",
        ),
        (
            {"device_batch_sizes": [math.inf]},
            "`device_batch_sizes` must be whole and at least 1, got inf. Give 8, for instance.",
        ),
        (
            {"device_batch_sizes": [math.nan]},
            "`device_batch_sizes` must be whole and at least 1, got nan. Give 8, for instance.",
        ),
        ({"data": []}, "`data` must have examples, got none. Give what the module trains on."),
        (
            {"device_batch_sizes": []},
            "`device_batch_sizes` must have a value, got none. Leave it out for the default.",
        ),
        (
            {"accumulation": [1.5]},
            "`accumulation` must be whole and at least 1, got 1.5. Give 8, for instance.",
        ),
        ({"steps": 4}, "`steps` must be whole and at least 5, got 4. Give 8, for instance."),
        ({"warm_up": 0}, "`warm_up` must be whole and at least 1, got 0. Give 8, for instance."),
        (
            {"data": 7},
            "`data` must be a Dataset, a DataLoader or a LightningDataModule, got int."
            " Give what the module trains on.",
        ),
        (
            {"data": DataLoader(data(), batch_size=None)},
            "`batch_size` must be a number in the DataLoader, got None: its data set makes the"
            " batches. Give a data set of single examples.",
        ),
        (
            {"data": Module(iter([]))},
            "`train_dataloader` must return a DataLoader, or a list or dict of"
            " DataLoaders, got list_iterator. Give the Dataset instead of the data module.",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        time_steps(slow(), **{"data": data(), **QUICK, **arguments})
