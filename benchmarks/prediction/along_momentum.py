# SPDX-License-Identifier: Apache-2.0
"""Ask whether momentum can stand for the mean gradient in a noise scale of another norm.

The signal of a sign or spectral noise scale is a norm of the mean gradient, |G|₁ or |G|_*, which a
batch cannot give: its noise adds to the norm. The inner product of the next batch's gradient and
the direction of steepest descent along the momentum, sign(m) or U V' of m, has no such error, and
is at most the norm. It is compared with the norm from thousands of examples, at six steps of the
best runs of `optimizer_sweeps.py`, averaged over the 21 steps around each.

    python benchmarks/prediction/along_momentum.py [--save]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.geometries import Gradients
from benchmarks.lib.problems import PROBLEMS
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.stacked import Parameters, Stack, Training, scale_of, use_plain_attention
from benchmarks.prediction.optimizer_sweeps import WORKLOADS

RUNS = (("digits, Muon", 32), ("characters, Muon", 32), ("characters, Muon", 128))
RUNS += (("mnist, Signum", 64), ("characters, Signum", 64), ("characters, AdamW", 64))
POINTS = 6
AROUND = 10
"""Steps on each side of a point that are averaged."""


def polar(matrix: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v


def along(workload_name: str, batch_size: int) -> Iterator[dict[str, Any]]:
    workload = WORKLOADS[workload_name]
    (row,) = [
        row
        for row in saved_rows("prediction/optimizer_sweeps")
        if (row["kind"], row["workload"], row["batch_size"])
        == ("measured", workload_name, batch_size)
    ]
    problem, smallest = PROBLEMS[workload.problem], workload.smallest
    training = Training(row["lr"], row["runs"][0]["seed"])
    stack = Stack(problem, workload.optimizer, batch_size, [training], smallest=smallest)
    means = stack.stepper.means  # type: ignore[attr-defined]  # all of these have momentum
    inner = problem.inner(stack.stepper.parameters)
    signs: list[float] = []
    spectra: list[float] = []

    def note(gradients: Parameters) -> None:
        signs.append(sum(float((means[n][0].sign() * g[0]).sum()) for n, g in gradients.items()))
        spectra.append(
            sum(
                scale_of(g.shape[1:]) * float((polar(means[n][0]) * g[0].double()).sum())
                for n, g in gradients.items()
                if n in inner
            )
        )

    steps = round(row["steps"][0])
    points = {round(steps * (k + 0.5) / POINTS): k for k in range(POINTS)}
    draw = torch.Generator().manual_seed(5)
    chosen = torch.randperm(len(stack.train[0]), generator=draw)[:2048]
    batch = tuple(x[chosen] for x in stack.train)
    norms = {}
    for at in range(steps):
        if at in points:
            here = {name: p[0] for name, p in stack.stepper.parameters.items()}
            found = Gradients(problem, here, batch, 256)
            norms[at] = found.sign(set(here))[1], found.spectral(inner)[1]
        note(gradients := stack.gradients())
        stack.step(gradients)
    for at, (of_signs, of_spectra) in norms.items():
        some = slice(max(1, at - AROUND), at + AROUND + 1)
        yield {
            "workload": workload_name,
            "batch_size": batch_size,
            "step": at,
            "sign": statistics.mean(signs[some]) / of_signs,
            "spectral": statistics.mean(spectra[some]) / of_spectra,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    use_plain_attention()
    rows = []
    for workload, batch_size in RUNS:
        for row in along(workload, batch_size):
            rows.append(row)
            print(
                f"{workload}, B = {batch_size}, step {row['step']}: momentum finds"
                f" {row['sign']:.2f} of |G|₁, {row['spectral']:.2f} of |G|_*",
                flush=True,
            )
    if arguments.save:
        write_results("prediction/along_momentum", rows)


if __name__ == "__main__":
    main()
