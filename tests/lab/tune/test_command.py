# SPDX-License-Identifier: Apache-2.0
"""`noisescale tune`: what is refused, single trainings in this process, and one whole search."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program import ended, refused, run
from reported_runs import history

from noisescale.lab.jobs import launchers
from noisescale.lab.jobs.jobs import Entry, State, Training
from noisescale.lab.jobs.workers import Place
from noisescale.lab.sweep.trial_fit import Made
from noisescale.lab.tune import make_job
from noisescale.lab.tune.document import progress_sentence
from noisescale.lab.tune.doubts import doubts_about
from noisescale.lab.tune.make_job import tune_job
from noisescale.lab.tune.trial_fit import train_tune_task
from noisescale.lab.tune.tune_job import TuneJob
from noisescale.lab.tune.tune_record import tune_record
from noisescale.lightning.training import seed_all
from noisescale.made.targets import module_and_data

TRAIN = """
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Line(LightningModule):
    def __init__(self, width=8, bias=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width, bias=bias), nn.Linear(width, 1, bias=bias))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_nan", loss * float("nan"))

    def on_train_epoch_end(self):
        self.log("late", 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 4, generator=generator)
y = x.sum(1, keepdim=True) + torch.randn(256, 1, generator=generator)
data = TensorDataset(x, y)

def make(width=8, bias=False):
    return Line(width, bias), (
        DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=64)
    )

def bare():
    return Line(), data

class Given(Line):
    pass
"""

SEARCH = ("--search", "learning_rate=0.003..0.3", "--search", "width=4..64")
LESS = ("--metric", "val_loss", "--accelerator", "cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    package = str(Path(launchers.__file__).parents[3])
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTHONPATH", package)  # of the workers too
    return tmp_path


def job(*search: str, metric: str = "val_loss", **others: Any) -> TuneJob:
    settings: dict[str, Any] = {
        "maximize": False,
        "budget": None,
        "trials": 2,
        "max_cost": None,
        "seed": 0,
        "epochs": 1.0,
        "steps": None,
        "noise_scale": None,
        "run": None,
        "max_device_batch_size": None,
    }
    training = Training("train.py:make", accelerator="cpu")
    return tune_job(training, metric, search, others.pop("space", None), **{**settings, **others})


def trained(begun: TuneJob, folder: Path, **parameters: Any) -> dict[str, Any]:
    """The result of one training in this process."""
    spec = begun.spec(0, begun.center | parameters)
    seed_all(spec["seed"])
    made = Made(*module_and_data("train.py:make", None, spec["arguments"]))
    train_tune_task(made, spec, folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_a_training_has_the_metric_at_its_end_and_its_own_time(here: Path) -> None:
    begun = job("learning_rate=0.003..100", "batch_size=8..64", "width=4..64", epochs=2)

    found, large = trained(begun, here), trained(begun, here, batch_size=64)
    lost = trained(begun, here, learning_rate=100.0)
    dear = trained(replace(begun, max_cost=1e-6), here)

    assert begun.center == {"learning_rate": 0.02, "batch_size": 8, "width": 8}
    assert (found["steps"], large["steps"], found["ended"]) == (64, 8, "done")
    assert 0.5 < found["value"] < 2.5
    assert 0 < found["seconds"] < 60
    assert (lost["value"], lost["ended"]) == (None, "diverged")
    assert lost["steps"] < 64
    assert (dear["ended"], dear["steps"]) == ("too dear", 1)


def test_the_same_parameters_and_seed_train_the_same(here: Path) -> None:
    begun = job("width=4..64")

    assert trained(begun, here)["value"] == trained(begun, here)["value"]
    assert trained(begun, here)["value"] != trained(begun, here, width=16)["value"]


def test_a_metric_without_a_number_counts_as_diverged(here: Path) -> None:
    found = trained(job("width=4..64", metric="val_nan"), here)

    assert (found["value"], found["ended"]) == (None, "diverged")


def test_the_own_settings_of_optimizer_loader_and_function_are_the_centre(here: Path) -> None:
    begun = job(
        "momentum=0.5..0.99", "weight_decay=1e-5..0.1", "bias=true,false", "epochs=1..20", epochs=3
    )

    assert begun.center == {"momentum": 0.9, "weight_decay": 1e-5, "bias": False, "epochs": 3.0}
    assert job("batch_size=16..64").center == {"batch_size": 16}
    assert begun.own.batch_size == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "`--search` must name a parameter to search, got none. Write, for example,"),
        (
            ("--search", "depth=1..4"),
            "`--search` must name arguments of train.py:make, or what a training has"
            " (learning_rate, batch_size, weight_decay, momentum, epochs, steps), got depth. Its"
            " arguments: width, bias. Add the argument, or correct the name.",
        ),
        (
            (*SEARCH, "--budget", "0h"),
            "`--budget` must be positive device-hours with a unit, got '0",
        ),
        (
            (*SEARCH, "--max-cost", "5"),
            "`--max-cost` must be positive device-hours with a unit, got",
        ),
        ((*SEARCH, "--trials", "0"), "`--trials` must be a positive whole number, got 0."),
        (
            (*SEARCH, "--metric", "val_loss<=1"),
            "`--metric` must be the name of a metric, and no go",
        ),
        (
            (*SEARCH, "--metric", "f1"),
            "`--metric` must be about a metric that the module logs, got",
        ),
        (
            (*SEARCH, "--metric", "late"),
            "`--metric` must be about a metric of the validation, or of",
        ),
        (
            (*SEARCH, "--noise-scale", "-3"),
            "`--noise-scale` must be positive and finite, got -3.0.",
        ),
        (
            (*SEARCH, "--noise-scale", "3", "--run", "x"),
            "`--noise-scale` must be left out with `--run`, got 3. Give one of both.",
        ),
        ((*SEARCH, "--steps", "9", "--epochs", "1"), "`--steps` must be left out where epochs are"),
        (
            ("--search", "steps=5..50", "--epochs", "1"),
            "`--epochs` must be left out where steps are searched, got 1. Leave it out.",
        ),
        ((*SEARCH, "--seed", "-1"), "`--seed` must be from 0 to below 2,147,483,648, got -1."),
        (
            (*SEARCH, "--html", "no/tune.html"),
            "`--html` must be in a folder that exists, got no/tu",
        ),
        (
            ("--search", "batch_size=8..512"),
            "`--search` must have batch sizes of at most the ",
        ),
        (
            (*SEARCH, "--space", "none.toml"),
            "`--space` must be a file, got none.toml, which is non",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(
    here: Path, arguments: tuple[str, ...], said: str
) -> None:
    budget = () if {"--budget", "--trials"} & set(arguments) else ("--trials", "2")

    found = refused("tune", "train.py:make", *LESS, *budget, *arguments)

    assert found.startswith(said)
    assert not (here / "tune").exists()


def test_a_search_without_an_end_and_an_object_without_arguments_are_refused(here: Path) -> None:
    no_end = refused("tune", "train.py:make", *LESS, *SEARCH)
    with (here / "train.py").open("a") as file:
        file.write("\nmodule = Line()\n")
    no_function = refused("tune", "train.py:module", *LESS, *SEARCH, "--trials", 1)

    assert no_end == (
        "`--budget` must be given, or `--trials`, got neither. Give a budget such as 1h."
    )
    assert no_function.endswith("got width. Its arguments: none. Add the argument, or correct the"
                                " name.")  # fmt: skip


def test_a_run_gives_its_noise_scale_and_step_times(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = history()
    monkeypatch.setattr("noisescale.history.reading.read_run", lambda _: measured)
    known = make_job._measurements(None, here)

    assert known.noise_scale is not None
    assert math.isfinite(known.noise_scale)
    assert known.noise_scale > 0


def test_what_is_doubtful_is_said(here: Path) -> None:
    found = job("width=4..64", metric="train_loss")

    assert [text.partition(" is ")[0] for text in doubts_about(found)] == ["train_loss"]
    (rises,) = doubts_about(replace(job("width=4..64"), metric="val_acc"))
    assert rises.startswith("val_acc sounds like a metric that should rise")


def test_it_is_said_where_the_first_training_has_other_settings_than_the_module(here: Path) -> None:
    found = job("learning_rate=0.5..5", "batch_size=8..64", "weight_decay=1e-5..0.1")
    schedules = ("ReduceLROnPlateau", "CosineAnnealingLR")

    rate, decay = doubts_about(found)
    (scheduled,) = doubts_about(replace(found, own=replace(found.own, schedules=schedules)))[:1]
    assert rate.startswith("The first training, called your own settings, has learning_rate = 0.5 ")
    assert "weight_decay = 1e-05 where your module and loader have 0:" in decay
    assert scheduled.startswith("The module has a learning-rate schedule (CosineAnnealingLR).")


def test_the_line_of_progress_has_the_budget_and_the_best(here: Path) -> None:
    begun = replace(job("width=4..64"), trials=None, budget=0.5)
    done = {"value": 0.25, "seconds": 90.0, "steps": 9, "ended": "done", "device_seconds": 180.0}
    lost = done | {"value": None, "ended": "diverged"}
    entries = {
        str(k): Entry(str(k), state, k, 1, begun.spec(k, begun.center), {}, 0.0, result)
        for k, (state, result) in enumerate(
            [(State.DONE, done), (State.DONE, lost), (State.RUNNING, {})]
        )
    }

    found = tune_record(begun, entries, Place("tune", "tune.journal"))
    assert progress_sentence(found) == (
        "1 training done, 1 without a result, 1 under way, 0.1 of 0.5 device-hours spent. Best"
        " val_loss: 0.25 for 90.0 device-seconds"
    )


@pytest.mark.timeout(400)
def test_a_search_from_the_command_to_its_files(here: Path) -> None:
    steps = ("--search", "steps=4..40", "--trials", "1")
    words = ("tune", "train.py:make", *LESS, *SEARCH, *steps)

    code, output, said = ended(*words, "--html", "tune.html")
    again = json.loads(ended(*words, "--workers", 0, "--json")[1])
    status = json.loads(run("status", "--storage", "tune/tune.journal", "--json"))
    sweep = ("sweep", "train.py:make", "--goal", "val_loss<=1", "--batch-sizes", "8,16")
    there = ("--accelerator", "cpu", "--storage", "tune/tune.journal", "--name", "tune")
    other = refused(*sweep, *there)

    assert code == 0, said
    assert "1 of 1 training done" in output
    assert "Your own settings" in output
    assert "The front of cost and result" in output
    assert "Report: tune.html" in output
    assert said.startswith("Further workers join with: noisescale work --storage tune/tune.journal")
    assert "val_loss against cost" in (here / "tune.html").read_text()
    assert len((here / "tune/trials.csv").read_text().splitlines()) == 2
    assert [trial["number"] for trial in again["trials"]] == [0]
    assert again["trials"][0]["parameters"]["width"] == 8
    assert again["finished"]
    assert status["kind"] == "tune"
    assert status == again
    assert "the job 'tune', which differs in" in other
    assert "`kind` (tune before, sweep now)" in other
