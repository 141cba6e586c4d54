# SPDX-License-Identifier: Apache-2.0
"""The batch of a run on other numbers of devices."""

from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from logged_runs import log_run
from refused import refused
from reported_runs import history

from noisescale import Plan, predict
from noisescale.history.history import as_history
from noisescale.prediction.prediction import Prediction
from noisescale.prediction.same_batch import plan_on
from noisescale.refusal import Refusal
from noisescale.report.document import Statement
from noisescale.step_time import DeviceTimes, StepTiming


def on(devices: Any, run: Any = None, **options: Any) -> Prediction:
    run = history() if run is None else run  # 64 examples, 32 on each of two devices
    return predict(run, devices=devices, same_batch=True, **options)


def parts_of(p: Prediction) -> dict[str, Statement]:
    (one,) = (each for each in p.document().answers if each.label.startswith("Same batch"))
    return {part.label: part for part in one.parts} | {"": one}


def test_fewer_devices_accumulate_the_same_micro_batches() -> None:
    p = on(1)

    (shared,) = p.same_batch
    assert shared.plan == Plan(32.0, 2, 1)
    said = parts_of(p)
    assert said[""].sentence.startswith("64 examples are 2 micro-batches of 32")
    assert "learning rate, its schedule" in said["Stays"].sentence
    assert "32 examples at a time, not 64" in said["Differs"].sentence  # over all devices
    assert "still see 32 examples" in said["Differs"].sentence


def test_more_devices_have_smaller_micro_batches_and_it_says_what_that_changes() -> None:
    p = on(8)

    assert p.same_batch[0].plan == Plan(8.0, 1, 8)
    differs = parts_of(p)["Differs"].sentence
    assert "see 8 examples at a time, not 32" in differs
    assert "mean over the tokens" in differs
    assert "SyncBatchNorm" not in differs  # 8 x 8 rows, as 2 x 32 before
    assert "More devices" not in [one.label for one in p.document().answers]


def test_every_plan_has_the_batch_and_the_largest_micro_batches_and_the_rest_is_refused() -> None:
    """By trying all numbers of micro-batches and all their sizes."""
    for size, times, own_devices, devices in product(
        (1, 3, 8, 12), (1, 2, 3), (1, 2, 4), range(1, 9)
    ):
        own = Plan(float(size), times, own_devices)
        batch = size * times * own_devices
        fitting = [b for b in range(1, size + 1) if batch % (b * devices) == 0]

        if fitting:
            most = max(fitting)
            assert plan_on(own, devices) == Plan(float(most), batch // (most * devices), devices)
            continue
        with refused("devices", got=str(devices)) as raised:
            plan_on(own, devices)
        remedy = cast(Refusal, raised.value).remedy
        for other in remedy.removeprefix("Give ").rstrip(".").split(" or "):
            assert plan_on(own, int(other)).batch_size == batch


def test_a_given_largest_micro_batch_counts_up_and_down() -> None:
    assert on(1, max_device_batch_size=64).same_batch[0].plan == Plan(64.0, 1, 1)
    assert on(1, max_device_batch_size=10).same_batch[0].plan == Plan(8.0, 8, 1)
    assert on(1, max_device_batch_size=0.5).same_batch[0].plan == Plan(1.0, 64, 1)


def test_a_mean_of_ragged_batches_is_shared_in_its_own_micro_batches() -> None:
    run = history(batch_size=61.5, accumulation=2)

    assert on(1, run).same_batch[0].plan == Plan(61.5 / 4, 4, 1)
    with refused("devices", got="3", remedy="Give 2 or 4."):
        on(3, run)
    with refused("max_device_batch_size", got="8", requirement="at least 15.4"):
        on(1, run, max_device_batch_size=8)
    assert on(1, run, max_device_batch_size=99).same_batch[0].plan == Plan(61.5 / 4, 4, 1)


@pytest.mark.parametrize("devices", [0, -1, 1.5])
def test_numbers_that_are_none_of_devices_are_refused(devices: float) -> None:
    with refused("devices", got=f"[{devices!r}]"):
        on(devices)


def test_a_batch_that_cannot_be_shared_and_missing_arguments_are_refused() -> None:
    with refused("devices", got="3", requirement="share a batch of 64", remedy="Give 2 or 4."):
        on([1, 3])
    with refused("same_batch", got="it alone", remedy="`devices`"):
        predict(history(), same_batch=True)
    sizes = history()
    sizes["examples"][20:] += 64 * sizes["step"][:20]
    sizes["batch_size"][20:] = 128.0
    sizes["devices"][20:] = 4.0
    with refused("same_batch", remedy="kept both"):
        on(1, sizes)


def test_the_time_is_said_where_such_steps_were_timed_and_else_how_to_time_them(
    tmp_path: Path,
) -> None:
    timings = tuple(StepTiming(32, k, 1, 1, 0.1 * k) for k in (1, 2, 4))
    DeviceTimes(timings, "cpu", "2.9").write(file := tmp_path / "times.json")

    p = on(1, step_times=file)

    (shared,) = p.same_batch
    assert shared.basis == "timed"
    assert shared.seconds_per_step.value == pytest.approx(0.2, rel=0.05)
    assert shared.hours.value == pytest.approx(2000 * shared.seconds_per_step.value / 3600)
    assert parts_of(p)["Time"].sentence.endswith("as timed")
    own = on(2).same_batch[0]
    assert (own.seconds_per_step.value, own.basis) == (pytest.approx(0.5), "timed")
    log_run(run := tmp_path / "a run")
    untimed = parts_of(on(1, run))["Time"]
    assert untimed.verdict == "unknown"
    assert f"noisescale profile train.py:make --run '{run}' --devices 1" in untimed.sentence
    # By itself `profile --run` times no device batch below half of the run's.
    assert untimed.sentence.endswith("--devices 1")
    few = parts_of(on(32, run))["Time"].sentence
    assert few.endswith("--devices 32 --device-batch-sizes 2")


def test_what_to_set_is_said_in_the_words_of_the_loop() -> None:
    run = as_history(history())
    for loop, words in {
        "lightning": "`accumulate_grad_batches=2` and 32 in the loader",
        "transformers": "`gradient_accumulation_steps=2` and `per_device_train_batch_size=32`",
        "own": "2 micro-batches of 32",
    }.items():
        run.loop = loop
        assert words in parts_of(on(1, run))[""].sentence


@pytest.mark.parametrize(
    ("loop", "devices", "how"),
    [
        ("transformers", 1, "it: noisescale profile train.py:make --run RUN"),
        ("transformers", 4, "torchrun --nproc-per-node 4 -m noisescale profile train.py:make"),
        ("own", 4, "train 100 steps there"),
    ],
)
def test_how_steps_are_timed_is_a_command_for_the_loop(loop: str, devices: int, how: str) -> None:
    run = as_history(history())
    run.loop = loop

    assert how in parts_of(on(devices, run))["Time"].sentence


def test_a_batch_of_tokens_says_nothing_of_the_size_of_the_loader() -> None:
    run = as_history(history())
    run.loop = "lightning"

    said = parts_of(on(1, run, unit="tokens"))[""].sentence

    assert said.endswith("set `accumulate_grad_batches=2`")


def test_devices_beyond_the_batch_are_refused_also_beside_others() -> None:
    with refused("devices", got="100000", remedy="Give 64."):
        on(iter([1, 100_000]))


def test_json_has_the_plans() -> None:
    found = on([1, 2]).to_dict()["same_batch"]

    keys = ("batch_size", "devices", "device_batch_size", "accumulation", "basis")
    assert [[one[key] for key in keys] for one in found] == [
        [64.0, 1, 32.0, 2, "assumed"],
        [64.0, 2, 32.0, 1, "timed"],
    ]
    assert predict(history()).to_dict()["same_batch"] == []
