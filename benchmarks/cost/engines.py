# SPDX-License-Identifier: Apache-2.0
"""Time training by each engine with the noise scale measured, and compare its number with DDP's.

Each engine trains three copies of one transformer on two ranks, in the same processes: plain,
plain again, and with a meter that measures every 12th step, as runs do after their first 2,000
steps. Every copy takes the same batches, in an order shuffled alike on all ranks and from a
barrier. Claimed is the median over blocks of 12 steps of a block's time over the plain copy's.
The second plain copy shows what the machine's noise does to that figure.

The noise scale and its two parts are of the same batches under every engine, and DDP's are the
measure: they may be off by 1e-4. Weights move by less than that in float32.

    python benchmarks/cost/engines.py [--blocks 40] [--smoke]

On CPU, gloo, one thread a rank. ZeRO is left out where DeepSpeed is not installed. Exits 1 if a
number is off by more than 1e-4, or a median is above 1.01.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.cost._ways import CHARACTERS, LEARNING_RATE, transformer
from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.results import write_results
from noisescale import NoiseScaleMeter

RANKS, WIDTH, SEQUENCES, TOKENS = 2, 128, 8, 64
EVERY, SETTLED = 12, 2
"""Steps of a block, of which the first is measured, and blocks that are not timed."""
CLAIMED, EXACT = 1.01, 1e-4
PLAIN, AGAIN, MEASURED = "plain", "plain again", "measured"


def by_fsdp1(model: nn.Sequential) -> nn.Module:
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for name, child in list(model.named_children()):
        setattr(model, name, FullyShardedDataParallel(child, **options))
    return FullyShardedDataParallel(model, **options)


def by_fsdp2(model: nn.Sequential, apply: Callable[..., Any] = fully_shard) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for child in model.children():
        apply(child, mesh=mesh)
    apply(model, mesh=mesh)
    return model


def by_zero(model: nn.Sequential, stage: int) -> Any:
    import deepspeed

    deepspeed.utils.logger.disabled = True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes a minute
    deepspeed.init_distributed("gloo", rank=dist.get_rank(), world_size=RANKS)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its default is 1
    }
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


ENGINES: dict[str, Callable[[nn.Sequential], Any]] = {
    "DDP": DistributedDataParallel,
    "FSDP1": by_fsdp1,
    "FSDP2": by_fsdp2,
    "replicate": partial(by_fsdp2, apply=replicate),
}
if importlib.util.find_spec("deepspeed"):
    ENGINES |= {f"ZeRO {stage}": partial(by_zero, stage=stage) for stage in (1, 2, 3)}


class Training:
    """A copy of the model in training, on a rank."""

    def __init__(self, engine: str, name: str, model: nn.Sequential) -> None:
        self.model = ENGINES[engine](model)
        self.optimizer = None
        if not engine.startswith("ZeRO"):
            self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE)
        self.meter = None
        if name == MEASURED:
            self.meter = NoiseScaleMeter(self.model, every_n_steps=EVERY, window=10_000)

    def step(self, tokens: Tensor) -> None:
        logits = self.model(tokens)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), (tokens.flatten() + 1) % CHARACTERS
        )
        if self.meter is not None:
            self.meter.backward(loss, local_batch_size=len(tokens))
        elif self.optimizer is None:
            self.model.backward(loss)
        else:
            loss.backward()
        if self.optimizer is None:
            self.model.step()  # DeepSpeed's; the meter's comes after it
        if self.meter is not None:
            self.meter.step()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def train(engine: str, blocks: int) -> tuple[dict[str, list[float]], list[float]]:
    """On a rank: seconds of each block of each copy, and noise scale, noise and signal."""
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = transformer(WIDTH)
    copies = {name: copy.deepcopy(model) for name in (PLAIN, AGAIN, MEASURED)}
    trainings = {name: Training(engine, name, own) for name, own in copies.items()}
    order, data = random.Random(0), torch.Generator().manual_seed(rank)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(SETTLED + blocks):
        of_block = dict.fromkeys(trainings, 0.0)
        for _ in range(EVERY):
            tokens = torch.randint(CHARACTERS, (SEQUENCES, TOKENS), generator=data)
            for name in order.sample(list(trainings), len(trainings)):
                dist.barrier()
                began = time.perf_counter()
                trainings[name].step(tokens)
                of_block[name] += time.perf_counter() - began
        for name, spent in of_block.items():
            seconds[name].append(spent)
    meter = trainings[MEASURED].meter
    assert meter is not None
    assert meter.not_measured is None
    moments = meter.average_moments
    assert moments is not None
    found = [meter.noise_scale.value, moments.noise_trace, moments.grad_sq_norm]
    return {name: each[SETTLED:] for name, each in seconds.items()}, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--smoke", action="store_true", help="DDP and FSDP2, a block each, unsaved")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    blocks = 1 if arguments.smoke else arguments.blocks
    rows, expected = [], []
    for engine in ("DDP", "FSDP2") if arguments.smoke else ENGINES:
        (seconds, found), *_ = on_ranks(RANKS, train, engine, blocks)
        expected = expected or found
        ratios = {
            name: sorted(a / b for a, b in zip(seconds[name], seconds[PLAIN], strict=True))
            for name in (AGAIN, MEASURED)
        }
        rows.append(
            {
                "engine": engine,
                "ratio": round(statistics.median(ratios[MEASURED]), 4),
                "ratio of plain again": round(statistics.median(ratios[AGAIN]), 4),
                "quartiles": [round(ratios[MEASURED][blocks * k // 4], 4) for k in (1, 3)],
                "milliseconds": round(1e3 * statistics.median(seconds[PLAIN]) / EVERY, 1),
                "noise scale": float(f"{found[0]:.7g}"),
                "off DDP's": max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)),
            }
        )
        print(rows[-1], flush=True)
    if not arguments.smoke:
        write_results("cost/engines", rows, blocks=blocks)
    exact = all(row["off DDP's"] <= EXACT for row in rows)
    return 0 if exact and (arguments.smoke or all(r["ratio"] <= CLAIMED for r in rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
