# SPDX-License-Identifier: Apache-2.0
"""Hold what two halves of each batch show against the spread of whole batches.

For each model of `_models.py`, trained a little and then frozen: the truth is S = tr(Σ) = B times
the variance of the gradients of 1,000 independent batches, and |G|² what is left of their mean. A
`NoiseScaleMeter` in its default way for one process measures every one of 100 batches, with 20
seeds. Then the same training runs 50 steps with the meter and without, and all of parameters,
buffers and random numbers must agree bitwise. What a measured step costs is the median of paired
CPU times, on one thread, and the peak of allocated memory, both over those of a plain step; of
larger models this alone. So it is of the proving step, the first one measured of each graph, in
which derivatives show whether rows act on each other. By default one step in ten is measured.

    python benchmarks/accuracy/halves.py [--models "GPT-2, tied"] [--seeds 20] [--save]

Rows are saved as they come with `--save`, and those that are there are not done again.
Exits 1 if an interval holds the truth for fewer than 17 of 20 seeds in a model that is measured,
or if training is changed. A model that is refused counts as passed if its training goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.accuracy._models import LARGER, MODELS, Setup, seeded
from benchmarks.lib.results import saved_rows, write_results
from noisescale import NoiseScaleMeter

ALL = {**MODELS, **LARGER}
FEWEST_COVERED = 17 / 20
TRAINED_STEPS = 60
NEUTRAL_STEPS = 50
FEW_STEPS = 3
PROVING_ROUNDS = 7


def made(make: Callable[[], Setup]) -> tuple[Setup, torch.optim.Optimizer]:
    torch.manual_seed(0)
    setup = make()
    setup.model.train()
    return setup, torch.optim.Adam(setup.parameters, lr=1e-3)


def step(
    setup: Setup,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    meter: NoiseScaleMeter | None = None,
) -> None:
    optimizer.zero_grad()
    loss = setup.loss(setup.draw(generator))
    if meter is None:
        loss.backward()
    else:
        meter.backward(loss, setup.batch_size)
        meter.step()


def new_meter(setup: Setup, **options: Any) -> NoiseScaleMeter:
    return NoiseScaleMeter(setup.model, parameters=setup.parameters, every_n_steps=1, **options)


def truth_of(setup: Setup, batches: int) -> tuple[float, float]:
    """S and |G|² by the spread of the gradients of whole batches."""
    left_out = {id(setup.model.get_parameter(name)) for name in setup.left_out}
    generator = seeded(7)
    total, squares = torch.zeros(()), 0.0
    for _ in range(batches):
        setup.model.zero_grad()
        setup.loss(setup.draw(generator)).backward()
        gradients = [
            p.grad.flatten()
            for p in setup.parameters
            if p.grad is not None and id(p) not in left_out
        ]
        gradient = torch.cat(gradients).double()
        total = total + gradient
        squares += float(gradient @ gradient)
    mean_sq = float(total @ total) / batches**2
    variance = (squares / batches - mean_sq) * batches / (batches - 1)
    return setup.batch_size * variance, mean_sq - variance / batches


def accuracy(make: Callable[[], Setup], seeds: int, steps: int, batches: int) -> dict[str, Any]:
    setup, optimizer = made(make)
    generator = seeded(99)
    for _ in range(TRAINED_STEPS):
        step(setup, optimizer, generator)
        optimizer.step()
    noise_trace, grad_sq_norm = truth_of(setup, batches)
    truth = noise_trace / grad_sq_norm
    estimates, traces, told = [], [], ""
    for seed in range(seeds):
        meter = new_meter(setup, window=steps)
        generator = seeded(1000 + seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for _ in range(steps):
                    step(setup, optimizer, generator, meter)
                estimates.append(meter.noise_scale)
                moments = meter.average_moments
                traces.append(moments.noise_trace / noise_trace if moments else math.nan)
            except ValueError as refusal:
                return {"true_noise_scale": truth, "refused": str(refusal)}
            finally:
                meter.close()
        told = " ".join(dict.fromkeys(str(one.message) for one in caught))
    resolved = [e for e in estimates if e.resolved]
    return {
        "true_noise_scale": truth,
        "covered": sum(e.low <= truth <= e.high for e in estimates),
        "resolved": len(resolved),
        "seeds": seeds,
        "median_value_over_truth": _median([e.value / truth for e in resolved]),
        "median_low_over_truth": _median([e.low / truth for e in estimates]),
        "median_high_over_truth": _median([e.high / truth for e in resolved]),
        "mean_trace_over_truth": statistics.mean(traces),
        "told": told,
    }


def neutral(make: Callable[[], Setup], steps: int) -> bool:
    """Whether training is bitwise what it is without, measured or refused."""
    ends = []
    for measured in (False, True):
        setup, optimizer = made(make)
        meter = new_meter(setup) if measured else None
        generator = seeded(3)
        torch.manual_seed(1)
        for _ in range(steps):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    step(setup, optimizer, generator, meter)
                except ValueError:
                    assert meter is not None
                    meter.close()  # refused in its first step, whose gradient is there
                    meter = None
            optimizer.step()
        if meter is not None:
            meter.close()
        ends.append([*_bits(setup), torch.get_rng_state()])
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def _bits(setup: Setup) -> list[torch.Tensor]:
    return [x.detach().clone() for x in (*setup.model.parameters(), *setup.model.buffers())]


def cost(make: Callable[[], Setup], rounds: int) -> dict[str, float]:
    """Time and memory of a measured step over those of a plain one."""
    setup, optimizer = made(make)
    other, other_optimizer = made(make)
    meter = new_meter(setup)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(rounds):
            for measured in (True, False) if k % 2 else (False, True):
                of = (
                    (setup, optimizer, seeded(k), meter)
                    if measured
                    else (other, other_optimizer, seeded(k))
                )
                started = time.process_time()
                step(*of)
                of[1].step()
                seconds[measured].append(time.process_time() - started)
        peaks = [
            peak_bytes(lambda: step(setup, optimizer, seeded(0), meter), optimizer),
            peak_bytes(lambda: step(other, other_optimizer, seeded(0)), other_optimizer),
        ]
        meter.close()
        proving = cost_of_proving(setup, optimizer, statistics.median(seconds[False][3:]), peaks[1])
    ratios = [a / b for a, b in zip(seconds[True][3:], seconds[False][3:], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "step_time_ratio": median,
        "step_time_lower_quartile": low,
        "step_time_upper_quartile": high,
        "peak_memory_ratio": peaks[0] / peaks[1],
        **proving,
    }


def cost_of_proving(
    setup: Setup, optimizer: torch.optim.Optimizer, plain_seconds: float, plain_peak: int
) -> dict[str, float]:
    """Time and memory of the first step of a new meter, over those of a plain step."""
    seconds = []
    for k in range(PROVING_ROUNDS):
        meter = new_meter(setup)
        started = time.process_time()
        step(setup, optimizer, seeded(k), meter)
        seconds.append(time.process_time() - started)
        meter.close()
    meter = new_meter(setup)
    peak = peak_bytes(lambda: step(setup, optimizer, seeded(0), meter), optimizer)
    meter.close()
    return {
        "proving_step_time_ratio": statistics.median(seconds) / plain_seconds,
        "proving_peak_memory_ratio": peak / plain_peak,
    }


def peak_bytes(one_step: Callable[[], None], optimizer: torch.optim.Optimizer) -> int:
    """The most that a step holds at once of what it allocates."""
    optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        one_step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--save",
        action="store_true",
        help="save each row as it comes",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = saved_rows("accuracy/halves") if arguments.save else []
    print(
        "model                     truth  covered  value/truth  S/truth  neutral   time  memory"
        "  proving: time  memory"
    )
    for name in arguments.models:
        if any(row["model"] == name for row in rows):
            continue
        try:
            ALL[name]()
        except ImportError as missing:
            print(f"{name:24} not run: {missing}")
            continue
        row: dict[str, Any] = {"model": name}
        if name in MODELS:
            row |= accuracy(ALL[name], arguments.seeds, arguments.steps, arguments.batches)
        row["neutral"] = neutral(ALL[name], NEUTRAL_STEPS if name in MODELS else FEW_STEPS)
        if "refused" not in row:
            row |= cost(ALL[name], arguments.rounds)
        enough = math.floor(FEWEST_COVERED * arguments.seeds)
        row["passed"] = row["neutral"] and row.get("covered", enough) >= enough
        rows.append(row)
        print(text(row), flush=True)
        if arguments.save:
            write_results("accuracy/halves", rows, quiet=True)
    return int(not all(row["passed"] for row in rows))


def text(row: dict[str, Any]) -> str:
    truth = f"{row['true_noise_scale']:6.1f}" if "true_noise_scale" in row else " " * 6
    start, end = f"{row['model']:24} {truth}", "" if row["passed"] else "  FAILED"
    if "refused" in row:
        kept = "neutral" if row["neutral"] else "CHANGED"
        return f"{start}  {kept}, refused: {row['refused']}{end}"
    known = " " * 31
    if "covered" in row:
        value = row["median_value_over_truth"]
        known = (
            f"{row['covered']:3} / {row['seeds']:2} {math.nan if value is None else value:12.2f}"
            f" {row['mean_trace_over_truth']:8.3f}"
        )
    return (
        f"{start} {known} {row['neutral']!s:>8} {row['step_time_ratio']:6.2f}"
        f" {row['peak_memory_ratio']:7.2f} {row['proving_step_time_ratio']:14.1f}"
        f" {row['proving_peak_memory_ratio']:7.2f}{end}"
    )


if __name__ == "__main__":
    sys.exit(main())
