# SPDX-License-Identifier: Apache-2.0
"""What LightningCLI writes into its configs can be loaded again, whatever the arguments are."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fits import classifier
from lightning.pytorch.cli import LightningCLI

from noisescale import BatchSizeScheduler, NoiseScaleMonitor

# What cannot be written is a warning there: as an error it would make jsonargparse go on to another
# type, and hide what is to be seen.
pytestmark = pytest.mark.filterwarnings("ignore")


def count(batch: Any) -> float:
    """How many examples are in a batch."""
    return float(len(batch[0]))


def in_pairs(batch: Any) -> list[int]:
    """The group of each row."""
    return [row // 2 for row in range(len(batch[0]))]


def last_part(name: str) -> str:
    """The group of a parameter: weights or biases."""
    return name.split(".")[-1]


def always_16(noise_scale: Any, plan: Any, progress: Any) -> float:
    """A policy."""
    return 16.0


HERE = __name__

MONITOR = {
    "window": 100,
    "every_n_steps": 2,
    "cost": 0.02,
    "batch_size_fn": f"{HERE}.count",
    "weight_fn": f"{HERE}.count",
    "unit": "rows",
    "groups": {"ends": ["net.0.weight", "net.2.bias"], "others": "net"},
    "confidence": 0.9,
    "small_batch": "example",
    "layers": "normalization",
    "extra": [],
    "report": True,
    "name": "wide",
}
SCHEDULER = {
    "policy": "ratio",
    "min_batch_size": 8,
    "max_batch_size": 64,
    "lr_scaling": "sqrt",
    "monitor": {"class_path": "noisescale.NoiseScaleMonitor", "init_args": {"name": "inner"}},
    "max_device_batch_size": 16,
    "progress": "examples",
    "confidence": 0.9,
    "decide_every_n_steps": 5,
    "max_examples": 4000,
}
HALVES = {
    "small_batch": "half",
    "cut": ["net.0", "net.2"],
    "every_n_steps": "auto",
    "group_fn": f"{HERE}.in_pairs",
}
FUNCTIONS = {"policy": "ratio", "weight_fn": f"{HERE}.count", "group_fn": f"{HERE}.in_pairs"}
DEFAULTS: dict[str, Any] = {}


class WithoutFitting(LightningCLI):
    """Makes the Trainer and its callbacks, as `python train.py fit` does before it fits."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def program(*words: Any) -> WithoutFitting:
    return WithoutFitting(
        type(classifier()), args=["fit", *map(str, words)], seed_everything_default=False
    )


def options_of(cli: WithoutFitting) -> list[Any]:
    monitor, scheduler = cli.trainer.callbacks[:2]
    inner = scheduler._monitor
    return [
        [
            m and (m._options, m._batch_size_fn, m._weight_fn, m._group_fn, m._report, m.name)
            for m in (monitor, inner)
        ],
        scheduler._options,
        scheduler._max_examples,
        scheduler._progress,
        scheduler._confidence,
    ]


@pytest.mark.parametrize(
    ("monitor", "scheduler"),
    [
        (MONITOR, SCHEDULER),
        (DEFAULTS, DEFAULTS),
        (HALVES, FUNCTIONS),
        ({"window": "auto", "groups": f"{HERE}.last_part"}, {"policy": {0: 16, 100: 32}}),
        ({"groups": {"ends": ["net.0", "net.2"]}}, {"policy": f"{HERE}.always_16"}),
        (DEFAULTS, {"policy": {"0": 16, "0.5k": 32}, "max_examples": "2k"}),
    ],
)
def test_a_saved_config_makes_the_same_callbacks_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    monitor: dict[str, Any],
    scheduler: dict[str, Any],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    callbacks = [
        {"class_path": "noisescale.NoiseScaleMonitor", "init_args": monitor},
        {"class_path": "noisescale.BatchSizeScheduler", "init_args": scheduler},
    ]
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    written = tmp_path / "written.yaml"
    written.write_text(yaml.safe_dump({"trainer": {**quiet, "callbacks": callbacks}}))

    with pytest.raises(SystemExit):
        program("--config", written, "--print_config")
    saved = tmp_path / "saved.yaml"
    saved.write_text(capsys.readouterr().out)
    first, second = program("--config", written), program("--config", saved)

    kinds = [type(callback) for callback in second.trainer.callbacks[:2]]
    assert kinds == [NoiseScaleMonitor, BatchSizeScheduler]
    assert options_of(second) == options_of(first)
    assert "Unable to serialize" not in saved.read_text()
    of_config = yaml.safe_load(saved.read_text())["trainer"]["callbacks"]
    for given, kept in zip((monitor, scheduler), of_config, strict=True):
        for name in given.keys() - {"monitor", "policy"}:
            assert kept["init_args"][name] == given[name]


def test_every_argument_of_the_callbacks_is_tried_here() -> None:
    for cls, tried in (
        (NoiseScaleMonitor, MONITOR | HALVES),
        (BatchSizeScheduler, SCHEDULER | FUNCTIONS),
    ):
        assert tried.keys() == inspect.signature(cls).parameters.keys()


@pytest.mark.parametrize(
    ("written", "kind"),
    [({0: 16, 100: 32}, int), ({"0": 16, "100": 32}, str)],
    ids=["steps", "examples"],
)
def test_numbers_in_quotes_are_examples_in_a_config_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Any, kind: type
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    callback = {"class_path": "noisescale.BatchSizeScheduler", "init_args": {"policy": written}}
    config = tmp_path / "written.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "callbacks": [callback]}}))

    (scheduler, *_) = program("--config", config).trainer.callbacks

    assert {type(key) for key in scheduler._options.policy} == {kind}
