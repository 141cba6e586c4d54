# SPDX-License-Identifier: Apache-2.0
"""What a known noise scale is worth to a search of learning rate and batch size, on digits.

Three ways to search learning rate, batch size and epochs of the same network at equal cost: the
same epochs at each batch size, the cost learned from nothing; the same with the prior of the cost;
and epochs of equal progress at each batch size by a measured noise scale, with the prior. A
training's cost is its steps times 1 ms + 10 us an example: the clock of a shared machine would add
noise that the question does not have.

Reported: the best validation loss, and the area under the front of loss against the logarithm of
the cost, relative to the loss of the own settings (larger is better).

    python benchmarks/methods/tune_prior.py [--seeds 0 1 2 ...] [--report] [--smoke]

A row is saved after each search, and a later call goes on from there.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from noisescale import NoiseScaleMonitor, predict
from noisescale.lab.jobs.jobs import Entry, State, Training
from noisescale.lab.parameter_texts import search_parameters
from noisescale.lab.sweep.settings import ModuleDefaults
from noisescale.lab.tune.cost_front import CostFront
from noisescale.lab.tune.tune_job import Length, TuneJob, center_parameters, suggest

SEARCH = ("learning_rate=0.003..3", "batch_size=8..512", "epochs=1..20")
OWN = ModuleDefaults(1400, 32, 0.05)
EPOCHS, TRAININGS = 5.0, 40
"""A search may cost this many trainings with the own settings."""

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
train, held = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def trained(spec: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(spec["seed"])
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=spec["parameters"]["learning_rate"])
    size, steps = spec["batch_size"], spec["most_steps"]
    places = torch.cat([torch.randperm(1400) for _ in range(math.ceil(steps * size / 1400))])
    for step in range(steps):
        batch = places[step * size : (step + 1) * size]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(train[0][batch]), train[1][batch]).backward()
        optimizer.step()
    with torch.no_grad():
        value = float(nn.functional.cross_entropy(net(held[0]), held[1]))
    seconds = steps * (1e-3 + 1e-5 * size)
    fine = math.isfinite(value)
    return {
        "value": value if fine else None,
        "steps": steps,
        "seconds": seconds,
        "ended": "done" if fine else "diverged",
    }


def measured_noise_scale() -> float:
    class Digits(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    L.seed_everything(0)
    monitor = NoiseScaleMonitor(every_n_steps=1)
    trainer = L.Trainer(
        max_epochs=int(EPOCHS), callbacks=[monitor], logger=False, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(TensorDataset(*train), batch_size=32, shuffle=True))
    return predict(monitor.history).critical_batch_size.value


def searched(
    seed: int, noise_scale: float | None, trainings: int, *, with_prior: bool
) -> tuple[float, float, int]:
    """The best loss, the area under the front, and the number of trainings."""
    length = Length(epochs=EPOCHS, noise_scale=noise_scale)
    parameters = center_parameters(search_parameters(SEARCH), OWN, length, {})
    settings: dict[str, Any] = {"trials": 999, "seed": seed}
    job = TuneJob(Training("-"), OWN, "val_loss", False, parameters, length, **settings)
    entries: dict[str, Entry] = {}
    spent, allowed = 0.0, math.inf
    while spent < allowed:
        asked = suggest(job, entries, with_prior=with_prior)
        spec = job.spec(len(entries), asked) | {"seed": 1000 * seed + len(entries)}
        result = trained(spec)
        key = str(len(entries))
        entries[key] = Entry(key, State.DONE, len(entries), 1, spec, {}, 0.0, result)
        spent += result["seconds"]
        if len(entries) == 1:
            allowed = trainings * result["seconds"]
    front = CostFront.of(job, entries).front
    costs = np.log([*(each.cost for each in front), 4.0])
    losses = np.minimum([each.value for each in front], 2.0)
    gains = (2.0 - losses) * np.diff(np.maximum(np.minimum(costs, math.log(4.0)), math.log(0.02)))
    return front[-1].value, float(gains.sum()), len(entries)


def report(rows: list[dict[str, Any]]) -> None:
    """Print the mean of each way, and what it has beyond the first one, with standard errors."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    areas = {way: {row["seed"]: row["area"] for row in rows if row["way"] == way} for way in ways}
    for way, of_way in areas.items():
        beyond = [area - areas[ways[0]][seed] for seed, area in of_way.items()]
        error = np.std(beyond, ddof=1) / math.sqrt(len(beyond)) if len(beyond) > 1 else math.nan
        best = np.mean([row["best"] for row in rows if row["way"] == way])
        print(
            f"{way}: area {np.mean(list(of_way.values())):.2f}, {np.mean(beyond):+.2f} ±"
            f" {error:.2f} beyond {ways[0]!r}, best loss {best:.3f} ({len(of_way)} seeds)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--report", action="store_true", help="print what is saved, run none")
    parser.add_argument("--smoke", action="store_true", help="one short search each, unsaved")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = [] if given.smoke else saved_rows("methods/tune_prior")
    noise_scale = math.nan if given.report else measured_noise_scale()
    ways = {
        "cost learned": (None, False),
        "prior of the cost": (None, True),
        "equal progress": (noise_scale, True),
    }
    for seed in [] if given.report else given.seeds[:1] if given.smoke else given.seeds:
        for way, (known, with_prior) in ways.items():
            if any((row["way"], row["seed"]) == (way, seed) for row in rows):
                continue
            best, area, count = searched(
                seed, known, 6 if given.smoke else TRAININGS, with_prior=with_prior
            )
            about = {"way": way, "seed": seed, "noise_scale": round(noise_scale, 1)}
            found = {"best": round(best, 5), "area": round(area, 4), "trainings": count}
            rows.append(about | found)
            print(rows[-1], flush=True)
            if not given.smoke:
                write_results("methods/tune_prior", rows, own_trainings=TRAININGS, quiet=True)
    report(rows)


if __name__ == "__main__":
    main()
