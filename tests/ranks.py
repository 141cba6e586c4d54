# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks of a process group and bring back what it returns.

The group is NCCL's where tests run on CUDA, else Gloo's.
"""

import faulthandler
import functools
import importlib
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import devices
import torch
import torch.distributed as dist
from huge_pages import use_huge_pages
from torch import multiprocessing

SECONDS = 110
"""After which ranks hang. Machines that are shared are three times as slow at times."""


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every rank; return the results in the order of ranks.

    Processes are forked, so the function may be a closure; results travel through torch.save.
    An exception on a rank is raised here with its traceback, at once: the others may hang.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deadline = time.monotonic() + SECONDS
        with _ranks(world_size, folder, function, arguments) as processes:
            running = {process.sentinel for process in processes}
            while running and not any(folder.glob("*.error")):
                if not (ended := wait(running, deadline - time.monotonic())):
                    break
                running -= {*ended}
        _raise_errors(folder)
        assert not running, f"ranks were still running after {SECONDS} s"
        return [
            torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(world_size)
        ]


def in_a_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test that compiles or profiles in a forked process of its own.

    From torch 2.15 on, processes that are forked from one that has compiled have no backward pass.
    Those that are forked from one that has profiled may end where they profile.
    What compiling imports is imported here, and not by each of them.
    """

    @functools.wraps(test)
    def forked(*arguments: Any, **options: Any) -> None:
        for name in (
            "dynamo.backends.inductor",
            "dynamo.repro.after_dynamo",
            "inductor.compile_fx",
        ):
            importlib.import_module(f"torch._{name}")
        call_in_a_fork(test, *arguments, **options)

    return forked


def call_in_a_fork(test: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Call a test in a forked process. Its error is raised here."""
    importlib.import_module("torch._dynamo")  # as for ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        use_huge_pages()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_alone, args=(folder, test, arguments, options))
        process.start()
        process.join(SECONDS)
        process.kill()
        process.join()
        _raise_errors(folder)
        assert process.exitcode == 0, f"the test ended with exit code {process.exitcode}"


def until_killed(world_size: int, function: Callable[[], Any], *, grace: float = 0.0) -> None:
    """Call `function` on forked ranks until it kills one with SIGKILL.

    Args:
        world_size: The ranks.
        function: What they run.
        grace: Seconds that the others have to notice and to end, before they are killed too.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        _ranks(world_size, Path(folder), function, ()) as processes,
    ):
        ended = wait([process.sentinel for process in processes], SECONDS)
        assert ended, f"no rank was killed in {SECONDS} s"
        for process in processes:
            if process.sentinel in ended:
                process.join()
        if not any(process.exitcode == -signal.SIGKILL for process in processes):
            _raise_errors(Path(folder))
            raise AssertionError("a rank ended, and none was killed")
        for process in processes:
            process.join(grace)


def _raise_errors(folder: Path) -> None:
    for error in sorted(folder.glob("*.error")):
        raise AssertionError(f"Process {error.stem} failed:\n{error.read_text()}")


@contextmanager
def _ranks(world_size: int, folder: Path, function: Any, arguments: Any) -> Iterator[list[Any]]:
    """Processes that run a function; whatever is left of them is killed."""
    importlib.import_module("torch._dynamo")  # which DDP and FSDP import: not in every fork
    use_huge_pages()
    context: Any = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(rank, world_size, folder, function, arguments))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def as_torchrun(function: Callable[[], Any]) -> Callable[[], Any]:
    """Let `function` find the environment that torchrun sets: libraries then launch nothing."""

    def launched() -> Any:
        rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
        index = devices.of_rank(dist.get_rank()).index
        os.environ.update(
            TORCHELASTIC_RUN_ID="test",
            RANK=rank,
            LOCAL_RANK=rank if index is None else str(index),
            GROUP_RANK="0",
            WORLD_SIZE=world_size,
            LOCAL_WORLD_SIZE=world_size,
            MASTER_ADDR="localhost",
            MASTER_PORT="0",
        )
        return function()

    return launched


def _rank(rank: int, world_size: int, folder: Path, function: Any, arguments: Any) -> None:
    # A forked process has no pool of threads: torch's own asserts now and then where it needs one.
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(SECONDS - 5)  # where it hangs
    if devices.forks():
        torch.accelerator.set_device_index(devices.of_rank(rank).index)
    with _written_errors(folder, str(rank)):
        dist.init_process_group(
            devices.backend(rank),
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
        )
        torch.save(function(*arguments), folder / f"{rank}.result")
        with warnings.catch_warnings():  # on GPUs it says that it takes the device set above
            warnings.filterwarnings("ignore", r"barrier\(\): using the device under")
            dist.barrier()
        dist.destroy_process_group()


def _alone(
    folder: Path, test: Callable[..., None], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)  # as above
    with _written_errors(folder, "alone"):
        test(*arguments, **options)


@contextmanager
def _written_errors(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_text(traceback.format_exc())
        unfinished.rename(folder / f"{name}.error")
