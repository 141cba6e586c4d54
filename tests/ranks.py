# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks of a gloo process group and bring back what it returns."""

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

SECONDS = 60


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every rank; return the results in the order of ranks.

    Processes are forked, so the function may be a closure; results travel through torch.save.
    An exception on a rank is raised here, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_rank, args=(rank, world_size, folder, function, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        for error in sorted(Path(folder).glob("*.error")):
            raise AssertionError(f"Rank {error.stem} failed:\n{error.read_text()}")
        assert not late, f"{len(late)} ranks were still running after {SECONDS} s"
        return [torch.load(Path(folder) / f"{rank}.result") for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, function: Any, arguments: Any) -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        torch.save(function(*arguments), f"{folder}/{rank}.result")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
