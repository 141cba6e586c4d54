# SPDX-License-Identifier: Apache-2.0
"""Train public models with a second backward pass and without: everything must stay the same.

Each model of `_neutral_models.py` and `_neutral_transformers.py` trains a few steps by SGD, plain
and with a `NoiseScaleMeter` that measures every step by halves of its batch. Parameters, buffers,
losses and the random numbers drawn afterwards must be the same bit for bit. Where the meter refuses
a model for another reason than a second pass, such as a BatchNorm, a third training makes a second
pass alone in each step, guarded as a measured step guards its own. So the packages that
`second_pass` knows are shown to bear it. Where the meter refuses what it met in a graph, a training
with `backward_twice=True` shows whether it is right to.

    python benchmarks/accuracy/neutral.py [--libraries timm] [--models ViT] [--save]

Rows are saved as they come with `--save`, and those that passed are not done again. Models of
libraries that are not installed are left out. Exits 1 if a training was changed, if steps were lost
to an error, or if a model was refused for a second pass that it bears.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.accuracy._neutral_models import cases
from benchmarks.accuracy._neutral_training import Case, NotThere, Training
from benchmarks.lib.results import saved_rows, write_results
from noisescale import NoiseScaleMeter
from noisescale.collectors.halves.bearing import Bearing
from noisescale.collectors.halves.graph import walk
from noisescale.collectors.halves.row_pass import row_pass
from noisescale.collectors.halves.second_pass import second_pass

NAME = "accuracy/neutral"
STEPS = 5
LEARNING_RATE = 0.01
READINGS = 5
"""How often a graph is read, for the median of the times."""
OF_A_SECOND_PASS = (
    "`model` must consist of what is known",
    "`model` must allow a backward pass before",
)
"""How the refusals begin that are about a second pass itself."""

CHANGED = 3
"""With what code a process ends whose training was changed."""

How = Literal["plain", "measured", "alone", "forced"]


class Trained(NamedTuple):
    """A training that has ended."""

    values: dict[str, Tensor]
    """Parameters, buffers, losses, and random numbers drawn afterwards."""
    meter: NoiseScaleMeter | None
    told: list[str]
    """What the package warned of."""
    trains: bool
    """Whether losses are finite and a parameter has changed."""


def begin(case: Case) -> Training:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    return case.make()


def train(case: Case, steps: int, how: How) -> Trained:
    with (
        warnings.catch_warnings(record=True) as caught,
        patch("torch.seed", seed_from_generator),  # Reformer draws its seeds by it
    ):
        warnings.simplefilter("always")
        trained = train_watched(case, steps, how)
    told = [str(one.message) for one in caught if "noisescale" in one.filename]
    return trained._replace(told=list(dict.fromkeys(told)))


def train_watched(case: Case, steps: int, how: How) -> Trained:
    training = begin(case)
    model = training.model
    before = [p.detach().clone() for p in model.parameters()]
    meter = None
    if how in ("measured", "forced"):
        meter = NoiseScaleMeter(
            model, small_batch="half", every_n_steps=1, backward_twice=how == "forced"
        )
    bearing = Bearing(model, backward_twice=False) if how == "alone" else None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LEARNING_RATE)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = training.loss(training.draw(torch.Generator().manual_seed(step)))
        if meter is not None:
            meter.before_backward(loss, training.rows)
        elif bearing is not None:
            pass_alone(bearing, model, loss)
        loss.backward()
        if meter is not None:
            meter.step()
        optimizer.step()
        losses.append(loss.detach().reshape(1))
    if meter is not None:
        meter.close()
    values = {name: one.detach() for name, one in model.named_parameters()}
    values |= {f"buffer {name}": one for name, one in model.named_buffers()}
    drawn = [*torch.rand(4).tolist(), *np.random.rand(4).tolist(), random.random()]
    random_numbers = torch.tensor(drawn, dtype=torch.float64)
    values |= {"losses": torch.cat(losses), "random numbers": random_numbers}
    moved = any(not same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True))
    finite = bool(values["losses"].isfinite().all())
    return Trained(values, meter, [], moved and finite)


def seed_from_generator() -> int:
    """Seed torch as `torch.seed` does, but with a number that is the same in each run."""
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    return seed


def pass_alone(bearing: Bearing, model: nn.Module, loss: Tensor) -> None:
    """Make a second pass as a measured step does, but for the signs of the rows."""
    bearing.check(loss.grad_fn)
    with bearing.leave_no_trace():
        ones, parameters = torch.ones_like(loss), list(model.parameters())
        row_pass(get_gradient_edge(loss), ones, [], torch.ones(1), parameters, lambda *_: None)
    bearing.forget()


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    ours, theirs = (
        one.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for one in (a, b)
    )
    return torch.equal(ours, theirs)


def differing(one: Trained, other: Trained) -> list[str]:
    """Name what differs."""
    if one.values.keys() != other.values.keys():
        return ["the names of parameters and buffers"]
    return [name for name, x in one.values.items() if not same_bits(x, other.values[name])]


def graph_of(case: Case) -> dict[str, Any]:
    """Read the graph of a model's first loss."""
    training = begin(case)
    loss = training.loss(training.draw(torch.Generator().manual_seed(0)))
    seconds = []
    for _ in range(READINGS):
        started = time.perf_counter()
        second = second_pass(loss.grad_fn)
        seconds.append(time.perf_counter() - started)
    start: list[Any] = [loss.grad_fn]
    nodes = list(walk(start, lambda node: [n for n, _ in node.next_functions if n is not None]))
    functions = {type(n)._forward_cls for n in nodes if issubclass(type(n), BackwardCFunction)}
    return {
        "unknown": list(second.unknown),
        "impossible": list(second.impossible),
        "functions": sorted(f"{of.__module__}.{of.__qualname__}" for of in functions),
        "checkpointed_parts": len(second.frames),
        "nodes": len(nodes),
        "second_pass_ms": round(1000 * statistics.median(seconds), 3),
    }


def row_of(case: Case, steps: int) -> dict[str, Any]:
    started = time.perf_counter()
    plain, measured = train(case, steps, "plain"), train(case, steps, "measured")
    assert measured.meter is not None
    refusal = measured.meter.not_measured
    of_a_second_pass = refusal is not None and refusal.startswith(OF_A_SECOND_PASS)
    count = measured.meter.measured_steps
    differ, passes = differing(plain, measured), "measured" if count else "none"
    if not count and not of_a_second_pass:
        passes = "alone"
        differ += differing(plain, train(case, steps, "alone"))
    row: dict[str, Any] = {
        "library": case.library,
        "model": case.model,
        "variant": case.variant,
        "measured_steps": count,
        "refusal": refusal,
        "refused_for_a_second_pass": of_a_second_pass,
        "bears": case.bears,
        "passes": passes,
        "same": not differ,
        "told": [text for text in measured.told if refusal is None or refusal not in text],
        **graph_of(case),
    }
    if row["unknown"] and of_a_second_pass:
        row["if_forced"] = if_forced(case, steps, plain)
    if differ:
        row["differ"] = differ[:8]
        row["repeatable"] = not differing(plain, train(case, steps, "plain"))
    lost = refusal is None and count < steps
    wrong = of_a_second_pass and case.bears
    row["passed"] = not differ and plain.trains and not lost and not wrong
    return row | {"trains": plain.trains, "seconds": round(time.perf_counter() - started, 1)}


def if_forced(case: Case, steps: int, plain: Trained) -> str:
    """Say what the passes of a measured step do to a training for which they are refused.

    In a process of its own: passes over memory that a Function has freed may end it.
    """

    def compare() -> None:
        sys.exit(CHANGED if differing(plain, train(case, steps, "forced")) else 0)

    process = get_context("fork").Process(target=compare)
    process.start()
    process.join()
    code = process.exitcode or 0
    endings = {0: "same", CHANGED: "changed", 1: "ended by an error"}
    return endings.get(code, f"ended by signal {-code}")


def text(row: dict[str, Any]) -> str:
    name = ", ".join(word for word in (row["model"], row["variant"]) if word)
    kept = "same" if row["same"] else f"CHANGED {', '.join(row['differ'])}"
    forced = f"if forced: {row['if_forced']}; " if "if_forced" in row else ""
    said = forced + "; ".join([row["refusal"] or "", *row["told"]]).strip("; ")
    return (
        f"{row['library']:17} {name:45} {row['measured_steps']:2} {row['passes']:8} {kept}"
        f" {row['nodes']:6} {row['second_pass_ms']:7.2f} ms"
        f"{'' if row['passed'] else '  FAILED'}  {said[:150]}"
    )


def print_summary(rows: list[dict[str, Any]]) -> None:
    print("\nlibrary            rows  measured  refused  for a second pass  same  failed")
    for library in [*dict.fromkeys(row["library"] for row in rows), "all"]:
        of = [row for row in rows if library in (row["library"], "all")]
        print(
            f"{library:17} {len(of):5} {sum(row['measured_steps'] > 0 for row in of):9}"
            f" {sum(row['refusal'] is not None for row in of):8}"
            f" {sum(row['refused_for_a_second_pass'] for row in of):18}"
            f" {sum(row['same'] for row in of):5} {sum(not row['passed'] for row in of):7}"
        )


def missing_in(library: str) -> str:
    """Return why a library cannot be imported; "" if it can."""
    try:
        import_module(library)
    except ImportError as missing:
        return str(missing)
    return ""


def installed(libraries: set[str]) -> list[str]:
    """Return the libraries whose versions can be read."""
    found = []
    for library in sorted(libraries):
        try:
            version(library)
        except PackageNotFoundError:
            continue
        found.append(library)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", nargs="+", help="default: all that are installed")
    parser.add_argument("--models", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save", action="store_true", help="save each row as it comes")
    parser.add_argument("--raise-errors", action="store_true", help="stop at a model's error")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [row for row in saved_rows(NAME) if row["passed"]] if options.save else []
    done = {(row["library"], row["model"], row["variant"]) for row in rows}
    missing: dict[str, str] = {}
    failed = False
    print("library           model            measured steps, passes, same, nodes, second_pass")
    for case in cases():
        if options.libraries and case.library not in options.libraries:
            continue
        if (options.models and case.model not in options.models) or case[:3] in done:
            continue
        if case.library not in missing:
            missing[case.library] = missing_in(case.library)
            if missing[case.library]:
                print(f"{case.library} is left out: {missing[case.library]}", flush=True)
        if missing[case.library]:
            continue
        try:
            row = row_of(case, options.steps)
        except NotThere:
            continue
        except Exception as error:  # of another version of a library, or a training that ended
            if options.raise_errors:
                raise
            failed = True
            said = str(error).partition("\n")[0]
            print(f"{case.library}: {case.model} {case.variant} did not run: {said}", flush=True)
            continue
        rows.append(row)
        print(text(row), flush=True)
        if options.save:
            libraries = installed({row["library"] for row in rows} - {"pytorch_lightning", "torch"})
            write_results(NAME, rows, packages=libraries, quiet=True, steps=options.steps)
    print_summary(rows)
    return int(failed or not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
