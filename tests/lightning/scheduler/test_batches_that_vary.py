# SPDX-License-Identifier: Apache-2.0
"""Loaders whose batches differ in size: what is counted, planned, scaled and logged."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fits import classifier, data, fit
from lightning.pytorch.loggers import TensorBoardLogger
from named_batches import events, fitted, stays
from tiers import slow
from torch.utils.data import DataLoader

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.lightning.scheduler.counted_batches import CountedBatches

SIZES = (2, 9, 7, 8, 8, 6, 10, 8)
"""After the first one 8 on average, in a cycle."""


class Varying:
    """Batches of examples in order: the first one, then the others over and over."""

    def __init__(self, first: int, batches: int, sizes: tuple[int, ...] = SIZES[1:]) -> None:
        self.sizes = [first, *(sizes[k % len(sizes)] for k in range(batches - 1))]

    def __iter__(self) -> Iterator[list[int]]:
        begin = 0
        for size in self.sizes:
            yield [k % 100 for k in range(begin, begin + size)]
            begin += size

    def __len__(self) -> int:
        return len(self.sizes)


def varying(first: int, batches: int = 57) -> DataLoader[Any]:
    return DataLoader(data(), batch_sampler=Varying(first, batches))


def saved_after(data: Any, *callbacks: Any, callback: Any = None, **options: Any) -> Any:
    """The state of the controller after a fit on two batches a step."""
    callback = callback or BatchSizeScheduler(stays)
    options = {"accumulate_grad_batches": 2, **options}
    fitted(*callbacks, callback, module=classifier(), data=data, **options)
    return callback.state_dict()["controller"]


def batch_size_of(saved: Any) -> float:
    return math.prod(saved["plan"][of] for of in ("device_batch_size", "accumulation", "devices"))


@pytest.mark.filterwarnings("ignore:BatchSizeScheduler. The first batch had")
@pytest.mark.parametrize(("first", "ranks"), [(40, 1), (1, 2), slow(1, 1), slow(40, 2)])
def test_examples_plans_and_the_cap_follow_the_batches_that_came(first: int, ranks: int) -> None:
    callback = BatchSizeScheduler(stays)

    def numbers(*_: Any) -> list[float]:
        state = callback.state_dict()
        saved = state["controller"]
        sizes = saved["base_batch_size"], batch_size_of(saved)
        return [saved["examples"], *sizes, state["max_batch_size"]]

    found, *others = fit(
        callback,
        ranks=ranks,
        max_epochs=2,
        train_loader=varying(first),
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        results=numbers,
    )

    assert all(other == found for other in others)
    examples, base, planned, most = found
    came = 2 * ranks * sum(Varying(first, 57).sizes)
    usual = sum(Varying(first, 57).sizes[:-1]) / 56
    late = 0 if ranks == 1 else 0.15  # ranks add up every eighth step
    assert examples == pytest.approx(came, rel=late)
    assert base == pytest.approx(2 * ranks * usual, rel=0.1 + late)
    assert planned == pytest.approx(base)
    assert most == pytest.approx(base * 2 * 57 / 2 / 50)


@pytest.mark.filterwarnings("ignore:BatchSizeScheduler. The first batch had")
def test_the_learning_rate_follows_the_number_of_micro_batches_alone() -> None:
    """A first batch that is odd changes nothing: it is no larger batch size."""

    def policy(b: Any, plan: Any, progress: Any) -> float:
        return progress.base_batch_size * (4.0 if progress.steps > 8 else 1.0)

    saved = saved_after(varying(1), callback=BatchSizeScheduler(policy, max_batch_size=1000))

    assert saved["factors"]["learning_rate"] == pytest.approx(2.0)  # the square root of 4


@pytest.mark.filterwarnings("ignore:BatchSizeScheduler. The first batch had")
def test_bounds_that_the_batches_do_not_meet_are_widened() -> None:
    bounded = BatchSizeScheduler(stays, min_batch_size=2, max_batch_size=3)

    size = batch_size_of(saved_after(varying(1), callback=bounded))

    assert size == pytest.approx(8, rel=0.1)  # one micro-batch, the nearest that there is


@pytest.mark.parametrize("batches", [6, 7])
def test_batches_of_one_size_stay_as_they_are(batches: int) -> None:
    """The last one is short, and the last step too if it is the eighth batch."""
    saved = saved_after(DataLoader(data(8 * batches + 3), batch_size=8), max_epochs=2)

    assert saved["plan"]["device_batch_size"] == 8
    assert saved["base_batch_size"] == 16
    assert saved["examples"] == 2 * (8 * batches + 3)
    assert saved["steps"] == 2 * 4


def test_what_came_is_logged_as_what_is_planned_and_an_odd_first_batch_told(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    with pytest.warns(UserWarning, match="had 40 examples") as told:
        saved_after(varying(40), NoiseScaleMonitor(), logger=logger, log_every_n_steps=7)

    assert len([w for w in told if "The first batch had" in str(w.message)]) == 1
    logged = events(tmp_path)
    given, planned = (
        [event.value for event in logged.Scalars(f"batch_size/{name}")]
        for name in ("given", "planned")
    )
    sizes = torch.tensor(Varying(40, 57).sizes)
    steps = torch.stack([part.sum() for part in sizes.split(2)]).tolist()
    assert given[:3] == pytest.approx([sum(steps[k : k + 7]) / 7 for k in (0, 7, 14)])
    assert planned[0] == pytest.approx(2 * float(sizes[:12].float().mean()))
    assert planned[-1] == pytest.approx(2 * float(sizes[:-1].float().mean()), rel=0.1)


@pytest.mark.filterwarnings("ignore:BatchSizeScheduler. The first batch had")
@pytest.mark.parametrize("policy", [{"0": 4, "1M": 16}, "tradeoff"])
def test_batches_are_followed_where_no_decision_is_due(policy: Any) -> None:
    """Of one process a schedule by examples is asked nothing, nor is one without a measurement."""
    monitor = NoiseScaleMonitor(every_n_steps=10**6)
    callback = BatchSizeScheduler(policy, lr_scaling="none")

    saved = saved_after(varying(1), monitor, callback=callback)

    assert saved["base_batch_size"] == pytest.approx(16, rel=0.1)
    assert saved["examples"] == sum(Varying(1, 57).sizes)


def test_sums_over_ranks_are_not_corrected_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of 30 examples a step, where plans have 20."""
    monkeypatch.setattr(
        "noisescale.lightning.scheduler.counted_batches.Reduction",
        lambda numbers, *_: SimpleNamespace(read=lambda: [2 * each for each in numbers]),
    )
    counted = CountedBatches(2, torch.device("cpu"), 0.0)
    planned = 0.0

    for step in range(1, 41):
        counted.add(15.0, ends_epoch=False)
        planned += 20.0
        if step % 8 == 0:
            came = counted.read()
            planned += 0.0 if came is None else came.more
            counted.add_up(planned)

    came = counted.read()
    assert came is not None
    assert planned + came.more == 40 * 30
    assert came.size == 15


def test_a_run_that_has_outgrown_its_bounds_is_resumed(tmp_path: Path) -> None:
    grows = DataLoader(data(), batch_sampler=Varying(8, 57, (9, 10)))
    callback, again = (BatchSizeScheduler(stays, max_batch_size=17) for _ in range(2))
    options: dict[str, Any] = {"module": classifier(), "accumulate_grad_batches": 2}
    path = tmp_path / "last.ckpt"
    fitted(callback, data=grows, max_epochs=1, **options).save_checkpoint(path)

    second = fitted(again, data=varying(8), max_epochs=2, ckpt_path=path, **options)

    assert callback.state_dict()["controller"]["plan"]["device_batch_size"] > 9
    assert second.current_epoch == 2
