# SPDX-License-Identifier: Apache-2.0
"""DecentLaM against averaging gradients: what a step costs, and the bias that it does not have.

    python benchmarks/methods/decentlam.py [--only cost|bias] [--report] [--smoke]

Cost: on gloo ranks over loopback, in turn, with a second plain copy; medians of ratios within one
round, of the slowest rank, also of the CPU time of all ranks, and the bytes that the loopback
interface carried. "exchange" is what replaces the all-reduce: weights go to neighbours, theirs come
back and are mixed. "messages" are those of an exchange, with nothing added up. "step" is all of
`DecentLaM.step`, against an all-reduce, a division and a step of SGD with momentum.

Bias: eight ranks with a regression each, full batches. Squared distance to the common optimum at
rest, over that of decentralized SGD without momentum. Theory: 1/(1 - momentum)² for decentralized
momentum SGD (DmSGD), computed here in numpy, and 1 for DecentLaM, trained on gloo ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.ranks import on_ranks
from benchmarks.lib.regressions import dmsgd, regressions, relative_distance
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.methods._interleaved import Timed, compared, in_turn
from noisescale import DecentLaM
from noisescale.methods.across_ranks.peers import Peers
from noisescale.methods.decentlam.mixing import Rooms, add_differences_, exchange, neighbours_of
from noisescale.methods.decentlam.topology import topology_of

Row = dict[str, Any]
PARTS = ("cost", "bias")
ROUNDS = {4 * 2**20: 15, 64 * 2**20: 3}
OF = ("messages", "exchange", "step")
TOPOLOGIES = ("ring", "one-peer", "exponential")
MOMENTA = (0.5, 0.8, 0.9)
LR, STEPS, WIDTH = 0.002, 20_000, 30


def cost(ranks: int, elements: int, topology: str, of: str, rounds: int) -> Row:
    """Medians over rounds, of the slowest rank in each."""

    def one_rank() -> dict[str, Timed]:
        torch.manual_seed(0)
        sgd: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
        weights = [torch.randn(elements // 16).requires_grad_() for _ in range(16)]
        optimizer: Any = torch.optim.SGD(weights, **sgd)
        if of == "step":
            others = [p.detach().clone().requires_grad_() for p in weights]
            mixing: Any = DecentLaM(torch.optim.SGD(others, **sgd), topology)
        peers, rooms = Peers(), Rooms()
        neighbours = neighbours_of(topology_of(topology, ranks).matrix(0), peers.rank)
        gradient = torch.randn(elements)
        into = torch.zeros(elements)
        parts = [part.view_as(p) for part, p in zip(gradient.chunk(16), weights, strict=True)]
        for p, q, part in zip(weights, others if of == "step" else weights, parts, strict=True):
            p.grad = q.grad = part

        def averaged() -> None:
            dist.all_reduce(gradient)
            if of == "step":
                gradient.div_(ranks)
                optimizer.step()

        def decentralized() -> None:
            if of == "step":
                mixing.step()
            elif of == "messages":
                deque(exchange(gradient, neighbours, peers, rooms), maxlen=0)
            else:
                add_differences_(into, gradient, neighbours, peers, rooms)

        return in_turn(averaged, decentralized, rounds, gradient.normal_)

    about = {"kind": "cost", "of": of, "topology": topology, "ranks": ranks, "elements": elements}
    found = compared(on_ranks(ranks, one_rank), "averaged", "decentlam")
    return about | found | {"rounds": rounds}


def bias(ranks: int, steps: int) -> list[Row]:
    """The squared distance to the optimum at rest, over that of decentralized SGD."""
    gradients, optimum, squares, products = regressions(ranks)
    zeros = np.zeros((ranks, WIDTH))
    ring = topology_of("ring", ranks).matrix(0)
    unit = relative_distance(dmsgd(gradients, zeros, ring, LR, 0.0, steps), optimum)

    def one_rank(momentum: float) -> Any:
        a, b = (torch.tensor(each[dist.get_rank()]) for each in (squares, products))
        x = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
        optimizer = DecentLaM(torch.optim.SGD([x], lr=LR, momentum=momentum), "ring")
        for _ in range(round(0.4 * steps * (1 - momentum)) + steps // 50):
            x.grad = a @ x.detach() - b
            optimizer.step()
        return x.detach().numpy()

    rows = []
    for momentum in MOMENTA:
        rival = dmsgd(gradients, zeros, ring, LR, momentum, steps)
        own = np.stack(on_ranks(ranks, one_rank, momentum))
        rows.append(
            {
                "kind": "bias",
                "ranks": ranks,
                "momentum": momentum,
                "theory_of_dmsgd": round(1 / (1 - momentum) ** 2, 1),
                "dmsgd": round(relative_distance(rival, optimum) / unit, 4),
                "decentlam": round(relative_distance(own, optimum) / unit, 4),
            }
        )
    return rows


def report(rows: list[Row], console: Console) -> None:
    if some := [row for row in rows if row["kind"] == "cost"]:
        names = ("of", "topology", "ranks", "elements", "averaged", "DecentLaM", "times")
        table = Table(*names, "2nd copy", "CPU time", "bytes", title="Cost of a step")
        for row in some:
            table.add_row(
                row["of"],
                row["topology"],
                f"{row['ranks']}",
                f"{row['elements'] / 2**20:g} M",
                f"{1000 * row['seconds_averaged']:.0f} ms",
                f"{1000 * row['seconds_decentlam']:.0f} ms",
                f"{row['ratio']:.2f}",
                f"{row['ratio_of_second_copy']:.2f}",
                f"{row['cpu_ratio']:.2f}",
                f"{row['bytes_ratio']:.2f}",
            )
        console.print(table)
    if some := [row for row in rows if row["kind"] == "bias"]:
        table = Table("momentum", "theory", "DmSGD", "DecentLaM", title="Bias, squared")
        for row in some:
            cells = (row["momentum"], row["theory_of_dmsgd"], row["dmsgd"], row["decentlam"])
            table.add_row(*(f"{cell:g}" for cell in cells))
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--report", action="store_true", help="print what is saved, run none")
    parser.add_argument("--smoke", action="store_true", help="a little of each, unsaved")
    given = parser.parse_args()
    rows: list[Row] = [] if given.smoke else saved_rows("methods/decentlam")
    parts = [] if given.report else [given.only] if given.only else list(PARTS)

    def save() -> None:
        if not given.smoke:
            write_results("methods/decentlam", rows, lr=LR, steps=STEPS, quiet=True)

    if "cost" in parts:
        rows[:] = [row for row in rows if row["kind"] != "cost"]
        for elements in (2**16,) if given.smoke else ROUNDS:
            for topology in TOPOLOGIES[:1] if given.smoke else TOPOLOGIES:
                for of in OF if topology == "ring" else OF[1:]:
                    ranks, rounds = (2, 1) if given.smoke else (4, ROUNDS[elements])
                    rows.append(cost(ranks, elements, topology, of, rounds))
                    print(rows[-1], flush=True)
                    save()
    if "bias" in parts:
        rows[:] = [row for row in rows if row["kind"] != "bias"]
        rows += bias(*((2, 200) if given.smoke else (8, STEPS)))
        save()
    report(rows, Console(highlight=False, width=120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
