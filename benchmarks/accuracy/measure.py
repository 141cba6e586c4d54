# SPDX-License-Identifier: Apache-2.0
"""Hold `measure` against the spread of very many batches, on models that others wrote.

Each model is trained for some steps, and frozen. The truth is by a plain loop of its own over
`--batches` batches. `measure` is then asked `--seeds` times, each with other batches, for the noise
scale, and whether halves measure this model right. The truth of that is what halves find over
`--batches` batches.

    python benchmarks/accuracy/measure.py [--models "GPT-2, tied"] [--seeds 10] [--save]
    python benchmarks/accuracy/measure.py --rise

`--rise` prints by how much the noise scale rose along the runs of prediction/single_runs.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.accuracy._coupled_models import COUPLED
from benchmarks.accuracy._models import MODELS, Setup, seeded
from benchmarks.accuracy.halves import made, new_meter, step, truth_of
from benchmarks.lib.results import saved_rows, write_results
from noisescale import measure
from noisescale.frozen.comparison import TOLERANCE
from noisescale.lightning.training import quiet, seed_all

ALL = {**MODELS, **COUPLED}
TRAINED_STEPS = 50
NAME = "accuracy/measure"


class Draws(IterableDataset[Any]):
    """An endless stream of independent batches."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self._draw, self._generator = setup.draw, seeded(seed)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._draw(self._generator)


class Module(pl.LightningModule):
    """A model that is measured as it is: copies are the model itself, as its loss has it inside."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.model, self._setup = setup.model, setup

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        return Module(self._setup)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._setup.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        left_out = {id(self._setup.model.get_parameter(name)) for name in self._setup.left_out}
        return torch.optim.SGD([p for p in self._setup.parameters if id(p) not in left_out], lr=0.1)


def trace_by_halves(setup: Setup, optimizer: Any, batches: int) -> float | None:
    """tr(Σ) as halves find it over many batches; None if they are refused."""
    generator = seeded(31)
    try:
        meter = new_meter(setup, window=batches, small_batch="half")
    except ValueError:
        return None
    try:
        for _ in range(batches):
            step(setup, optimizer, generator, meter)
        moments = meter.average_moments
        return moments.noise_trace if moments and not meter.not_measured else None
    except ValueError:
        return None
    finally:
        meter.close()


def tried(make: Callable[[], Setup], seeds: int, batches: int) -> dict[str, Any]:
    setup, optimizer = made(make)
    generator = seeded(99)
    for _ in range(TRAINED_STEPS):
        step(setup, optimizer, generator)
        optimizer.step()
    setup.model.train()
    noise_trace, grad_sq_norm = truth_of(setup, batches)
    truth = noise_trace / grad_sq_norm
    trace = trace_by_halves(setup, optimizer, batches)
    ratios = {"half": None if trace is None else trace / noise_trace}
    before = [x.detach().clone() for x in setup.model.state_dict().values()]
    found, seconds = [], []
    for seed in range(seeds):
        seed_all(seed)
        began = time.perf_counter()
        loader = DataLoader(Draws(setup, 1000 + seed), batch_size=None)
        found.append(measure(Module(setup), loader, batch_size_fn=lambda _: setup.batch_size))
        seconds.append(time.perf_counter() - began)
    after = setup.model.state_dict().values()
    scales = [one.noise_scale for one in found]
    resolved = [one for one in scales if one.resolved]
    return {
        "true_noise_scale": truth,
        "batch_size": setup.batch_size,
        "seeds": seeds,
        "covered": sum(one.low <= truth <= one.high for one in scales),
        "resolved": len(resolved),
        "median_value_over_truth": statistics.median(o.value / truth for o in resolved)
        if resolved
        else None,
        "median_width": statistics.median(o.high / o.low for o in resolved) if resolved else None,
        "median_batches": statistics.median(one.noise_scale.steps for one in found),
        "median_seconds": statistics.median(seconds),
        "unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "true_ratios": ratios,
        "judged": {
            way: [next(w.judgement for w in one.ways if w.name == way) for one in found]
            for way in ratios
        },
    }


def right(judged: str, ratio: float | None) -> bool | None:
    """Whether a judgement is right; None if it is none."""
    good = ratio is not None and 1 / TOLERANCE <= ratio <= TOLERANCE
    return {"right": good, "not contradicted": None}.get(judged, not good)


def text(name: str, row: dict[str, Any]) -> str:
    parts = [f"{name:24} {row['true_noise_scale']:8.1f} {row['batch_size']:5}"]
    value = row["median_value_over_truth"]
    parts.append(
        f"{row['covered']:3} / {row['seeds']:2} {math.nan if value is None else value:6.2f}"
    )
    parts.append(f"{row['median_batches']:5.0f} {row['median_seconds']:6.1f} s")
    for way, ratio in row["true_ratios"].items():
        judged = [right(one, ratio) for one in row["judged"][way]]
        said = f"{judged.count(True)} right, {judged.count(False)} wrong"
        parts.append(f"{way} {'refused' if ratio is None else f'{ratio:.2f}':>7}: {said}")
    return "  ".join(parts) + ("" if row["unchanged"] else "  CHANGED")


def rise() -> None:
    """Print the noise scale in the last fifth of runs over that in the first fifth."""
    of_kind = defaultdict(list)
    for row in saved_rows("prediction/single_runs"):
        if row["kind"] == "measured" and "decay" not in row["workload"]:
            history = row["history"]
            last = history["step"][-1]
            with np.errstate(all="ignore"):
                risen = _part(history, 0.8 * last, last) / _part(history, 0.0, 0.2 * last)
            of_kind[row["workload"], row["batch_size"]].append(risen)
    medians = {
        kind: statistics.median(known)
        for kind, some in of_kind.items()
        if len(known := [x for x in some if x > 0]) > len(some) / 2
    }
    known = [*map(float, medians.values())]
    for (workload, size), x in medians.items():
        print(f"{workload:24} {size:5} {x:6.2f}")
    print(
        f"{len(known)} kinds: {min(known):.2f} to {max(known):.2f}, {statistics.median(known):.2f}"
    )


def _part(history: dict[str, list[float | None]], start: float, end: float) -> np.float64:
    """The noise scale between two steps."""
    steps = np.array(history["step"], dtype=float)
    some = (steps > start) & (steps <= end)
    noise, signal = (
        np.array(history[f"increment_{name}"], dtype=float)[some].sum()
        for name in ("noise_trace", "grad_sq_norm")
    )
    ratio: np.float64 = noise / signal
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--save", action="store_true", help="save each row as it comes")
    parser.add_argument("--rise", action="store_true")
    arguments = parser.parse_args()
    if arguments.rise:
        rise()
        return 0
    rows = saved_rows(NAME) if arguments.save else []
    for name in arguments.models:
        found = next((row for row in rows if row["model"] == name), None)
        if found is None:
            try:
                with warnings.catch_warnings(), quiet():
                    warnings.simplefilter("ignore")
                    found = {"model": name, **tried(ALL[name], arguments.seeds, arguments.batches)}
            except ImportError as missing:
                print(f"{name:24} not run: {missing}")
                continue
            rows.append(found)
            if arguments.save:
                write_results(NAME, rows, quiet=True)
        print(text(name, found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
