# SPDX-License-Identifier: Apache-2.0
"""What LightningCLI writes into its configs can be loaded again, whatever the arguments are."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fits import classifier
from tiers import slow

from noisescale import BatchSizeScheduler, NoiseScaleMonitor

# What cannot be written is a warning there: as an error it would make jsonargparse go on to another
# type, and hide what is to be seen.
pytestmark = pytest.mark.filterwarnings("ignore")


def count(batch: Any) -> float:
    return float(len(batch[0]))


def in_pairs(batch: Any) -> list[int]:
    return [row // 2 for row in range(len(batch[0]))]


def last_part(name: str) -> str:
    return name.split(".")[-1]


def always_16(noise_scale: Any, plan: Any, progress: Any) -> float:
    return 16.0


HERE = __name__

MONITOR = {
    "window": 100,
    "every_n_steps": 2,
    "max_overhead": 0.02,
    "batch_size_fn": f"{HERE}.count",
    "weight_fn": f"{HERE}.count",
    "unit": "rows",
    "groups": {"ends": ["net.0.weight", "net.2.bias"], "others": "net"},
    "confidence": 0.9,
    "small_batch": "micro_batch",
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
    "backward_twice": True,
    "every_n_steps": "auto",
    "group_fn": f"{HERE}.in_pairs",
}
FUNCTIONS = {
    "policy": "ratio",
    "weight_fn": f"{HERE}.count",
    "group_fn": f"{HERE}.in_pairs",
    "batch_size_fn": f"{HERE}.count",
}
DEFAULTS: dict[str, Any] = {}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Makes the callbacks of a config."""
    from lightning.pytorch.cli import LightningCLI

    class WithoutFitting(LightningCLI):
        """Makes the Trainer and its callbacks, as `python train.py fit` does before it fits."""

        def _run_subcommand(self, subcommand: str) -> None:
            pass

    monkeypatch.setattr(sys, "argv", ["train.py"])
    module = type(classifier())

    def run(*words: Any) -> list[Any]:
        arguments = ["fit", "--config", *map(str, words)]
        cli = WithoutFitting(module, args=arguments, seed_everything_default=False)
        return cli.trainer.callbacks

    return run


def config(path: Path, **arguments: dict[str, Any]) -> Path:
    """Write one with these callbacks."""
    callbacks = [{"class_path": f"noisescale.{n}", "init_args": a} for n, a in arguments.items()]
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    path.write_text(yaml.safe_dump({"trainer": {**quiet, "callbacks": callbacks}}))
    return path


def options_of(monitor: Any, scheduler: Any, *_: Any) -> list[Any]:
    return [
        [
            m and (m._options, m._batch_size_fn, m._weight_fn, m._group_fn, m._report, m.name)
            for m in (monitor, scheduler._monitor)
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
        (HALVES, FUNCTIONS),
        slow(DEFAULTS, DEFAULTS),
        slow({"window": "auto", "groups": f"{HERE}.last_part"}, {"policy": {0: 16, 100: 32}}),
        slow({"groups": {"ends": ["net.0", "net.2"]}}, {"policy": f"{HERE}.always_16"}),
        slow(DEFAULTS, {"policy": {"0": 16, "0.5k": 32}, "max_examples": "2k"}),
    ],
)
def test_a_saved_config_makes_the_same_callbacks_again(
    program: Callable[..., list[Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monitor: dict[str, Any],
    scheduler: dict[str, Any],
) -> None:
    given = {"NoiseScaleMonitor": monitor, "BatchSizeScheduler": scheduler}
    written, saved = config(tmp_path / "written.yaml", **given), tmp_path / "saved.yaml"

    with pytest.raises(SystemExit):
        program(written, "--print_config")
    saved.write_text(capsys.readouterr().out)
    first, second = program(written), program(saved)

    assert [type(callback) for callback in second[:2]] == [NoiseScaleMonitor, BatchSizeScheduler]
    assert options_of(*second) == options_of(*first)
    assert "Unable to serialize" not in saved.read_text()
    of_config = yaml.safe_load(saved.read_text())["trainer"]["callbacks"]
    for arguments, kept in zip(given.values(), of_config, strict=True):
        for name in arguments.keys() - {"monitor", "policy"}:
            assert kept["init_args"][name] == arguments[name]


def test_every_argument_of_the_callbacks_is_tried_here() -> None:
    for cls, tried in (
        (NoiseScaleMonitor, MONITOR | HALVES),
        (BatchSizeScheduler, SCHEDULER | FUNCTIONS),
    ):
        assert tried.keys() == inspect.signature(cls).parameters.keys()


@pytest.mark.parametrize(
    ("policy", "kind"), [slow({0: 16, 100: 32}, int), ({"0": 16, "100": 32}, str)]
)
def test_numbers_in_quotes_are_examples_and_others_steps_in_a_config_too(
    program: Callable[..., list[Any]], tmp_path: Path, policy: Any, kind: type
) -> None:
    path = config(tmp_path / "written.yaml", BatchSizeScheduler={"policy": policy})

    scheduler, *_ = program(path)

    assert {type(key) for key in scheduler._options.policy} == {kind}
