# SPDX-License-Identifier: Apache-2.0
"""Ask whether another noise scale than B_simple predicts the critical batch size of a sweep.

First, with --planted: can the scales of `lib/geometries.py` be recovered from batches? Gaussian
gradients are drawn whose scale is known, by 8 ranks at B = 64, and estimators are held against it.

Then what `optimizer_sweeps.py` saved. The noise scale b(s) along a run at batch size B gives
B_crit = Σ b/(1 + b/B) / Σ 1/(1 + b/B), for each scale. It is compared with the B_crit of the sweep,
for runs from far below it, near it and far above it: of the batch sizes that were trained, the
nearest ones to a quarter of it, to it and to four times it. Each scale may have one constant for
each kind of optimizer: the geometric mean over all models but the one that is judged.

A scale passes for a kind if it is within a factor of 1.5 in three of four cases, and in each
workload nearer than B_simple is with a constant of its own.

    python benchmarks/prediction/geometries.py [--planted] [--save]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.geometries import NAMES
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.stacked import kind_of, upper_median
from noisescale import fit_tradeoff
from noisescale.bounded import Bounded

Array = NDArray[np.float64]

STARTS = {"far below": 1 / 4, "near": 1.0, "far above": 4.0}
WITHIN = 1.5
ENOUGH = 0.75


class Case(NamedTuple):
    """One run and what its scales say of the sweep's B_crit."""

    workload: str
    batch_size: int
    swept: Bounded
    predicted: dict[str, float]

    @property
    def model(self) -> str:
        return self.workload.split(", ")[0]

    @property
    def kind(self) -> str:
        return kind_of(self.workload.split(", ")[1])

    @property
    def decays(self) -> bool:
        return self.workload.endswith("decay")

    def log_ratio(self, scale: str) -> float:
        """Of the sweep over the prediction."""
        return math.log(self.swept.value / self.predicted[scale])


def cases() -> Iterator[Case]:
    """All measured runs of sweeps whose B_crit has two ends and is between their batch sizes."""
    by_workload: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in saved_rows("prediction/optimizer_sweeps"):
        by_workload[row["workload"]].append(row)
    for workload, rows in by_workload.items():
        steps = {
            row["batch_size"]: upper_median([math.inf if x is None else x for x in row["steps"]])
            for row in rows
            if row["kind"] == "sweep"
        }
        reached = {size: count for size, count in steps.items() if count < math.inf}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                swept = fit_tradeoff(list(reached), list(reached.values()))
            except ValueError:
                continue
        band = swept.critical_batch_size_band()
        if not min(reached) < band.value < max(reached) or band.high == math.inf:
            continue
        for row in rows:
            if row["kind"] == "measured":
                yield Case(workload, row["batch_size"], band, predictions(row))


def predictions(row: dict[str, Any], *, weighted: bool = False) -> dict[str, float]:
    """B_crit by each scale, the geometric mean over seeds; steps weighed by a falling rate."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in row["runs"]:
        rate = 1 - np.array(run["points"]) / run["points"][-1] * (1 - 0.5 / len(run["points"]))
        weights = rate if weighted else np.ones(len(run["points"]))
        for name in run["scales"][0]:
            pairs = [at[name] for at in run["scales"]]
            noise, signal = (
                np.array([math.nan if x is None else x for x in part], dtype=float)
                for part in zip(*pairs, strict=True)
            )
            size = float(row["batch_size"])
            # Where the noise hides the signal the step makes no progress.
            share = np.maximum(signal, 0) / (np.maximum(signal, 0) + noise / size)
            hidden = weights @ (1 - share) * size
            found[name].append(hidden / max(weights @ share, 1e-12))
    return {name: math.exp(statistics.mean(map(math.log, x))) for name, x in found.items()}


def chosen(all_of_workload: list[Case]) -> dict[str, Case]:
    """The runs from far below, near and far above; each once."""
    swept = all_of_workload[0].swept.value
    found: dict[str, Case] = {}
    for start, times in STARTS.items():
        nearest = min(all_of_workload, key=lambda c: abs(math.log(c.batch_size / times / swept)))
        if nearest not in found.values():
            found[start] = nearest
    return found


def judged(of_kind: dict[str, dict[str, Case]], scale: str) -> dict[str, Any]:
    """Errors of a scale, in every workload of a kind, with the constant of the other models."""
    errors: dict[str, dict[str, float]] = {}
    for workload, starts in of_kind.items():
        model = workload.split(", ")[0]
        others = [
            statistics.mean(case.log_ratio(scale) for case in other.values())
            for name, other in of_kind.items()
            if name.split(", ")[0] != model
        ]
        if not others:
            continue
        constant = statistics.mean(others)
        errors[workload] = {
            start: math.exp(constant - case.log_ratio(scale)) for start, case in starts.items()
        }
    logs = [abs(math.log(x)) for of_one in errors.values() for x in of_one.values()]
    return {
        "workloads": len(errors),
        "within": statistics.mean(x <= math.log(WITHIN) for x in logs) if logs else math.nan,
        "median_factor_off": math.exp(statistics.median(logs)) if logs else math.nan,
        "largest_factor_off": math.exp(max(logs)) if logs else math.nan,
        "constant": math.exp(
            statistics.mean(
                statistics.mean(case.log_ratio(scale) for case in starts.values())
                for starts in of_kind.values()
            )
        ),
        "errors": {w: {s: round(x, 3) for s, x in e.items()} for w, e in errors.items()},
    }


def factor_off(errors: dict[str, float]) -> float:
    """The mean factor, either way."""
    return math.exp(statistics.mean(abs(math.log(x)) for x in errors.values()))


def report() -> list[dict[str, Any]]:
    by_workload: dict[str, list[Case]] = defaultdict(list)
    for case in cases():
        by_workload[case.workload].append(case)
    by_kind: dict[str, dict[str, dict[str, Case]]] = defaultdict(dict)
    for workload, of_one in by_workload.items():
        by_kind[of_one[0].kind + (", decay" if of_one[0].decays else "")][workload] = chosen(of_one)
    rows = []
    for kind, of_kind in by_kind.items():
        print(f"\n{kind}")
        for workload, starts in of_kind.items():
            swept = next(iter(starts.values())).swept
            print(f"  {workload}: swept {swept.value:.0f} ({swept.low:.0f} to {swept.high:.0f})")
            for start, case in starts.items():
                ratios = {n: case.predicted[n] / swept.value for n in NAMES if n in case.predicted}
                told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
                print(f"    {start:9} B = {case.batch_size:4}: {told}")
                rows.append(
                    {
                        "kind": kind,
                        "workload": workload,
                        "start": start,
                        "batch_size": case.batch_size,
                        "swept": round(swept.value, 1),
                        "over_swept": {name: round(x, 3) for name, x in ratios.items()},
                    }
                )
        simple = judged(of_kind, "simple")
        for scale in NAMES:
            if not all(
                scale in case.predicted for starts in of_kind.values() for case in starts.values()
            ):
                continue
            found = judged(of_kind, scale)
            nearer = [
                workload
                for workload, errors in found["errors"].items()
                if factor_off(errors) < factor_off(simple["errors"][workload])
            ]
            passed = (
                scale != "simple"
                and found["within"] >= ENOUGH
                and len(nearer) == found["workloads"] >= 3
            )
            print(
                f"  {scale:14} x {found['constant']:5.2f}: within {WITHIN} in"
                f" {found['within']:.0%}, off by {found['median_factor_off']:.2f} (median),"
                f" {found['largest_factor_off']:.1f} (most); nearer than simple in {len(nearer)} of"
                f" {found['workloads']}{'  PASSED' if passed else ''}"
            )
            rows.append({"kind": kind, "scale": scale, **found, "nearer": nearer, "passed": passed})
    return rows


def unbiased_sd(values: Array, n: int) -> Array:
    """Standard deviations of Gaussian samples of n, without their bias (c4)."""
    c4 = math.sqrt(2 / (n - 1)) * math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2))
    deviations: Array = values.std(0, ddof=1) / c4
    return deviations


def nuclear(matrix: Array) -> float:
    return float(np.linalg.svd(matrix, compute_uv=False).sum())


def polar(matrix: Array) -> Array:
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    product: Array = u @ v
    return product


def root_trace(covariance: Array) -> float:
    return float(np.sqrt(np.maximum(np.linalg.eigvalsh(covariance), 0)).sum())


SIZE, RANKS, BATCHES = 64, 8, 80


def planted_sign(ratio: float, rng: np.random.Generator) -> dict[str, float]:
    """Estimates over the truth: (Σ σ)²/|G|₁² is `ratio` batches; 4,096 elements, heavy tails."""
    mean = rng.laplace(size=4096)
    deviation = np.exp(rng.normal(size=4096))
    deviation *= math.sqrt(ratio * SIZE) * np.abs(mean).sum() / deviation.sum()
    momentum, batches, plug_in, noise, progress = np.zeros(4096), [], [], [], []
    for step in range(BATCHES):
        ranks = mean + deviation * rng.normal(size=(RANKS, 4096)) / math.sqrt(SIZE / RANKS)
        whole = ranks.mean(0)
        of_ranks = math.sqrt(SIZE / RANKS) * ranks.std(0, ddof=1)
        if step >= BATCHES // 2:
            plug_in.append((of_ranks.sum() / np.abs(whole).sum()) ** 2)
            noise.append(math.sqrt(SIZE / RANKS) * unbiased_sd(ranks, RANKS).sum())
            progress.append((np.sign(momentum) * whole).sum())
        momentum = 0.9 * momentum + 0.1 * whole
        batches.append(whole)
    drawn = np.array(batches)
    deviations = math.sqrt(SIZE) * unbiased_sd(drawn, BATCHES).sum()
    odd, even = drawn[::2].mean(0), drawn[1::2].mean(0)
    half = (np.abs(odd).sum() + np.abs(even).sum()) / 2
    frozen = 2 * np.abs(drawn.mean(0)).sum() - half
    truth = ratio * SIZE
    return {
        "published plug-in": statistics.mean(plug_in) / truth,
        "along momentum": (statistics.mean(noise) / statistics.mean(progress)) ** 2 / truth,
        "frozen, extrapolated": (deviations / frozen) ** 2 / truth,
        "frozen, halves": (deviations / (np.sign(odd) * even).sum()) ** 2 / truth,
    }


def planted_spectral(ratio: float, rng: np.random.Generator, rank: int) -> dict[str, float]:
    """The same of a matrix of 48 x 96, of a rank."""
    mean = rng.normal(size=(48, rank)) @ rng.normal(size=(rank, 96))
    turn, _ = np.linalg.qr(rng.normal(size=(48, 48)))
    factor = turn @ np.diag(np.exp(rng.normal(0, 0.7, 48)))
    noise_norm = root_trace(96 * factor @ factor.T)
    factor *= math.sqrt(ratio * SIZE) * nuclear(mean) / noise_norm
    momentum, batches, plug_in, noise, progress = np.zeros((48, 96)), [], [], [], []
    for step in range(BATCHES):
        ranks = mean + factor @ rng.normal(size=(RANKS, 48, 96)) / math.sqrt(SIZE / RANKS)
        whole = ranks.mean(0)
        apart = ranks - whole
        covariance = np.einsum("rik,rjk->ij", apart, apart) * SIZE / RANKS / (RANKS - 1)
        if step >= BATCHES // 2:
            plug_in.append((root_trace(covariance) / nuclear(whole)) ** 2)
            noise.append(root_trace(covariance))
            progress.append((polar(momentum) * whole).sum())
        momentum = 0.9 * momentum + 0.1 * whole
        batches.append(whole)
    drawn = np.array(batches)
    apart = drawn - drawn.mean(0)
    deviations = root_trace(SIZE * np.einsum("nik,njk->ij", apart, apart) / (BATCHES - 1))
    odd, even = drawn[::2].mean(0), drawn[1::2].mean(0)
    frozen = 2 * nuclear(drawn.mean(0)) - (nuclear(odd) + nuclear(even)) / 2
    truth = ratio * SIZE
    return {
        "published plug-in": statistics.mean(plug_in) / truth,
        "along momentum": (statistics.mean(noise) / statistics.mean(progress)) ** 2 / truth,
        "frozen, extrapolated": (deviations / frozen) ** 2 / truth,
        "frozen, halves": (deviations / (polar(odd) * even).sum()) ** 2 / truth,
    }


def planted() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = []
    for what, draw in (
        ("sign", planted_sign),
        ("spectral, rank 48", lambda ratio, rng: planted_spectral(ratio, rng, 48)),
        ("spectral, rank 4", lambda ratio, rng: planted_spectral(ratio, rng, 4)),
    ):
        for ratio in (0.2, 1.0, 3.0, 10.0):
            found = draw(ratio, rng)
            told = ", ".join(f"{name} {x:.2f}" for name, x in found.items())
            print(f"{what:18} {ratio:4} B: {told}")
            rows.append({"planted": what, "batches": ratio, "over_truth": found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--planted", action="store_true", help="the planted scales alone")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    rows = planted()
    if not arguments.planted:
        rows += report()
    if arguments.save:
        write_results("prediction/geometries", rows)


if __name__ == "__main__":
    main()
