# SPDX-License-Identifier: Apache-2.0
"""Ask how often the verdict of one default run is right, and calibrate its likely range.

`optimizer_sweeps.py` found the best learning rate and the steps to the goal at many batch sizes,
and so the critical batch size c of a training. Here runs at these learning rates are trained again
by Lightning, with a default `NoiseScaleMonitor` and seeds that the sweep had not. By c a batch size
B is to be `larger` (c > 3 B), `smaller` (c < B/3) or kept. Few of those sweeps have long runs, and
few batch sizes that are too large: some are swept here to lower losses.

What a second run adds needs no training: the sweeps have the steps of each seed at each batch size.
Two of a sweep's batch sizes are taken as the two runs, and its other ones give c.

    python benchmarks/prediction/verdicts.py [--only "digits, SGD"] [--minutes M] [--report]

Runs that are saved are not trained again, but with `--anew`, as after a change of what is measured.
Their records are saved, so that `--report` judges the verdicts anew.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.problems import PROBLEMS
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.stacked import Stepper, stepper_of, upper_median, use_plain_attention
from benchmarks.prediction.geometries import predictions
from benchmarks.prediction.optimizer_sweeps import WORKLOADS, Workload, sweep
from noisescale import History, NoiseScaleMonitor, fit_tradeoff, predict
from noisescale.bounded import Bounded
from noisescale.history.document import Document
from noisescale.history.record import RECORD
from noisescale.prediction.position import LIKELY, ONE, PAIR, Position
from noisescale.refusal import Refusal

NAME = "prediction/verdicts"
SWEEPS = "prediction/optimizer_sweeps"

Row = dict[str, Any]

FEWEST_STEPS = 100
SMALLEST = 8
"""The smallest batch size of all sweeps, at which Adam's β₂ is 0.999."""

FACTOR = 3.0
"""A batch size is to be kept within this factor of c."""

SOUGHT = {"larger": 8.0, "keep": 1.0, "smaller": 1 / 8}
"""c/B of the runs of a class that are trained first."""

APART = 16
"""The batch size of a second run over that of the first, or the other way round."""

LONG = 1000
"""All runs of so many steps are trained."""

RUNS = {"larger": 2, "keep": 2, "smaller": 4}
"""The most batch sizes of a workload in a class: few workloads have any that are too large."""

SEEDS = {"larger": (100,), "keep": (100,), "smaller": (100, 101)}
LONG_SEEDS = 100, 101, 102
"""None of them is a sweep's."""

ONES, PAIRS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8), (0.9, 0.95)
"""Thresholds that are tried: of one verdict, and of two that border."""

LOWER = 0.6
"""A threshold with more verdicts, whose wrong ones are told, too."""

WANTED = 0.95
"""The share of decided runs that is to be right."""

NEAR = 1.5
"""A c that is within this factor of a boundary belongs to one class as much as to the other."""

CONSTANTS = "larger", "keep", "keep_or_larger", "keep_or_smaller"
ODD = "digits, Lion", "digits, momentum 0.97"
"""Their steps hardly fall from B = 16 on, for reasons other than noise. `bands.py` leaves the first
out, as its c is below the smallest batch size. Tables are with and without them."""

NORMAL_80, NORMAL_95 = 1.2816, 1.96
"""Standard deviations that hold these shares of a normal distribution."""


def _longer(name: str, goal: float, **more: Any) -> Workload:
    return replace(WORKLOADS[name], goal=goal, **{"measured": 1, "sizes": 4, "factor": 4, **more})


_THOROUGH: dict[str, Any] = {"seeds": 6, "sizes": 7, "factor": 2}
LONGER = (
    _longer("digits, SGD", 0.12, **_THOROUGH),
    _longer("digits, AdamW", 0.12, **_THOROUGH),
    _longer("digits, momentum", 0.12, **_THOROUGH | {"sizes": 6}),
    _longer("mnist, SGD", 0.1, seeds=3),
    _longer("mnist, momentum", 0.1, seeds=3),
    _longer("mnist, AdamW", 0.1, seeds=3),
    _longer("autoencoder, momentum", 0.13, seeds=3),
)
"""Workloads that are swept here to lower losses: there runs are longer, and more batch sizes are
too large."""


class Cell(NamedTuple):
    """A training that a sweep knows."""

    workload: str
    batch_size: int
    lr: float
    steps: int
    swept: Bounded
    """c, in the problem's unit."""

    @property
    def ratio(self) -> float:
        return self.swept.value / self.batch_size

    @property
    def truth(self) -> str:
        if self.ratio > FACTOR:
            return "larger"
        return "smaller" if self.ratio < 1 / FACTOR else "keep"

    @property
    def cost(self) -> float:
        weight = {"digits": 1, "mnist": 4, "autoencoder": 8, "convolutions": 10}
        return self.steps * (30 + self.batch_size * weight.get(self.workload.split(",")[0], 100))


def cells(rows: list[Row]) -> Iterator[Cell]:
    """Yield all trainings of enough steps of which the sweep knows what is best."""
    for workload, swept_rows in swept_workloads(rows).items():
        for row in swept_rows:
            cell = cell_of(workload, row, _median_steps(row), swept_rows)
            if cell is not None:
                yield cell


def swept_workloads(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of each sweep."""
    of_workload: dict[str, list[Row]] = defaultdict(list)
    for row in (*saved_rows(SWEEPS), *rows):
        if row["kind"] == "sweep":
            of_workload[row["workload"]].append(row)
    return of_workload


def cell_of(workload: str, row: Row, steps: float, swept_rows: list[Row]) -> Cell | None:
    """Return a training with c by the rows of a sweep; None if c is not known, or steps are few."""
    counts = {other["batch_size"]: _median_steps(other) for other in swept_rows}
    reached = {size: count for size, count in counts.items() if count < math.inf}
    if len(reached) < 3 or not FEWEST_STEPS <= steps < math.inf:
        return None
    swept = swept_by(tuple(reached), tuple(reached.values()))
    certain = swept.high < math.inf or swept.low > FACTOR * row["batch_size"]
    return Cell(workload, row["batch_size"], row["lr"], round(steps), swept) if certain else None


@cache
def swept_by(sizes: tuple[int, ...], steps: tuple[float, ...]) -> Bounded:
    """Return c by the steps at several batch sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit_tradeoff(list(sizes), list(steps)).critical_batch_size_band()


def _median_steps(row: Row) -> float:
    return upper_median([math.inf if x is None else x for x in row["steps"]])


def planned(rows: list[Row]) -> list[Cell]:
    """Return the cells to train, the cheapest first."""
    of_class: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells(rows):
        of_class[cell.workload, cell.truth].append(cell)
    found = []
    for (_, truth), alike in of_class.items():
        alike.sort(key=lambda cell: abs(math.log(cell.ratio / SOUGHT[truth])))
        found += [c for k, c in enumerate(alike) if k < RUNS[truth] or c.steps >= LONG]
    return sorted(found, key=lambda cell: cell.cost)


def sweep_longer(workload: Workload, rows: list[Row], deadline: float) -> None:
    """Sweep what is missing of a longer workload, until the deadline."""
    name = name_of(workload)
    known = [row for row in rows if row["kind"] == "sweep" and row["workload"] == name]
    for row in sweep(workload, "cpu", known):
        rows.append({**row, "workload": name})
        write_results(NAME, rows, quiet=True)
        about = f"{name}, B = {row['batch_size']}, {row['kind']}: {row['steps']} steps"
        print(f"{about} at {row['lr']:.3g}, {row['seconds']} s", flush=True)
        if time.monotonic() > deadline:
            return


def name_of(workload: Workload) -> str:
    """Return the name of a longer workload."""
    return f"{workload.name}, to {workload.goal:g}"


class Stepped(torch.optim.Optimizer):
    """An optimizer of the sweeps that torch has not, on one model."""

    def __init__(self, model: torch.nn.Module, cell: Cell) -> None:
        problem, optimizer = cell.workload.split(", ")[:2]
        parameters = {name: p.detach().unsqueeze(0) for name, p in model.named_parameters()}
        inner = PROBLEMS[problem].inner(parameters) if optimizer == "Muon" else set()
        groups = defaultdict(list)
        for name, p in model.named_parameters():
            kind = optimizer if optimizer != "Muon" or name in inner else "AdamW"
            groups[kind.replace("-", "").lower()].append(p)
        super().__init__(
            [{"params": ps, "algorithm": kind} for kind, ps in groups.items()], {"lr": cell.lr}
        )
        self.named = dict(model.named_parameters())
        self.stepper: Stepper = stepper_of(
            optimizer, PROBLEMS[problem], parameters, cell.batch_size, SMALLEST
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        gradients = {
            name: p.grad.unsqueeze(0) for name, p in self.named.items() if p.grad is not None
        }
        self.stepper.step(gradients, torch.tensor([self.param_groups[0]["lr"]]))
        return loss


def optimizer_of(model: torch.nn.Module, cell: Cell) -> torch.optim.Optimizer:
    """Return torch's own optimizer, if it has one, as the sweep had it."""
    parameters, lr = model.parameters(), cell.lr
    match cell.workload.split(", ")[1]:
        case "SGD":
            return torch.optim.SGD(parameters, lr)
        case "momentum":
            return torch.optim.SGD(parameters, lr, momentum=0.9)
        case "momentum 0.97":
            return torch.optim.SGD(parameters, lr, momentum=0.97)
        case "Nesterov":
            return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)
        case "AdamW":
            betas = 0.9, 0.999 ** (cell.batch_size / SMALLEST)
            return torch.optim.AdamW(parameters, lr, betas=betas, weight_decay=0.01)
    return Stepped(model, cell)


def trained(cell: Cell, seed: int) -> Row:
    """Train by Lightning with the default monitor; return its record."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    problem = PROBLEMS[cell.workload.split(", ")[0]]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return problem.loss(self.net(batch[0]), batch)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.net, cell)
            if not cell.workload.endswith("decay"):
                return optimizer
            falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, cell.steps)
            return [optimizer], [{"scheduler": falling, "interval": "step"}]

    torch.manual_seed(seed)
    data = TensorDataset(*problem.data()[0])
    drawn = RandomSampler(data, replacement=True, num_samples=cell.steps * cell.batch_size)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = CSVLogger(folder)
        Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=logger,
            callbacks=[NoiseScaleMonitor(unit=problem.unit)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), DataLoader(data, batch_size=cell.batch_size, sampler=drawn))
        text = (Path(logger.log_dir) / RECORD).read_text()
    return {
        "kind": "run",
        "workload": cell.workload,
        "batch_size": cell.batch_size,
        "lr": cell.lr,
        "steps": cell.steps,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "record": [_short(json.loads(line)) for line in text.splitlines()],
    }


def _short(line: Row) -> Row:
    """Six digits, and whole numbers as they are."""
    if "row" not in line:
        return line
    row = [float(f"{x:.6g}") if isinstance(x, float) else x for x in line["row"]]
    return {**line, "row": row}


def train(rows: list[Row], only: str | None, deadline: float) -> None:
    """Train what is missing, the cheapest first, until the deadline."""
    done = {
        (row["workload"], row["batch_size"], row["seed"]) for row in rows if row["kind"] == "run"
    }
    for cell in planned(rows):
        for seed in LONG_SEEDS if cell.steps >= LONG else SEEDS[cell.truth]:
            key = cell.workload, cell.batch_size, seed
            if key in done or only not in (None, cell.workload):
                continue
            if time.monotonic() > deadline:
                return
            row = trained(cell, seed)
            rows.append(row)
            write_results(NAME, rows, quiet=True)
            about = f"{cell.workload}, B = {cell.batch_size}, {cell.truth}"
            print(f"{about}: {cell.steps} steps, {row['seconds']} s", flush=True)


class Judged(NamedTuple):
    """What a run says, beside what the sweep says."""

    cell: Cell
    seed: int
    position: Position | None
    """None: the noise scale was withheld."""
    by_noise_scale: float
    """c as the run's noise scale gives it, before the error of the theory."""

    @property
    def family(self) -> str:
        """The problem and the optimizer: runs of a family are not independent."""
        return ", ".join(self.cell.workload.split(", ")[:2])

    @property
    def near(self) -> bool:
        """Whether c is within 1.5 x of a boundary."""
        boundaries = FACTOR, 1 / FACTOR
        return min(abs(math.log(self.cell.ratio / x)) for x in boundaries) < math.log(NEAR)

    @cache  # noqa: B019  # the program ends with its runs
    def verdict(self, one: float, pair: float) -> str:
        if self.position is None:
            return "unknown"
        with patch.multiple("noisescale.prediction.position", ONE=one, PAIR=pair):
            return self.position.verdict

    def older(self) -> Judged:
        """Return the run without the caution that is due with few steps."""
        if self.position is None:
            return self
        return self._replace(position=replace(self.position, young=False))

    def is_right(self, verdict: str) -> bool:
        return self.cell.truth in verdict.split("_or_")

    @property
    def deviations(self) -> float | None:
        """Standard deviations, as the bounds have them, from the point to the swept c."""
        if self.position is None or not self.position.resolved or self.position.critical.low == 0:
            return None
        if math.isinf(self.cell.swept.high):
            return None
        band = self.position.critical
        low, value, high = band.low, band.value, band.high
        swept = self.cell.swept.value
        end = high if swept > value else low
        return abs(math.log(swept / value)) / abs(math.log(end / value)) * NORMAL_95

    @property
    def holds(self) -> bool:
        if self.position is None:
            return False
        return self.position.critical.low <= self.cell.swept.value <= self.position.critical.high


def judged(rows: list[Row]) -> list[Judged]:
    """Return all runs with what they say."""
    known = {(cell.workload, cell.batch_size): cell for cell in cells(rows)}
    found = []
    for row in rows:
        cell = known.get((row["workload"], row["batch_size"]))
        if row["kind"] != "run" or cell is None:
            continue
        (part,) = Document(row["record"]).parts.values()
        position, by_noise_scale = None, math.nan
        with warnings.catch_warnings(), suppress(Refusal):
            warnings.simplefilter("ignore")
            p = predict(part.history())
            position, by_noise_scale = p.position, p.critical_batch_size_by_noise_scale.value
        found.append(Judged(cell, row["seed"], position, by_noise_scale))
    return found


def judged_pairs(rows: list[Row]) -> list[Judged]:
    """Return what two runs of each sweep say, of two seeds, where its other batch sizes give c."""
    found = []
    for workload, swept_rows in swept_workloads(rows).items():
        for row, other in permutations(swept_rows, 2):
            if other["batch_size"] not in (row["batch_size"] * APART, row["batch_size"] / APART):
                continue
            rest = [each for each in swept_rows if each not in (row, other)]
            of_second = other["steps"][1:] + other["steps"][:1]  # of another seed
            for seed, (steps, others) in enumerate(zip(row["steps"], of_second, strict=False)):
                cell = None if steps is None else cell_of(workload, row, steps, rest)
                if cell is not None and others is not None:
                    second = _run_of(other["batch_size"], others)
                    p = predict(_run_of(row["batch_size"], steps), second_run=second)
                    found.append(Judged(cell, seed, p.position, math.nan))
    return found


def _run_of(batch_size: int, steps: float) -> History:
    run = History()
    run.append(step=steps, examples=batch_size * steps, batch_size=batch_size)
    return run


class Score(NamedTuple):
    """Counts of verdicts."""

    runs: int
    decided: int
    by_one_word: int
    wrong: int
    wrong_near: int
    """Of these with c within 1.5 x of a boundary."""

    @classmethod
    def of(cls, runs: Iterable[Judged], one: float, pair: float) -> Score:
        verdicts = [(run, run.verdict(one, pair)) for run in runs]
        decided = [(run, verdict) for run, verdict in verdicts if verdict != "unknown"]
        wrong = [run for run, verdict in decided if not run.is_right(verdict)]
        by_one = sum(verdict in SOUGHT for _, verdict in decided)
        return cls(len(verdicts), len(decided), by_one, len(wrong), sum(r.near for r in wrong))

    @property
    def right(self) -> float:
        """The share of decided runs."""
        return 1 - self.wrong / self.decided if self.decided else math.nan

    def __str__(self) -> str:
        return (
            f"{self.decided} of {self.runs} decided ({self.decided / self.runs:.0%}),"
            f" {self.by_one_word} by one word ({self.by_one_word / self.runs:.0%}),"
            f" {self.wrong} wrong ({self.wrong_near} near a boundary), right {self.right:.1%}"
        )


def chosen_threshold(runs: list[Judged]) -> float:
    """Return the lowest q1 with the wanted share of right verdicts, or that with the most."""
    scores = {one: Score.of(runs, one, PAIRS[0]) for one in ONES}
    good = [one for one, score in scores.items() if score.right >= WANTED]
    return min(good) if good else max(scores, key=lambda one: scores[one].right)


def halves(runs: list[Judged]) -> tuple[list[Judged], list[Judged]]:
    """Split by family."""
    families = sorted({run.family for run in runs})
    first = set(families[::2])
    return [r for r in runs if r.family in first], [r for r in runs if r.family not in first]


def quantile(values: Iterable[float], share: float) -> float:
    """Return the least value that the share of values does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def report(rows: list[Row]) -> list[Row]:
    """Print the tables; return them as rows."""
    runs = judged(rows)
    told: list[Row] = []

    def tell(title: str, chosen: list[Judged], ones: Sequence[float] = ONES) -> None:
        if not chosen:
            return
        classes = Counter(run.cell.truth for run in chosen)
        print(f"\n{title}: {len(chosen)} runs of {len({r.family for r in chosen})} families,")
        print("  " + ", ".join(f"{classes[truth]} {truth}" for truth in SOUGHT))
        for constant in CONSTANTS:
            count = sum(run.is_right(constant) for run in chosen)
            print(f"  always {constant}: right {count / len(chosen):.1%}")
        for one in ones:
            for pair in PAIRS:
                score = Score.of(chosen, one, pair)
                counts = Counter(run.verdict(one, pair) for run in chosen)
                print(f"  q1 {one}, q2 {pair}: {score}; {dict(counts)}")
                about = {"title": title, "q1": one, "q2": pair, **score._asdict()}
                told.append({"kind": "score", **about, "verdicts": counts})

    tell("all", runs)
    tell("all, none young", [run.older() for run in runs])
    tell("200 steps and more", [r for r in runs if r.cell.steps >= 200])
    tell("500 steps and more", [r for r in runs if r.cell.steps >= 500])
    tell(f"{LONG} steps and more", [r for r in runs if r.cell.steps >= LONG])
    for odd in ODD:
        print(f"without {odd}:", Score.of((r for r in runs if r.family != odd), ONE, PAIR))
    tell("without both", [r for r in runs if r.family not in ODD])
    for truth in SOUGHT:
        alike = [run.verdict(ONE, PAIR) for run in runs if run.cell.truth == truth]
        print(f"truth {truth}: {dict(Counter(alike))}")
    for name, (known, other) in {"one": halves(runs), "other": halves(runs)[::-1]}.items():
        one = chosen_threshold(known)
        score = Score.of(other, one, PAIRS[0])
        print(f"chosen on the {name} half: q1 {one}; there {Score.of(known, one, PAIRS[0])};")
        print(f"  on the rest {score}")
        told.append({"kind": "left out", "chosen_on": name, "q1": one, **score._asdict()})
    told += tell_likely("all", runs)
    told += tell_likely("without both", [r for r in runs if r.family not in ODD])
    tell(f"two runs, at {APART} times the batch size", judged_pairs(rows), (LOWER, ONE))
    for one in sorted({LOWER, ONE}):
        told += tell_wrong(runs, rows, one)
    return told


def tell_likely(title: str, chosen: list[Judged]) -> list[Row]:
    """Print how many standard deviations hold four of five, with families left out."""
    known = {r: d for r in chosen if (d := r.deviations) is not None}
    if not known:
        return []
    z = quantile(known.values(), LIKELY)
    held = 0
    zs = []
    for family in {run.family for run in known}:
        others = quantile([d for run, d in known.items() if run.family != family], LIKELY)
        zs.append(others)
        held += sum(d <= others for run, d in known.items() if run.family == family)
    bounds = [run.position.critical for run in known if run.position is not None]
    wide = [band.high / band.low for band in bounds]
    likely = [width ** (z / NORMAL_95) for width in wide]
    factors = [
        max(r.cell.swept.value / b.value, b.value / r.cell.swept.value)
        for r, b in zip(known, bounds, strict=True)
    ]
    bounded = [run for run in chosen if run.position is not None]
    holds = sum(run.holds for run in bounded)
    row = {
        "kind": "likely",
        "title": title,
        "runs": len(known),
        "deviations": round(z, 3),
        "scatter": round(z / NORMAL_80, 3),
        "left_out_from": round(min(zs), 3),
        "left_out_to": round(max(zs), 3),
        "held_left_out": held,
        "deviations_95": round(quantile(known.values(), 0.95), 3),
        "width_likely": round(statistics.median(likely), 2),
        "width_95": round(statistics.median(wide), 1),
        "factor_off": round(statistics.median(factors), 2),
        "within_2": sum(x <= 2 for x in factors),
        "held_95": holds,
        "of": len(bounded),
    }
    print(
        f"\nlikely, {title}: {len(known)} runs with a point and two ends; four of five within"
        f" {z:.2f} deviations ({row['scatter']} x nominal), with a family left out {min(zs):.2f} to"
        f" {max(zs):.2f}, which held {held} ({held / len(known):.0%}); 95 % within"
        f" {row['deviations_95']}; median width {row['width_likely']} x, of the 95 % bounds"
        f" {row['width_95']} x; the point is off by {row['factor_off']} x (median), within 2 x in"
        f" {row['within_2']}; 95 % bounds hold {holds} of {len(bounded)}"
    )
    return [row]


def tell_wrong(runs: list[Judged], rows: list[Row], one: float) -> list[Row]:
    """Print each wrong verdict, with c by the noise scales at frozen weights along the run."""
    frozen: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in (*saved_rows(SWEEPS), *rows):
        if row["kind"] == "measured":
            frozen[row["workload"]].append((row["batch_size"], predictions(row)["simple"]))
    told = []
    print(f"\nwrong at q1 {one}:")
    for run in runs:
        verdict = run.verdict(one, PAIR)
        if verdict == "unknown" or run.is_right(verdict):
            continue
        cell, position = run.cell, run.position
        truths = dict(frozen.get(cell.workload, []))
        truth = truths.get(cell.batch_size, math.nan)
        assert position is not None
        row = {
            "kind": "wrong",
            "q1": one,
            "workload": cell.workload,
            "batch_size": cell.batch_size,
            "steps": cell.steps,
            "seed": run.seed,
            "swept": _short_number(cell.swept.value),
            "truth": cell.truth,
            "verdict": verdict,
            "point": _short_number(position.critical.value),
            "low": _short_number(position.critical.low),
            "high": _short_number(position.critical.high),
            "by_noise_scale": _short_number(run.by_noise_scale),
            "frozen": _short_number(truth),
            "cause": cause_of(run, truth),
        }
        told.append(row)
        about = f"{cell.workload}, B = {cell.batch_size}, {cell.steps} steps, seed {run.seed}"
        ends = f"{row['point']} ({row['low']} to {row['high']})"
        print(f"  {about}: {verdict} for {cell.truth}; swept c {row['swept']}, by the run {ends},")
        print(f"    {row['by_noise_scale']} before the theory's factor: {row['cause']}")
    return told


def cause_of(run: Judged, frozen: float) -> str:
    """Say why a verdict was wrong, by c as the noise scale at frozen weights gives it."""
    cell = run.cell
    parts = ["c is within 1.5 x of a boundary"] if run.near else []
    if math.isfinite(frozen):
        theory = frozen / cell.swept.value
        of_theory = "" if 1 / FACTOR < theory < FACTOR else "the theory: "
        parts.append(f"{of_theory}at frozen weights the noise scale is {theory:.2g} x c")
        if math.isfinite(run.by_noise_scale):
            parts.append(f"measured {run.by_noise_scale / frozen:.2g} x this")
        else:
            parts.append("the measurement has a lower end alone")
    if cell.workload.endswith("decay"):
        parts.append("a falling learning rate")
    return "; ".join(parts)


def _short_number(x: float) -> float | None:
    return float(f"{x:.3g}") if math.isfinite(x) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="a workload")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of training")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--anew", action="store_true", help="train all runs again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for row in saved_rows(NAME) if row["kind"] != "run" or not given.anew]
    if not given.report:
        deadline = time.monotonic() + 60 * given.minutes
        use_plain_attention()
        for workload in LONGER:
            if given.only in (None, name_of(workload)):
                sweep_longer(workload, rows, deadline)
                train(rows, given.only, deadline)
    measured = [row for row in rows if row["kind"] in ("sweep", "measured", "run")]
    told = report(measured)
    if given.report:
        write_results(NAME, [*told, *measured])


if __name__ == "__main__":
    main()
