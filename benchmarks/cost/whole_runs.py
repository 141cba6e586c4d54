# SPDX-License-Identifier: Apache-2.0
"""Time whole runs measured at 1 % and by default against plain ones; count what is resolved.

By default a share of the steps is measured, see `noisescale.meter.cadence`. Four copies of one
model train in the same processes: two plain, one measured at 1 % and one by default. Each takes its
step on the same batch before any takes its next, in an order shuffled alike on all ranks and from a
barrier; a step lasts until the slowest rank is done. The noise scale is read every 50 steps, as
loggers do. Claimed is the median over runs of the total time over the plain copy's; the second
plain copy shows what the machine's noise does to that figure.

    rank          layers of one width under DDP, 2 ranks, 1 million parameters,
                  256 examples of each
    micro_batch   the same in one process, 256 examples in each of 4 micro-batches a step
    half          a transformer of 4 layers in one process, 16 sequences of 64 tokens a step
    half_in_groups    the same with sequences in groups of four: two passes a measured step

What is resolved is arithmetic: gradients around a known |G|² with a known tr(Σ), alike in 100
directions, go through the estimator that is logged, at the steps that are measured. A rank is one
of 4, a micro-batch one of 4, a half one of 2; steps take 50 ms. Known is a noise scale whose
interval has an upper end; its width is the upper end over the lower one.

    python benchmarks/cost/whole_runs.py [--ways rank half] [--steps 500] [--runs 3]
    python benchmarks/cost/whole_runs.py --resolved-only

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
from benchmarks.cost._ways import CHARACTERS, InGroups, Plain, Sequences, transformer, variant
from benchmarks.cost.overhead import READ_EVERY, Stopwatch
from benchmarks.lib.peers import PlainDdp
from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.results import saved_rows, write_results
from noisescale import GradientMoments, NoiseScaleEstimator, NoiseScaleMeter, gradient_moments
from noisescale.collectors.collector import COST_OF_NORMS
from noisescale.meter.cadence import KNOWN_WITHIN, NOT_AGREED, NOTHING, Cadence

WIDTH, LAYERS = 352, 8
SEQUENCES, TOKENS = 16, 64
EXAMPLES, TRANSFORMER_WIDTH = 256, 128

RATIOS = (1, 2, 5, 15)
"""B_simple over the batch size."""
LENGTHS = (500, 2_000, 10_000)
RESOLVED_RUNS = 100
STEP_SECONDS = 0.05

SHARES = {"1 %": 0.01, "default": None}
"""`max_overhead` of the measured copies."""
CLAIMED = {"1 %": 1.012, "default": 1.065}
"""Total time over plain that a run has at most."""


class MeasuredDdp(PlainDdp):
    """`NoiseScaleMeter` with a share of the time."""

    name = package = "noisescale"
    max_overhead: float | None = None

    def attach(self) -> None:
        self.meter = NoiseScaleMeter(self.model, max_overhead=self.max_overhead)

    def backward(self, loss: Tensor) -> None:
        self.meter.backward(loss, local_batch_size=self.batch_size)
        self.meter.step()

    def noise_scale(self) -> float:
        return self.meter.noise_scale.value


@dataclass(frozen=True)
class Way:
    """One way of measuring, and the plain training."""

    plain: type[PlainDdp] | type[Plain]
    cost: float
    """Of a measured step, in plain ones: see `Collector.cost`."""
    parts: int
    """That are compared, where resolved runs are counted."""
    ranks: int = 1
    passes: int = 1

    def measured(self, max_overhead: float | None) -> type[PlainDdp] | type[Plain]:
        if issubclass(self.plain, Plain):
            return variant(self.plain, "measured", {"max_overhead": max_overhead})
        return type("Measured", (MeasuredDdp,), {"max_overhead": max_overhead})


WAYS = {
    "rank": Way(PlainDdp, COST_OF_NORMS, 4, ranks=2),
    "micro_batch": Way(Plain, COST_OF_NORMS, 4, passes=4),
    "half": Way(Sequences, 0.75, 2),
    "half_in_groups": Way(InGroups, 1.5, 2),
}


def model_of(way: Way) -> nn.Module:
    torch.manual_seed(0)
    if issubclass(way.plain, Sequences):
        return transformer(TRANSFORMER_WIDTH)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    activated = [module for layer in layers[:-1] for module in (layer, nn.GELU())]
    return nn.Sequential(*activated, layers[-1])


def batch_of(way: Way) -> tuple[Tensor, Tensor]:
    if issubclass(way.plain, Sequences):
        tokens = torch.randint(CHARACTERS, (SEQUENCES, TOKENS))
        return tokens, (tokens + 1) % CHARACTERS
    inputs = torch.randn(way.passes * EXAMPLES, WIDTH)
    return inputs, inputs + 1


def totals(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Train the copies for so many steps; return seconds of each and the steps measured."""
    way = WAYS[name]
    examples = SEQUENCES if issubclass(way.plain, Sequences) else EXAMPLES
    kinds = [way.plain, way.plain, *map(way.measured, SHARES.values())]
    copies = [kind(model_of(way), examples) for kind in kinds]
    torch.manual_seed(1 + 1000 * seed + dist.get_rank())
    shuffled = random.Random(seed)
    clocks = [Stopwatch("cpu") for _ in copies]

    def one_step(copy: PlainDdp | Plain, batch: tuple[Tensor, Tensor], *, reads: bool) -> None:
        copy.step(*batch)
        if reads:
            copy.noise_scale()

    for step in range(1, steps + 1):
        batch = batch_of(way)
        for k in shuffled.sample(range(len(copies)), len(copies)):
            clocks[k](partial(one_step, copies[k], batch, reads=step % READ_EVERY == 0))
    seconds = [sum(clock.slowest_ranks_seconds()) for clock in clocks]
    return {"seconds": seconds, "measured_steps": [c.meter.measured_steps for c in copies[2:]]}


def whole_run(name: str, steps: int, seed: int, *, start: str = "spawn") -> dict[str, Any]:
    found = on_ranks(WAYS[name].ranks, totals, name, steps, seed, start=start)[0]
    plain, again, *measured = found["seconds"]
    return {
        "kind": "time",
        "way": name,
        "steps": steps,
        "seed": seed,
        "measured_steps": dict(zip(SHARES, found["measured_steps"], strict=True)),
        "plain_seconds": round(plain, 3),
        "over_plain": {of: round(x / plain, 5) for of, x in zip(SHARES, measured, strict=True)},
        "plain_again": round(again / plain, 5),
    }


def widths(name: str, share: str, ratio: float, seed: int) -> list[float]:
    """The upper end over the lower one after each of `LENGTHS` steps of one run."""
    way = WAYS[name]
    setting = Setting("", ratio, way.parts, max(LENGTHS), "auto", (32 // way.parts,))
    truth = GradientMoments(1.0, setting.first_noise_scale)
    rng = np.random.default_rng([seed, int(ratio), way.parts])
    estimator, cadence = NoiseScaleEstimator(), Cadence("auto", SHARES[share])
    spent, pace, found = NOTHING, NOT_AGREED, []
    for step in range(1, max(LENGTHS) + 1):
        if cadence.due(step, spent, way.cost, pace):
            spent = spent.plus(way.cost)
            small, big = step_norms(setting, truth, rng, 32 // way.parts)
            moments = gradient_moments(small, big, small_batch=32 / way.parts, big_batch=32)
            estimator.update(moments, 32, step)
        if step % READ_EVERY == 0:
            estimate = estimator.estimate(step)
            width = estimate.high / estimate.low if estimate.low > 0 else math.inf
            pace = pace.at(step, step - READ_EVERY, STEP_SECONDS, known=width < KNOWN_WITHIN)
            if step in LENGTHS:
                found.append(width)
    return found


def resolved_row(name: str, share: str, ratio: float, processes: int) -> dict[str, Any]:
    with get_context("spawn").Pool(processes) as pool:
        found = np.array(pool.map(partial(widths, name, share, ratio), range(RESOLVED_RUNS)))
    known = np.isfinite(found)
    median = [
        float(np.median(x[k])) if k.any() else None for x, k in zip(found.T, known.T, strict=True)
    ]
    return {
        "kind": "resolved",
        "way": name,
        "of": share,
        "ratio": ratio,
        "runs": RESOLVED_RUNS,
        "share": dict(zip(map(str, LENGTHS), known.mean(axis=0).tolist(), strict=True)),
        "width": dict(zip(map(str, LENGTHS), median, strict=True)),
    }


def report(rows: list[dict[str, Any]]) -> bool:
    """Print what was found; return whether all is as claimed."""
    met = True
    print("\nway           steps  runs  ms a plain step  of       measured  total over plain")
    timed = [row for row in rows if row["kind"] == "time"]
    for name, steps in dict.fromkeys((r["way"], r["steps"]) for r in timed):
        of = [r for r in timed if (r["way"], r["steps"]) == (name, steps)]
        plain = statistics.median(r["plain_seconds"] / steps for r in of)
        again = statistics.median(r["plain_again"] for r in of)
        print(f"{name:11} {steps:7,} {len(of):5} {1e3 * plain:16.1f}  plain again {again:22.4f}")
        for share, claimed in CLAIMED.items():
            ratio = statistics.median(r["over_plain"][share] for r in of)
            measured = statistics.median(r["measured_steps"][share] for r in of)
            met &= ratio <= claimed
            above = "" if ratio <= claimed else f"   ABOVE {claimed:g}"
            print(f"{share:>49} {measured:10,.0f} {ratio:17.4f}{above}")
    resolved = [r for r in rows if r["kind"] == "resolved"]
    if resolved:
        lengths = "".join(f"{steps:>14,} steps" for steps in LENGTHS)
        print(f"\nknown, width  of      B_simple{lengths}")
    for row in resolved:
        cells = "".join(
            f"{share:14.0%} {f'{width:.1f}' if width else '-':>5}"
            for share, width in zip(row["share"].values(), row["width"].values(), strict=True)
        )
        print(f"{row['way']:13} {row['of']:7} {row['ratio']:6} B{cells}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", nargs="+", type=int, choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="that count resolved runs")
    parser.add_argument("--resolved-only", action="store_true", help="time no runs")
    parser.add_argument("--smoke", action="store_true", help="a few steps, unsaved")
    arguments = parser.parse_args()
    if arguments.smoke:
        rows = [whole_run(name, 20, 0, start="fork") for name in ("rank", "half")]
        print([(row["way"], row["measured_steps"]) for row in rows])
        print(widths("rank", "default", 1, 0))
        return 0
    rows = saved_rows("cost/whole_runs")

    def known(*wanted: Any) -> bool:
        names = ("kind", "way", "of", "ratio", "steps", "seed")
        return any(tuple(map(row.get, names)) == wanted for row in rows)

    for name, share, ratio in itertools.product(arguments.ways, SHARES, RATIOS):
        if name != "half_in_groups" and not known("resolved", name, share, ratio, None, None):
            rows.append(resolved_row(name, share, ratio, arguments.processes))
            write_results("cost/whole_runs", rows, quiet=True)
    if not arguments.resolved_only:
        for steps, name in itertools.product(arguments.steps, arguments.ways):
            for seed in range(arguments.runs):
                if not known("time", name, None, None, steps, seed):
                    rows.append(whole_run(name, steps, seed))
                    write_results("cost/whole_runs", rows, quiet=True)
                    print(rows[-1], flush=True)
    return int(not report(rows))


if __name__ == "__main__":
    sys.exit(main())
