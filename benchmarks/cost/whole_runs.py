# SPDX-License-Identifier: Apache-2.0
"""Time whole runs measured by default against plain ones, and count how many are resolved.

By default a share of the steps is measured, see `noisescale.meter.cadence`. Three copies of one
model train in the same processes, two of them plain. Each takes its step on the same batch before
any takes its next, in an order shuffled alike on all ranks and from a barrier; a step lasts until
the slowest rank is done. The noise scale is read every 50 steps, as loggers do. Claimed is the
median over runs of the total time over the plain copy's; the second plain copy shows what the
machine's noise does to that figure.

                                                                        small      usual
    rank          layers of one width under DDP, 2 ranks, 1 million
                  parameters, examples of each                          64         256
    micro_batch   the same in one process, examples in each of 4
                  micro-batches a step                                  64         256
    half          a transformer of 4 layers in one process, 16
                  sequences of 64 tokens a step, of width               64         128

Claims are made for the usual size. In the small one measuring has little work to hide behind.

How many runs are resolved is arithmetic: gradients around a known |G|² with a known tr(Σ), alike in
100 directions, go through the estimator that is logged, at the steps that are measured. A rank is
one of 4, a micro-batch one of 4, a half one of 2.

    python benchmarks/cost/whole_runs.py [--ways rank half] [--runs 3] [--resolved-only]

Results are saved as they come, and a later call goes on from there. CPU: ranks over gloo, one
thread each. Exits 1 if a total is above what is claimed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.accuracy.coverage import Setting, step_norms
from benchmarks.cost._ways import CHARACTERS, Plain, Sequences, transformer, variant
from benchmarks.cost.overhead import READ_EVERY, Stopwatch
from benchmarks.lib.peers import PlainDdp
from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.results import saved_rows, write_results
from noisescale import GradientMoments, NoiseScaleEstimator, NoiseScaleMeter, gradient_moments
from noisescale.collectors.collector import COST_OF_NORMS
from noisescale.meter.cadence import NOTHING, Cadence

WIDTH, LAYERS = 352, 8
SEQUENCES, TOKENS = 16, 64
EXAMPLES = {"small": 64, "usual": 256}
TRANSFORMER_WIDTH = {"small": 64, "usual": 128}
SIZES = tuple(EXAMPLES)

RATIOS = (1, 2, 5, 15)
"""B_simple over the batch size."""
LENGTHS = (200, 2_000, 10_000)
RESOLVED_RUNS = 200


class DefaultDdp(PlainDdp):
    """`NoiseScaleMeter` as it is by default."""

    name = package = "noisescale"

    def attach(self) -> None:
        self.meter = NoiseScaleMeter(self.model)

    def backward(self, loss: Tensor) -> None:
        self.meter.backward(loss, local_batch_size=self.batch_size)
        self.meter.step()

    def noise_scale(self) -> float:
        return self.meter.noise_scale.value


@dataclass(frozen=True)
class Way:
    """One way of measuring, plain and as it is by default."""

    plain: type[PlainDdp] | type[Plain]
    measured: type[PlainDdp] | type[Plain]
    cost: float
    """Of a measured step, in plain ones: see `Collector.cost`."""
    parts: int
    """That are compared, where resolved runs are counted."""
    claimed: dict[int, float]
    """Total time over plain that a run of so many steps has at most, of the usual size."""
    ranks: int = 1
    passes: int = 1


WAYS = {
    "rank": Way(PlainDdp, DefaultDdp, COST_OF_NORMS, 4, {2_000: 1.01}, ranks=2),
    "micro_batch": Way(
        Plain, variant(Plain, "measured", {}), COST_OF_NORMS, 4, {2_000: 1.01}, passes=4
    ),
    "half": Way(
        Sequences, variant(Sequences, "measured", {}), 0.75, 2, {2_000: 1.025, 10_000: 1.013}
    ),
}


def model_of(way: Way, size: str) -> nn.Module:
    torch.manual_seed(0)
    if issubclass(way.plain, Sequences):
        return transformer(TRANSFORMER_WIDTH[size])
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    activated = [module for layer in layers[:-1] for module in (layer, nn.GELU())]
    return nn.Sequential(*activated, layers[-1])


def batch_of(way: Way, size: str) -> tuple[Tensor, Tensor]:
    if issubclass(way.plain, Sequences):
        tokens = torch.randint(CHARACTERS, (SEQUENCES, TOKENS))
        return tokens, (tokens + 1) % CHARACTERS
    inputs = torch.randn(way.passes * EXAMPLES[size], WIDTH)
    return inputs, inputs + 1


def totals(name: str, size: str, steps: int, seed: int) -> dict[str, Any]:
    """Train the copies for so many steps; return seconds of each and the steps measured."""
    way = WAYS[name]
    examples = SEQUENCES if issubclass(way.plain, Sequences) else EXAMPLES[size]
    kinds = way.plain, way.plain, way.measured
    copies = [kind(model_of(way, size), examples) for kind in kinds]
    torch.manual_seed(1 + 1000 * seed + dist.get_rank())
    shuffled = random.Random(seed)
    clocks = [Stopwatch("cpu") for _ in copies]

    def one_step(copy: PlainDdp | Plain, batch: tuple[Tensor, Tensor], *, reads: bool) -> None:
        copy.step(*batch)
        if reads:
            copy.noise_scale()

    for step in range(1, steps + 1):
        batch = batch_of(way, size)
        for k in shuffled.sample(range(len(copies)), len(copies)):
            clocks[k](partial(one_step, copies[k], batch, reads=step % READ_EVERY == 0))
    seconds = [sum(clock.slowest_ranks_seconds()) for clock in clocks]
    return {"seconds": seconds, "measured_steps": copies[-1].meter.measured_steps}


def whole_run(
    name: str, size: str, steps: int, seed: int, *, start: str = "spawn"
) -> dict[str, Any]:
    found = on_ranks(WAYS[name].ranks, totals, name, size, steps, seed, start=start)[0]
    plain, again, measured = found["seconds"]
    return {
        "kind": "time",
        "way": name,
        "size": size,
        "steps": steps,
        "seed": seed,
        "measured_steps": found["measured_steps"],
        "plain_seconds": round(plain, 3),
        "ratio": round(measured / plain, 5),
        "plain_again": round(again / plain, 5),
    }


def is_resolved(name: str, ratio: float, seed: int) -> list[bool]:
    """Whether the noise scale that is logged is, after each of `LENGTHS` steps of one run."""
    way = WAYS[name]
    setting = Setting("", ratio, way.parts, max(LENGTHS), "auto", (32 // way.parts,))
    truth = GradientMoments(1.0, setting.first_noise_scale)
    rng = np.random.default_rng([seed, int(ratio), way.parts])
    estimator, cadence, spent = NoiseScaleEstimator(), Cadence("auto"), NOTHING
    found = []
    for step in range(1, max(LENGTHS) + 1):
        if cadence.due(step, spent, way.cost):
            spent = spent.plus(way.cost)
            small, big = step_norms(setting, truth, rng, 32 // way.parts)
            moments = gradient_moments(small, big, small_batch=32 / way.parts, big_batch=32)
            estimator.update(moments, 32, step)
        if step in LENGTHS:
            found.append(estimator.estimate(step).resolved)
    return found


def resolved_row(name: str, ratio: float, runs: int, processes: int) -> dict[str, Any]:
    with get_context("spawn").Pool(processes) as pool:
        found = pool.map(partial(is_resolved, name, ratio), range(runs))
    shares = np.mean(found, axis=0).tolist()
    of_steps = dict(zip(map(str, LENGTHS), shares, strict=True))
    return {"kind": "resolved", "way": name, "ratio": ratio, "runs": runs, "share": of_steps}


def report(rows: list[dict[str, Any]]) -> bool:
    """Print what was found; return whether all is as claimed."""
    met = True
    print(
        "\nway          size   steps   runs  measured  ms a plain step  total over plain"
        "  quartiles      plain again"
    )
    timed = [row for row in rows if row["kind"] == "time"]
    for name, size, steps in dict.fromkeys((r["way"], r["size"], r["steps"]) for r in timed):
        of = [r for r in timed if (r["way"], r["size"], r["steps"]) == (name, size, steps)]
        ratios = [r["ratio"] for r in of]
        median = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4) if len(of) > 1 else 3 * [median]
        again = statistics.median(r["plain_again"] for r in of)
        plain = statistics.median(r["plain_seconds"] / steps for r in of)
        claimed = WAYS[name].claimed[steps] if size == "usual" else math.inf
        met &= median <= claimed
        print(
            f"{name:11} {size:6} {steps:6,} {len(of):6} {of[0]['measured_steps']:9,}"
            f" {1e3 * plain:16.1f} {median:17.4f}  {low:.4f}, {high:.4f} {again:12.4f}"
            f"{'' if median <= claimed else f'   ABOVE {claimed:g}'}"
        )
    resolved = [r for r in rows if r["kind"] == "resolved"]
    if resolved:
        lengths = "".join(f"{steps:>10,} steps" for steps in LENGTHS)
        print(f"\nresolved      B_simple{lengths}")
    for row in resolved:
        shares = "".join(f"{share:16.0%}" for share in row["share"].values())
        print(f"{row['way']:14}{row['ratio']:6} B{shares}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--runs", type=int, default=3, help="of 2,000 steps; of longer ones 2")
    parser.add_argument("--processes", type=int, default=2, help="that count resolved runs")
    parser.add_argument("--resolved-only", action="store_true", help="time no runs")
    parser.add_argument("--smoke", action="store_true", help="a few steps, unsaved")
    arguments = parser.parse_args()
    if arguments.smoke:
        rows = [
            whole_run(name, size, 20, 0, start="fork")
            for name, size in (("rank", "usual"), ("half", "small"))
        ]
        print([(row["way"], row["measured_steps"]) for row in rows])
        print(is_resolved("rank", 1, 0))
        return 0
    rows = saved_rows("cost/whole_runs")
    for name in arguments.ways:
        for ratio in RATIOS:
            if not any(
                (r["kind"], r["way"], r["ratio"]) == ("resolved", name, ratio) for r in rows
            ):
                rows.append(resolved_row(name, ratio, RESOLVED_RUNS, arguments.processes))
                write_results("cost/whole_runs", rows, quiet=True)
        if arguments.resolved_only:
            continue
        for size, steps in itertools.product(arguments.sizes, WAYS[name].claimed):
            if size == "small" and steps > 2_000:
                continue
            for seed in range(arguments.runs if steps <= 2_000 else min(arguments.runs, 2)):
                key = ("time", name, size, steps, seed)
                if key in {
                    tuple(map(r.get, ("kind", "way", "size", "steps", "seed"))) for r in rows
                }:
                    continue
                started = time.perf_counter()
                rows.append(whole_run(name, size, steps, seed))
                write_results("cost/whole_runs", rows, quiet=True)
                print(f"{rows[-1]}   ({time.perf_counter() - started:.0f} s)", flush=True)
    return int(not report(rows))


if __name__ == "__main__":
    sys.exit(main())
