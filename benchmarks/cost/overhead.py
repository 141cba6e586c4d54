# SPDX-License-Identifier: Apache-2.0
"""Time a training step with the noise scale measured in it, against the plain step.

What measuring takes of whole runs, of which few steps are measured: `whole_runs.py`.

Each way of measuring trains its own copy of one model, all copies in the same processes. In every
round each copy takes one step on the same batch, in an order shuffled alike on all ranks and from
a barrier: zero_grad, forward, backward, measuring, SGD. A step lasts until the slowest rank is
done. Claimed is the median over rounds of its time over the plain step's in the same round, a
fiftieth of a reading of the noise scale included: loggers read it every 50 steps. A second plain
copy shows what the machine's noise does to that figure. The noise scales read show that all
measure the same thing.

Families of trainings, each against a plain one of its own:

    ddp           GELU layers of one width on 2 ranks, and public peers where installed
    accumulation  the same in one process, 4 micro-batches a step, compared with each other
    fsdp          the same, sharded by `fully_shard` on 2 ranks

Under DDP measuring reads (1 + 1/ranks) x the gradient from memory whatever the batch, so its share
of the step falls with the examples a rank; accumulation reads it once a micro-batch and once a
step. On CPU two batches are timed: 512 examples, about the work per parameter of a transformer on
512 tokens, for which the claim is made; and 64, where two ranks on two cores are bound by memory
and the claim does not hold (no read to be saved is left).

Memory is counted in one more step of each copy, under torch.profiler: all bytes that torch's
allocator hands out on the device, and the most of them held at once. A step allocates the same
blocks every time, so what it has above the plain step is what the measuring allocates, wherever
that happens and whatever the functions are called; the second plain copy shows that it is exact.

    python benchmarks/cost/overhead.py [--families ddp accumulation] [--rounds 120]
    python benchmarks/cost/overhead.py --device cuda [--bf16] [--rounds 50]

CPU: ranks over gloo, one thread each. CUDA: a rank a GPU over NCCL; a single GPU is shared by
2 ranks over gloo, as NCCL refuses that. No claim is made on peers.

Exits 1 if one of our steps takes more than is claimed for it (see FAMILIES) at a batch claimed, or
if one under DDP or accumulation allocates more than 1 % of the parameters' bytes at any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.cost._ways import Plain, Sharded, variant
from benchmarks.lib.peers import PEERS, Ours, OursByGroups, PlainDdp, PlainDdpAgain, version
from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.results import saved_rows, write_results

HIGHEST_SHARE_ALLOCATED = 0.01
LAYERS = 8
READ_EVERY = 50
# Our first steps probe the model; allocators settle in every copy's.
WARM_UP_ROUNDS = 8
INSTALL = "pip install --no-deps -r benchmarks/peers-requirements.txt"
Training = type[PlainDdp] | type[Plain]


@dataclass(frozen=True)
class Family:
    """Ways of measuring that are set against one plain training."""

    trainings: tuple[Training, ...]
    """The first one is plain."""
    highest_ratio: dict[str, dict[str, float]]
    """Claimed for a training on a device."""
    sizes: dict[str, list[tuple[float, int]]]
    """Millions of parameters, and examples of a rank in one backward pass."""
    least_batch_size_claimed: dict[str, int]
    ranks: int = 1
    allocation_claimed: bool = True


AGAIN, OURS = "plain again", "noisescale"
GROUPS = {"first": "^0", "weights": r"^\d+\.weight"}
EACH_STEP = {"every_n_steps": 1}
_LAYERS_OF_ONE_WIDTH: dict[str, Any] = {
    "sizes": {"cpu": [(4.0, 64), (16.0, 64), (4.0, 512), (16.0, 512)], "cuda": [(300.0, 4096)]},
    "least_batch_size_claimed": {"cpu": 512, "cuda": 4096},
}
FAMILIES = {
    "ddp": Family(
        (PlainDdp, PlainDdpAgain, Ours, OursByGroups, *PEERS),
        {OURS: {"cpu": 1.03, "cuda": 1.005}},
        ranks=2,
        **_LAYERS_OF_ONE_WIDTH,
    ),
    "accumulation": Family(
        (
            Plain,
            variant(Plain, AGAIN),
            variant(Plain, OURS, EACH_STEP),
            variant(Plain, "by groups", EACH_STEP | {"groups": GROUPS}),
        ),
        {OURS: {"cpu": 1.05, "cuda": 1.05}},
        **_LAYERS_OF_ONE_WIDTH,
    ),
    "fsdp": Family(
        (Sharded, variant(Sharded, AGAIN), variant(Sharded, OURS, EACH_STEP)),
        {},
        ranks=2,
        allocation_claimed=False,
        **_LAYERS_OF_ONE_WIDTH,
    ),
}


@dataclass(frozen=True)
class Setting:
    family: str
    device: str
    backend: str
    ranks: int
    width: int
    rank_batch_size: int
    rounds: int
    bf16: bool
    claims: bool

    @property
    def of(self) -> Family:
        return FAMILIES[self.family]

    @property
    def read_every(self) -> int:
        return READ_EVERY if self.claims else 5

    @property
    def shares_gpu(self) -> bool:
        return self.device == "cuda" and self.ranks > torch.cuda.device_count()

    @property
    def time_claimed(self) -> bool:
        return self.rank_batch_size >= self.of.least_batch_size_claimed[self.device]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model().parameters())

    @property
    def parameter_bytes(self) -> int:
        return self.parameters * torch.float32.itemsize

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(self.width, self.width) for _ in range(LAYERS)]
        activated = [module for layer in layers[:-1] for module in (layer, nn.GELU())]
        return nn.Sequential(*activated, layers[-1]).to(self.device)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets; these have a mean to learn, or gradients were nothing but noise."""
        passes = getattr(self.of.trainings[0], "passes", 1)
        inputs = torch.randn(passes * self.rank_batch_size, self.width, device=self.device)
        return inputs, inputs + 1


class Stopwatch:
    """Seconds from all ranks' being ready to the slowest one's being done with a call."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: list[float] = []

    def __call__(self, function: Callable[..., object], *arguments: object) -> None:
        dist.barrier()
        self._finish_device()
        start = time.perf_counter()
        function(*arguments)
        self._finish_device()
        self.seconds.append(time.perf_counter() - start)

    def _finish_device(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def slowest_ranks_seconds(self) -> list[float]:
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, self.seconds)
        return [max(of_ranks) for of_ranks in zip(*everyones, strict=True)]


def measure(setting: Setting) -> list[dict[str, Any]]:
    """One record a training that can run here, the plain one first."""
    if setting.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    trainings = [
        training(setting.model(), setting.rank_batch_size, bf16=setting.bf16)
        for training in setting.of.trainings
        if version(training)
    ]
    torch.manual_seed(1 + dist.get_rank())
    shuffled = random.Random(0)
    steps = [Stopwatch(setting.device) for _ in trainings]
    reads = [Stopwatch(setting.device) for _ in trainings]
    for t in range(1 - WARM_UP_ROUNDS, setting.rounds + 1):
        batch = setting.batch()
        for i in shuffled.sample(range(len(trainings)), len(trainings)):
            steps[i](trainings[i].step, *batch)
            if t % setting.read_every == 0:
                reads[i](trainings[i].noise_scale)
    return [
        {
            "measuring": training.name,
            "version": version(type(training)),
            "step_seconds": step.slowest_ranks_seconds()[WARM_UP_ROUNDS:],
            "read_seconds": read.slowest_ranks_seconds()[1:],
            "noise_scale": training.noise_scale(),
            **allocations(training, setting),
        }
        for training, step, read in zip(trainings, steps, reads, strict=True)
    ]


def allocations(training: PlainDdp | Plain, setting: Setting) -> dict[str, int]:
    """Bytes that one step allocates on the device: the sum, and the most held at once."""
    batch = setting.batch()
    # The profiler does not see the release of what it did not see allocated: gradients first.
    training.zero_grad()
    activities = [ProfilerActivity.CPU]
    if setting.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    dist.barrier()
    with profile(activities=activities, profile_memory=True) as profiled:
        training.step(*batch)
        # gloo's thread writes down when a collective ended, after those who wait for it go on.
        # It would write into memory that a profiler that has stopped gave back.
        dist.barrier()
        time.sleep(0.05)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    here = int(getattr(torch.autograd.DeviceType, setting.device.upper()))
    events = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == here]
    changes = [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"])]
    return {
        "allocated_bytes": sum(change for change in changes if change > 0),
        "peak_bytes": max(itertools.accumulate(changes)),
    }


def row(setting: Setting, record: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """A record set against that of the plain training."""
    claimed = setting.of.highest_ratio.get(record["measuring"], {}).get(setting.device, math.inf)
    read = statistics.median(record["read_seconds"])
    seconds = [step + read / setting.read_every for step in record["step_seconds"]]
    ratios = [s / p for s, p in zip(seconds, plain["step_seconds"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    allocated = record["allocated_bytes"] - plain["allocated_bytes"]
    peak = record["peak_bytes"] - plain["peak_bytes"]
    return {
        "measuring": record["measuring"],
        "version": record["version"],
        **asdict(setting),
        "parameters": setting.parameters,
        "median_ratio": median,
        "lower_quartile": low,
        "upper_quartile": high,
        "median_step_seconds": statistics.median(seconds),
        "read_seconds": read,
        "allocated_bytes": allocated,
        "allocated_share": allocated / setting.parameter_bytes,
        "peak_bytes": peak,
        "peak_share": peak / setting.parameter_bytes,
        "noise_scale": None if math.isnan(record["noise_scale"]) else record["noise_scale"],
        "passed": not setting.claims
        or claimed == math.inf
        or (
            (median <= claimed or not setting.time_claimed)
            and (
                allocated <= HIGHEST_SHARE_ALLOCATED * setting.parameter_bytes
                or not setting.of.allocation_claimed
            )
        ),
    }


def measured_for(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("family", "width", "rank_batch_size", "bf16"))


def print_table(setting: Setting, rows: list[dict[str, Any]]) -> None:
    where = "one GPU that they share" if setting.shares_gpu else setting.device
    print(
        f"\n{setting.family}: {setting.parameters / 1e6:.3g} M parameters,"
        f" {setting.ranks} {'rank' if setting.ranks == 1 else 'ranks over ' + setting.backend}"
        f" on {where}, {setting.rank_batch_size} examples a rank,"
        f" {setting.rounds} rounds{'' if setting.time_claimed else ' (time: no claim)'}"
    )
    print(
        "measuring           step, ms  x plain  quartiles      read, ms"
        "    allocated, bytes, of parameters    peak  noise scale"
    )
    for r in rows:
        noise_scale = "-" if r["noise_scale"] is None else f"{r['noise_scale']:.3g}"
        print(
            f"{r['measuring']:18} {1e3 * r['median_step_seconds']:9.1f} {r['median_ratio']:8.3f}"
            f"  {r['lower_quartile']:.3f}, {r['upper_quartile']:.3f} {1e3 * r['read_seconds']:9.2f}"
            f"  {r['allocated_bytes']:+18,} {r['allocated_share']:14.2%}"
            f"  {r['peak_share']:6.1%} {noise_scale:>12}"
            f"{'' if r['passed'] else '   TOO MUCH'}"
        )
    for peer in PEERS:
        if setting.family == "ddp" and version(peer) is None:
            print(f"{peer.name:18} not installed: {INSTALL}")
    sys.stdout.flush()


def settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    gpus = torch.cuda.device_count()
    for name in arguments.families:
        family = FAMILIES[name]
        for size, rank_batch_size in arguments.sizes or family.sizes[arguments.device]:
            ranks = family.ranks
            if ranks > 1 and arguments.device == "cuda":
                ranks = max(2, gpus)
            # In steps of 32, rounded up.
            yield Setting(
                family=name,
                device=arguments.device,
                backend="nccl" if arguments.device == "cuda" and gpus >= ranks else "gloo",
                ranks=ranks,
                width=32 * math.ceil(math.sqrt(size * 1e6 / LAYERS) / 32),
                rank_batch_size=rank_batch_size,
                rounds=arguments.rounds,
                bf16=arguments.bf16,
                claims=not arguments.smoke,
            )


def size(text: str) -> tuple[float, int]:
    millions, examples = text.split("x")
    return float(millions), int(examples)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=120, help=f"at least {READ_EVERY}")
    parser.add_argument(
        "--sizes", type=size, nargs="+", help="as 4x512: 4 million parameters, 512 examples a rank"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bf16", action="store_true", help="train under bfloat16 autocast")
    parser.add_argument("--smoke", action="store_true", help="tiny, quick, and nothing claimed")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/cost/overhead_DEVICE.json"
    )
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.sizes = 5, [(0.02, 8)]
    elif arguments.rounds < READ_EVERY:
        parser.error(f"`--rounds` must be at least {READ_EVERY}, got {arguments.rounds}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device cuda` needs a GPU that torch can use, got none")
    return arguments


def main() -> int:
    arguments = parsed_arguments()
    # The ranks inherit these: no lines from the profiler.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    all_rows = []
    for setting in settings(arguments):
        start = "spawn" if setting.claims else "fork"  # a fork is there at once
        records = on_ranks(setting.ranks, measure, setting, start=start, backend=setting.backend)[0]
        rows = [row(setting, record, plain=records[0]) for record in records]
        print_table(setting, rows)
        all_rows += rows
        if arguments.save:
            gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
            name = f"cost/overhead_{arguments.device}"
            new = {measured_for(r) for r in all_rows}
            others = [r for r in saved_rows(name) if measured_for(r) not in new]
            write_results(name, [*others, *all_rows], gpu=gpu)
    return int(not all(row["passed"] for row in all_rows))


if __name__ == "__main__":
    sys.exit(main())
