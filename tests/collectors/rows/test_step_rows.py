# SPDX-License-Identifier: Apache-2.0
import gc
import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from noisescale.collectors.changes import Changes
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.step_rows import StepRows
from noisescale.collectors.rows.window_layout import WindowLayout, layout_of_parts

LAYOUT = WindowLayout(0.125, 0.125, 1.0, 1.0)
COUNTS: Any = {"examples": 8.0, "unmeasured_examples": 0.0, "unmeasured_steps": 0}
"""What `StepRows.add` is told of the step besides norms."""


def test_a_sum_outlives_its_reading_so_that_no_thread_frees_the_row() -> None:
    def sums_that_are_left() -> list[bool]:
        sums = []
        all_reduce = dist.all_reduce

        def kept_track_of(*arguments: object, **options: object) -> object:
            work = all_reduce(*arguments, **options)
            sums.append(weakref.ref(work))
            return work

        norms = mock.create_autospec(GradientNorms, instance=True)
        norms.entries, norms.partition, norms.fixed_device = 1, 1, torch.device("cpu")
        norms.coordinates = None
        norms.home = torch.nn.Parameter(torch.zeros(1))
        rows = StepRows(norms, dist.group.WORLD)
        one = torch.ones(1, dtype=torch.float64)
        with mock.patch.object(dist, "all_reduce", kept_track_of):
            rows.add(one, one, LAYOUT, **COUNTS)
        assert len(list(rows.read())) == 1
        del rows
        gc.collect()
        return [work() is not None for work in sums]

    assert on_ranks(1, sums_that_are_left) == [[True]]


def test_the_stream_of_an_accelerator_waits_for_the_sum_at_once(device: torch.device) -> None:
    """Not so on a CPU, where the host would wait."""
    norms = GradientNorms([("weight", torch.nn.Parameter(torch.zeros(2, device=device)))])
    work = mock.Mock(spec=dist.Work)
    with mock.patch.multiple(dist, all_reduce=mock.Mock(return_value=work), get_world_size=len):
        rows = StepRows(norms, [0, 1])
        one = torch.ones(1, device=device)

        rows.add(one, one, LAYOUT, **COUNTS)
        at_once = work.wait.call_count
        list(rows.read())

    assert at_once == (device.type != "cpu")
    assert work.wait.call_count == at_once + 1


def test_changes_are_shares_of_the_gradient_whatever_losses_were_divided_by() -> None:
    norms = GradientNorms([("weight", torch.nn.Parameter(torch.zeros(2)))])
    rows = StepRows(norms, None)
    big = torch.full((1,), 8.0, dtype=torch.float64)
    changed = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)

    changes = Changes(changed, gone=3, in_pieces=True)
    rows.add(big, big, WindowLayout(0.25, 0.25, 1.0, 0.5), **COUNTS, changes=changes)
    (step,) = rows.read()

    assert step.changes == (0.125, 0.25, 0.5, 3, 1, True)


@pytest.mark.parametrize("sizes", [(4.0, 8.0, 2.0, 4.0), (4.0, 0.0, 2.0, 4.0)])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_parts_are_means_over_as_many_micro_batches(sizes: tuple[float, ...], length: int) -> None:
    """From a part for each micro-batch to one for the rank."""
    inverse = [1 / n if n else math.inf for n in sizes]
    parts = [sum(inverse[i : i + length]) / length**2 for i in range(0, 4, length)]

    found = layout_of_parts(sizes, range(length, 5, length), loss_divisor=8)

    scales = (8 / length) ** 2 / len(parts), 2.0**2
    assert found[:4] == pytest.approx((*scales, sum(parts) / len(parts), sum(inverse) / 16))
    assert math.isnan(layout_of_parts(sizes, [], loss_divisor=8).small_scale)
