# SPDX-License-Identifier: Apache-2.0
"""`noisescale tune`: what is refused, single trainings in this process, and one whole search."""

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.jobs.jobs_for_tests import CPU, TRAIN, trained_here, write_script
from program import ended, refused, run
from reported_runs import history
from scripts import Forked

from noisescale.lab.tune import make_job
from noisescale.lab.tune.answer import doubts_about
from noisescale.lab.tune.make_job import TuneOptions, read_budget, tune_job
from noisescale.lab.tune.tune_job import TuneJob
from noisescale.refusal import Refusal

OWN = """
class Logs(Line):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_nan", float("nan"))

    def on_train_epoch_end(self):
        self.log("late", 1.0)

loaders = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=64)

def make(width=8, bias=False):
    return Logs(width, bias), loaders

module = Line()
"""

SEARCH = ("--search", "learning_rate=0.003..0.3", "--search", "width=4..64")
LESS = ("--metric", "val_loss", "--accelerator", "cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_script(tmp_path, monkeypatch, TRAIN + OWN)


def job(*search: str, metric: str = "val_loss", **others: Any) -> TuneJob:
    left = ("budget", "max_cost", "steps", "noise_scale", "run", "max_device_batch_size")
    settings = {"maximize": False, "trials": 2, "seed": 0, "epochs": 1.0, **dict.fromkeys(left)}
    asked: dict[str, Any] = {**settings, **others}
    return tune_job(CPU, TuneOptions(metric, search, None, **asked))


def trained(begun: TuneJob, folder: Path, **parameters: Any) -> dict[str, Any]:
    """The result of one training in this process."""
    return trained_here(begun.spec(0, begun.center | parameters), folder)


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
    without = trained(job("width=4..64", metric="val_nan"), here)
    assert (without["value"], without["ended"]) == (None, "diverged")


def test_the_own_settings_of_optimizer_loader_and_function_are_the_centre(here: Path) -> None:
    begun = job(
        "momentum=0.5..0.99", "weight_decay=1e-5..0.1", "bias=true,false", "epochs=1..20", epochs=3
    )

    assert begun.center == {"momentum": 0.9, "weight_decay": 1e-5, "bias": False, "epochs": 3.0}
    assert job("batch_size=16..64").center == {"batch_size": 16}
    assert begun.own.batch_size == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "`--search` must name a parameter to search"),
        ("SEARCH", "`--budget` must be given, or `--trials`, got neither"),
        ("--search depth=1..4", "`--search` must name arguments of train.py:make"),
        ("SEARCH --trials 0", "`--trials` must be a positive whole number"),
        ("SEARCH --budget 0h", "`--budget` must be positive device-hours"),
        ("SEARCH --max-cost 5", "`--max-cost` must be positive device-hours"),
        ("SEARCH --metric val_loss<=1", "`--metric` must be the name"),
        ("SEARCH --metric f1", "`--metric` must be about a metric that the module logs"),
        ("SEARCH --metric late", "`--metric` must be about a metric of the validation"),
        ("SEARCH --noise-scale -3", "`--noise-scale` must be positive"),
        ("SEARCH --noise-scale 3 --run x", "`--noise-scale` must be left out with `--run`"),
        ("SEARCH --steps 9 --epochs 1", "`--steps` must be left out where epochs are"),
        ("--search steps=5..50 --epochs 1", "`--epochs` must be left out where steps are"),
        ("SEARCH --seed -1", "`--seed` must be from 0"),
        ("SEARCH --html no/tune.html", "`--html` must be in a folder that exists"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(here: Path, words: str, said: str) -> None:
    arguments = words.replace("SEARCH", " ".join(SEARCH)).split()
    budget = () if words == "SEARCH" or "--trials" in words else ("--trials", "2")

    found = refused("tune", "train.py:make", *LESS, *budget, *arguments)

    assert found.startswith(said)
    assert not (here / "tune").exists()


def test_an_object_without_arguments_is_refused(here: Path) -> None:
    said = refused("tune", "train.py:module", *LESS, *SEARCH, "--trials", 1)

    assert "got width. Its arguments: none" in said


@pytest.mark.parametrize("text", ["0h", "-1h", "1", "h", "", "nanh", "1d"])
def test_a_budget_is_positive_and_has_a_unit(text: str) -> None:
    with pytest.raises(Refusal, match="`budget`"):
        read_budget(text)
    assert (read_budget("0.5h"), read_budget("30m"), read_budget("90s")) == (0.5, 0.5, 0.025)


def test_a_run_gives_its_noise_scale_and_step_times(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import noisescale.prediction.predict  # noqa: F401 - else it keeps the replaced function

    measured = history()
    monkeypatch.setattr("noisescale.history.reading.read_run", lambda _: measured)
    known = make_job._measurements(None, here)

    assert known.noise_scale is not None
    assert 0 < known.noise_scale < math.inf


def test_what_is_doubtful_is_said(here: Path) -> None:
    found = job("width=4..64", metric="train_loss")
    other = job("learning_rate=0.5..5", "batch_size=8..64", "weight_decay=1e-5..0.1")
    schedules = ("ReduceLROnPlateau", "CosineAnnealingLR")

    (of_batch,) = doubts_about(found)
    (rises,) = doubts_about(replace(job("width=4..64"), metric="val_acc"))
    rate, decay = doubts_about(other)  # the first training has other settings than the module
    scheduled, *_ = doubts_about(replace(other, own=replace(other.own, schedules=schedules)))

    assert of_batch.startswith("train_loss is")
    assert rises.startswith("val_acc sounds")
    assert "learning_rate = 0.5 " in rate
    assert "weight_decay = 1e-05 where" in decay
    assert "(CosineAnnealingLR)" in scheduled


def test_a_search_from_the_command_to_its_files(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("--search", "steps=4..40", "--trials", "1")
    words = ("tune", "train.py:make", *LESS, *SEARCH, *steps)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Forked)  # the worker is a fork of this process
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
    assert "noisescale work --storage tune/tune.journal" in said
    assert "val_loss against cost" in (here / "tune.html").read_text()
    assert len((here / "tune/trials.csv").read_text().splitlines()) == 2
    assert [trial["number"] for trial in again["trials"]] == [0]
    assert again["trials"][0]["parameters"]["width"] == 8
    assert again["finished"]
    assert status["kind"] == "tune"
    assert status == again
    assert "`kind` (tune before, sweep now)" in other
