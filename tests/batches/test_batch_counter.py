# SPDX-License-Identifier: Apache-2.0
"""What is counted along a run, and when a warning says that the number may be wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noisescale.batches.batch_counter import BatchCounter, sequence_first_in


class Counter(BatchCounter):
    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__("Monitor")
        self.model = model or nn.Linear(1, 1)
        self.warnings: list[str] = []

    def uncountable(self, batch: Any) -> Exception:
        return ValueError("uncountable")

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def sequence_first_module(self) -> str:
        return sequence_first_in(self.model)


def of(*shape: int) -> Tensor:
    return torch.zeros(*shape)


def ids(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


def row(*values: Any) -> Tensor:
    return torch.tensor([[v for several in values for v in several]])


# Three sequences of 4, 2 and 3 tokens.
POSITIONS = row(range(4), range(2), range(3))
PADDED = torch.cat([POSITIONS, row([0, 0, 0])], dim=1)
TOKENS = {"input_ids": ids(1, 9), "labels": ids(1, 9)}
BOUNDARIES = torch.tensor([0, 4, 6, 9], dtype=torch.int32)

PACKED = {
    "positions": TOKENS | {"position_ids": POSITIONS},
    "positions from 2 on": TOKENS | {"position_ids": POSITIONS + 2},
    "positions in three dimensions": TOKENS | {"position_ids": POSITIONS.expand(3, 1, 9)},
    "positions and padding": {"input_ids": ids(1, 12), "position_ids": PADDED},
    "boundaries": TOKENS | {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES},
    "padded boundaries": TOKENS | {"cu_seqlens": torch.tensor([0, 4, 6, 9, 9, 9])},
    "indices": TOKENS | {"seq_idx": row([0] * 4, [1] * 2, [2] * 3)},
    "indices and padding": TOKENS | {"seq_idx": row([0] * 3, [1] * 2, [2] * 2, [-1] * 2)},
    "within a tuple": (TOKENS | {"position_ids": POSITIONS}, ids(1, 9)),
}


@pytest.mark.parametrize("case", PACKED)
def test_sequences_in_one_row_are_counted_and_not_the_row(case: str) -> None:
    counter = Counter()

    assert counter(PACKED[case]) == 3
    assert counter.rows == 1
    assert counter.warnings == []


def test_a_ragged_table_counts_its_rows_and_not_its_values() -> None:
    counter = Counter()
    lengths = torch.tensor([4, *[3] * 31])

    assert counter({"values": of(97), "lengths": lengths, "labels": of(32)}) == 32
    assert counter({"values": of(97, 8), "seq_lens": lengths}) == 32
    assert counter({"x": of(35, 32, 8), "lengths": lengths}) == 32  # positions first
    assert counter({"tokens": ids(97), "cu_seqlens": torch.arange(33)}) == 32
    assert counter.rows is None
    assert counter.warnings == []


@pytest.mark.parametrize("rows", [16, 50])
def test_lengths_of_something_else_leave_a_batch_in_doubt(rows: int) -> None:
    counter = Counter()

    assert counter({"x": of(rows, 8), "lengths": torch.full((32,), 3)}) == rows
    assert len(counter.warnings) == 1


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_rows_without_packing_are_counted_as_they_were(rows: int) -> None:
    counter = Counter()
    positions = torch.arange(9).expand(rows, 9)

    assert counter({"input_ids": ids(rows, 9), "position_ids": positions}) == rows
    assert counter({"input_ids": ids(rows, 9), "seq_idx": ids(rows, 9)}) == rows
    assert counter({"x": of(rows, 8), "y": of(rows)}) == rows
    assert counter.rows is None
    assert counter.warnings == []


class OnDevice(Tensor):
    """A tensor that counts what is read of it. It says that it is on another device."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("meta")
        OnDevice.reads += func in (Tensor.__int__, Tensor.item, Tensor.__bool__)
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(x: Tensor) -> Tensor:
    return x.as_subclass(OnDevice)


def test_values_on_a_device_are_read_in_the_first_batch_alone_and_boundaries_never() -> None:
    counter = Counter()
    batch = TOKENS | {"position_ids": on_device(POSITIONS)}

    OnDevice.reads = 0
    first, after_one = counter(batch), OnDevice.reads
    counts = [counter(batch) for _ in range(5)]

    assert [first, *counts] == [3] * 6
    assert OnDevice.reads == after_one > 0
    (warning,) = counter.warnings
    assert "`cu_seqlens`" in warning
    assert "Monitor counts 3 examples." in warning
    OnDevice.reads = 0
    assert Counter()(TOKENS | {"cu_seqlens": on_device(BOUNDARIES)}) == 3
    assert OnDevice.reads == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_short_last_batch_of_inputs_and_targets_counts_its_rows(rows: int) -> None:
    for x, y in [((3, 8, 8), (1, 8, 8)), ((10, 7), (12, 7)), ((10, 7), (10, 7)), ((8,), (3,))]:
        counter = Counter()

        assert [counter([of(n, *x), of(n, *y)]) for n in (16, rows)] == [16, rows]
        assert counter.warnings == []


SEQUENCE_FIRST = nn.ModuleDict({"rnn": nn.LSTM(4, 5)})
BATCH_FIRST = nn.ModuleDict({"rnn": nn.LSTM(4, 5, batch_first=True), "out": nn.Linear(5, 5)})


@pytest.mark.parametrize(
    ("model", "batch", "doubted"),
    [
        (SEQUENCE_FIRST, (ids(35, 20), ids(35, 20)), True),
        (SEQUENCE_FIRST, {"x": of(35, 20, 4), "y": of(35, 20)}, True),
        (SEQUENCE_FIRST, of(35, 20, 4), True),
        (SEQUENCE_FIRST, (of(35, 20, 4), of(35)), False),  # a target for each row
        (SEQUENCE_FIRST, (of(35, 3, 8, 8), ids(35, 3)), False),  # images
        (SEQUENCE_FIRST, (of(35, 20), of(35, 20)), False),  # columns
        (BATCH_FIRST, (ids(35, 20), ids(35, 20)), False),
    ],
)
def test_positions_are_doubted_in_a_sequence_first_model(
    model: Any, batch: Any, doubted: bool
) -> None:
    counter = Counter(model)

    assert [counter(batch), counter(batch)] == [35, 35]
    assert len(counter.warnings) == doubted
    for warning in counter.warnings:
        assert "rnn has `batch_first=False`" in warning


BOXES = {"images": of(8, 3, 4, 4), "boxes": of(9, 4), "classes": of(9)}


@pytest.mark.parametrize(
    "first", [BOXES | {"boxes": of(8, 4), "classes": of(8)}, {"images": of(8, 3), "boxes": of(9)}]
)
def test_a_number_is_withheld_until_a_run_has_begun_with_one(first: dict[str, Tensor]) -> None:
    counter, other = Counter(), Counter()

    assert [counter(first), counter(BOXES)] == [8, 8]
    with pytest.raises(ValueError, match="uncountable"):
        other(BOXES)
    assert "8, 9, 9" in other.unequal
