# SPDX-License-Identifier: Apache-2.0
"""Compare measured noise scales of a real model with the truth from per-example gradients.

A perceptron on scikit-learn's digits, trained a little and then frozen, so that there is one
truth: S = tr(Σ) and G from the gradients of all examples, each computed alone in float64. Batches
are drawn with replacement (which makes that truth the right one) and `NoiseScaleMeter` measures,
in every way of training: by DDP over gloo, sharded by FSDP2, in one process that accumulates, and
by halves of each batch. Brute force is a plain copy that takes each small batch in turn. Models
that others wrote are measured in halves.py.

    python benchmarks/accuracy/real_model.py [--seeds 20] [--steps 400]

Exits 1 if any step's two squared norms differ from brute force by more than 1e-6, or if the
95 % interval holds the truth for fewer than 17 of 20 seeds. With 95 % coverage that happens to
1.6 % of runs of 20 seeds.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.results import write_results
from noisescale import NoiseScaleMeter
from noisescale.collectors.halves.row_pass import signs
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import MeasuredStep

LARGEST_NORM_ERROR = 1e-6
FEWEST_COVERED = 17 / 20


@dataclass(frozen=True)
class Way:
    """How one step is made up, and what is compared with its gradient."""

    sizes: tuple[tuple[int, ...], ...]
    """Examples of every micro-batch of every rank."""
    small_batch: Literal["rank", "micro_batch", "half"] = "rank"
    sharded: bool = False

    @property
    def text(self) -> str:
        return " + ".join(",".join(map(str, of_rank)) for of_rank in self.sizes)


WAYS = {
    "2 ranks": Way(((32,), (32,))),
    # The estimate must stay exact where parts are unequal.
    "3 unequal ranks": Way(((16,), (32,), (48,))),
    "accumulated": Way(((8, 24, 16, 16),), "micro_batch"),
    "accumulated on ranks": Way(((16, 16), (8, 24)), "micro_batch"),
    "halves": Way(((64,),), "half"),
    "shards of 2 ranks": Way(((32,), (32,)), sharded=True),
}


class RecordingMeter(NoiseScaleMeter):
    """A meter that keeps what each step was reduced to."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.rows: list[StepNorms] = []

    def _take(self, step: MeasuredStep) -> None:
        self.rows.append(step.norms)
        super()._take(step)


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).float(), torch.tensor(y)


def trained_model(steps: int = 60) -> nn.Module:
    torch.manual_seed(0)
    x, y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(steps):
        drawn = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[drawn]), y[drawn]).backward()
        optimizer.step()
    return model


def example_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One row for each example, float64, shape (examples, parameters)."""
    parameters = {name: p.detach().double() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (x,)), y)

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x.double(), y)
    return torch.cat([g.flatten(1) for g in gradients.values()], dim=1)


def wrapped(model: nn.Module, way: Way) -> nn.Module:
    if way.sharded:
        mesh = init_device_mesh("cpu", (len(way.sizes),))
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if len(way.sizes) > 1 else model


def measure(name: str, seeds: int, steps: int) -> dict[str, Any]:
    """On every rank: all seeds, one meter each, against brute force and the truth."""
    way, rank = WAYS[name], dist.get_rank()
    x, y = digits()
    model = trained_model()
    gradients = example_gradients(model, x, y)
    mean = gradients.mean(dim=0)
    noise_trace = (gradients - mean).square().sum(dim=1).mean().item()
    truth = noise_trace / mean.square().sum().item()
    plain = copy.deepcopy(model)
    model = wrapped(model, way)
    norm_error, answers = 0.0, []
    for seed in range(seeds):
        meter = RecordingMeter(
            model,
            window=steps,
            every_n_steps=1,
            small_batch="auto" if way.small_batch in ("rank", "half") else way.small_batch,
        )
        expected = []
        generator = torch.Generator().manual_seed(seed)
        for step in range(steps):
            drawn = [
                [torch.randint(len(x), (size,), generator=generator) for size in of_rank]
                for of_rank in way.sizes
            ]
            small = drawn
            if way.small_batch == "half":
                small = [[h for i in of_rank for h in split(i, step)] for of_rank in drawn]
            expected.append(
                brute_force(plain, [[(x[i], y[i]) for i in of_rank] for of_rank in small], way)
            )
            model.zero_grad()
            for micro, mine in enumerate(drawn[rank]):
                last = micro == len(drawn[rank]) - 1
                accumulates = isinstance(model, DistributedDataParallel) and not last
                with model.no_sync() if accumulates else nullcontext():
                    loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
                    meter.backward(loss / len(drawn[rank]), local_batch_size=len(mine))
            meter.step()
        answers.append(meter.noise_scale)
        meter.close()
        for got, (small, big) in zip(meter.rows, expected, strict=True):
            norm_error = max(
                norm_error, abs(got.small_sq_norm / small - 1), abs(got.big_sq_norm / big - 1)
            )
    covered = sum(a.low <= truth <= a.high for a in answers)
    values = torch.tensor([a.value for a in answers])
    widths = torch.tensor([(a.high - a.low) / a.value for a in answers])
    return {
        "way": name,
        "small_batch": way.small_batch,
        "rank_batches": way.sizes,
        "steps": steps,
        "seeds": seeds,
        "true_noise_scale": truth,
        "median_value_over_truth": values.median().item() / truth,
        "median_relative_width": widths.median().item(),
        "covered": covered,
        "largest_norm_error": norm_error,
        "passed": norm_error <= LARGEST_NORM_ERROR and covered >= math.ceil(FEWEST_COVERED * seeds),
    }


def split(batch: Tensor, step: int) -> list[Tensor]:
    """The halves that the meter takes of a batch in a step: the draw is its own, no more."""
    sign = signs(len(batch), step + 1).to(batch.device)
    return [batch[sign > 0], batch[sign < 0]]


def brute_force(
    plain: nn.Module, batches: list[list[tuple[Tensor, Tensor]]], way: Way
) -> tuple[float, float]:
    """Mean squared norm of the small batches' gradients and that of the step's, by themselves."""
    of_ranks = []
    for of_rank in batches:
        micros = []
        for x, y in of_rank:
            plain.zero_grad()
            nn.functional.cross_entropy(plain(x), y).backward()
            micros.append(torch.cat([p.grad.flatten().double() for p in plain.parameters()]))
        of_ranks.append(torch.stack(micros))
    means = torch.stack([micros.mean(dim=0) for micros in of_ranks])
    parts = means if way.small_batch == "rank" else torch.cat(of_ranks)
    return parts.square().sum(dim=1).mean().item(), means.mean(dim=0).square().sum().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/accuracy/real_model.json"
    )
    arguments = parser.parse_args()
    print(
        "way                   batches           truth  median/truth  width  covered"
        "  largest error of a norm"
    )
    rows = []
    for name in arguments.ways:
        row = on_ranks(len(WAYS[name].sizes), measure, name, arguments.seeds, arguments.steps)[0]
        rows.append(row)
        print(
            f"{name:21} {WAYS[name].text:14} {row['true_noise_scale']:8.1f}"
            f" {row['median_value_over_truth']:13.2f} {row['median_relative_width']:6.2f}"
            f" {row['covered']:4} / {row['seeds']} {row['largest_norm_error']:14.1e}"
            f"{'' if row['passed'] else '   FAILED'}",
            flush=True,
        )
    if arguments.save:
        write_results("accuracy/real_model", rows)
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
