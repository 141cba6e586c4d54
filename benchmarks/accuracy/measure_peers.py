# SPDX-License-Identifier: Apache-2.0
"""`measure` beside the public probes of the noise scale, on models whose truth is known.

tensight (30 batches, its default), traintools (`estimate_gns` in train and in eval mode, on one
batch in two parts, its default) and gns-pytorch (a hundredth of the parameters, a quarter of a
batch, its defaults) each answer `--seeds` times. The truth is by the gradients of all examples one
by one; with BatchNorm by 2,000 batches. Seconds are of one answer, memory is what the process grew
by over a plain step on a model of 5 M parameters.

    pip install --no-deps -r benchmarks/peers-requirements.txt
    python benchmarks/accuracy/measure_peers.py --tensight FOLDER [--save]

tensight is on no package index: FOLDER has `gradient_noise.py` of github.com/JonathanDray/tensight.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import multiprocessing
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import write_results
from noisescale import measure
from noisescale.lightning.training import quiet, seed_all

BATCH = 32


def digits() -> TensorDataset:
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x / 16).float(), torch.tensor(y))


def trained(*between: nn.Module) -> nn.Module:
    seed_all(0)
    net = nn.Sequential(nn.Linear(64, 64), *between, nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for x, y in DataLoader(digits(), batch_size=BATCH, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": trained,
    "with BatchNorm": lambda: trained(nn.BatchNorm1d(64)),
    "with dropout": lambda: trained(nn.Dropout(0.3)),
}


def truth_of(net: nn.Module, batches: int = 2000) -> float:
    """By whole batches, in training mode."""
    seed_all(1)
    data = digits()
    total, squares = torch.zeros(()), 0.0
    for _ in range(batches):
        x, y = data[torch.randint(len(data), (BATCH,))]
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        g = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()
        total, squares = total + g, squares + float(g @ g)
    mean_sq = float(total @ total) / batches**2
    variance = (squares / batches - mean_sq) * batches / (batches - 1)
    return BATCH * variance / (mean_sq - variance / batches)


def by_noisescale(net: nn.Module, loader: Any) -> float:
    found = measure(net, loader, loss=lambda n, b: F.cross_entropy(n(b[0]), b[1]), ways=[])
    return found.noise_scale.value


def by_tensight(net: nn.Module, loader: Any) -> float:
    analyzer = importlib.import_module("gradient_noise").GradientNoiseAnalyzer
    return float(analyzer(net, F.cross_entropy, loader).analyze(30)["gradient_noise_scale"])


def by_traintools(net: nn.Module, loader: Any, *, eval_mode: bool = True) -> float:
    probe = importlib.import_module("traintools.gradnoise").estimate_gns
    x, y = next(iter(loader))
    return float(probe(net, F.cross_entropy, x, y, eval_mode=eval_mode).gns)


def by_gns_pytorch(net: nn.Module, loader: Any) -> float:
    probe = importlib.import_module("gns_pytorch.gns").compute_gns
    x, y = next(iter(loader))
    return float(probe(F.cross_entropy(net(x), y, reduction="none"), net))


PROBES: dict[str, Callable[[nn.Module, Any], float]] = {
    "noisescale": by_noisescale,
    "tensight": by_tensight,
    "traintools, eval": by_traintools,
    "traintools, train": lambda net, loader: by_traintools(net, loader, eval_mode=False),
    "gns-pytorch": by_gns_pytorch,
}


def silent(probe: Callable[[nn.Module, Any], float], net: nn.Module, loader: Any) -> float:
    with quiet(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return probe(net, loader)


def grown_by(name: str) -> float:
    """The gradient copies that a process grows by, beyond a plain step."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown_by, (name, sys.path))


def _grown_by(name: str, path: list[str]) -> float:
    sys.path[:] = path
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 2300), nn.Linear(2300, 10))
    loader = DataLoader(digits(), batch_size=BATCH, shuffle=True)
    silent(PROBES[name], trained(), loader)  # what is imported
    for x, y in list(loader)[:2]:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
    bytes_of_gradient = 4 * sum(p.numel() for p in net.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    silent(PROBES[name], net, loader)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return 1024 * grown / bytes_of_gradient


def row_of(model: str, name: str, truth: float, seeds: int) -> dict[str, Any]:
    net, answers, seconds = MODELS[model](), [], []
    for seed in range(seeds):
        seed_all(100 + seed)
        loader = DataLoader(digits(), batch_size=BATCH, shuffle=True)
        began = time.perf_counter()
        answers.append(silent(PROBES[name], net, loader) / truth)
        seconds.append(time.perf_counter() - began)
    finite = sorted(x if math.isfinite(x) else math.inf for x in answers)
    return {
        "model": model,
        "probe": name,
        "truth": truth,
        "least_over_truth": finite[0],
        "median_over_truth": statistics.median(finite),
        "most_over_truth": finite[-1] if math.isfinite(finite[-1]) else None,
        "within_a_factor_of_1.5": sum(1 / 1.5 <= x <= 1.5 for x in finite),
        "seeds": seeds,
        "median_seconds": statistics.median(seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tensight", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    sys.path.append(str(arguments.tensight.resolve()))
    copies = {name: grown_by(name) for name in PROBES}
    rows = []
    for model in MODELS:
        truth = truth_of(MODELS[model]())
        print(f"{model}: {truth:.1f}")
        for name in PROBES:
            row = {**row_of(model, name, truth, arguments.seeds), "gradient_copies": copies[name]}
            rows.append(row)
            most = row["most_over_truth"]
            print(
                f"  {name:18} {row['median_over_truth']:6.2f}"
                f" ({row['least_over_truth']:.2f} to {math.inf if most is None else most:.2f})"
                f"  {row['within_a_factor_of_1.5']:2} / {row['seeds']} within 1.5 x"
                f"  {row['median_seconds']:.2f} s  {copies[name]:.1f} copies",
                flush=True,
            )
            if arguments.save:
                write_results("accuracy/measure_peers", rows, quiet=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
