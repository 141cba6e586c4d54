# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks of a process group, and bring back what it returns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import _dynamo, multiprocessing

_ = _dynamo  # Optimizers import it: here once, and not in each rank.


def on_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    start: str = "fork",
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(*arguments)` on every rank; return the results in the order of ranks.

    Each rank has one thread. With `start="fork"` the function may be a closure. Results travel
    through torch.save. An exception of a rank is raised here.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        multiprocessing.start_processes(
            _rank,
            (ranks, backend, folder, function, arguments),
            nprocs=ranks,
            start_method=start,
        )
        return [torch.load(folder / f"{rank}", weights_only=False) for rank in range(ranks)]


def _rank(
    rank: int,
    ranks: int,
    backend: str,
    folder: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    torch.save(function(*arguments), folder / f"{rank}")
    dist.barrier()
    dist.destroy_process_group()
