# SPDX-License-Identifier: Apache-2.0
import math
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from brute_force import expected, gradient_of, micro_batch, whole
from fits import (
    FEATURES,
    NotFinite,
    both_loggers,
    classifier,
    data,
    fit,
    fit_here,
    loader,
    loss_of,
    network,
)
from lightning.pytorch.loggers import CSVLogger
from refused import refused
from tiers import slow
from torch.utils.data import DataLoader, DistributedSampler

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.estimation.moments import GradientMoments
from noisescale.history.increments import INCREMENTS, SQUARES, SUMS, Increments

RESOLVED = {f"noise_scale/{key}" for key in ("simple", "simple_low", "simple_high", "efficiency")}
KEYS = RESOLVED | {
    f"noise_scale/{key}"
    for key in (
        "lower_bound",
        "grad_sq_norm",
        "noise_trace",
        "batch_size",
        "seconds_per_step",
        "skipped_steps",
    )
}


def simulated_increments(ranks: int, accumulate: int, tokens: int) -> list[dict[str, float]]:
    """The run of `fit(...)` in one process and float64: what each step adds to a history.

    100 examples in batches of 8 a rank, dealt out as Lightning's default sampler does it (at 3
    ranks two of them twice). Each loss is divided by `accumulate`, also in the short last window.
    """
    net = network().double()
    x, y = data().tensors
    dealt = [list(DistributedSampler(data(), ranks, r)) for r in range(ranks)]
    increments = Increments()
    steps: list[dict[str, float]] = []
    for start in range(0, len(dealt[0]), 8 * accumulate):
        parts, size, losses = [], 0, []
        for indices in dealt:
            window = indices[start : start + 8 * accumulate]
            micros = []
            for rows in (window[i : i + 8] for i in range(0, len(window), 8)):
                gradient = gradient_of(net, lambda net, i=rows: loss_of(net, (x[i].double(), y[i])))
                micros.append(micro_batch(gradient, len(rows)))
                losses.append(len(rows) * loss_of(net, (x[rows].double(), y[rows])).item())
            parts.append(whole(micros))
            size += len(window)
        grad_sq_norm, noise_trace = expected(parts).moments
        moments = GradientMoments(grad_sq_norm, tokens * noise_trace)
        increments.add(moments, tokens * size, loss=sum(losses) / size)
        steps.append(increments.take())
        mean = torch.stack([part.gradient for part in parts]).mean(0) * len(micros) / accumulate
        vector = torch.nn.utils.parameters_to_vector(net.parameters()) - 0.1 * mean
        torch.nn.utils.vector_to_parameters(vector.detach(), net.parameters())
    return steps


@pytest.mark.parametrize(
    ("package", "ranks", "accumulate", "tokens"),
    [
        (lightning.pytorch, 2, 3, 5),
        slow(pytorch_lightning, 2, 1, 1),
        slow(lightning.pytorch, 3, 2, 1),
    ],
)
def test_moments_are_those_of_a_simulation_in_float64(
    package: ModuleType, ranks: int, accumulate: int, tokens: int
) -> None:
    """Unequal last batches and a short last window included; each example has some tokens."""
    results = fit(
        NoiseScaleMonitor(batch_size_fn=lambda batch: tokens * len(batch[0]), unit="tokens"),
        ranks=ranks,
        package=package,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
    )

    simulated = simulated_increments(ranks, accumulate, tokens)
    for result in results:
        history = result["history"]
        for name in INCREMENTS:
            steps = [step[name] for step in simulated]
            largest = np.nanmax(np.abs(steps))
            near = pytest.approx(steps, rel=2e-5, abs=2e-5 * largest, nan_ok=True)
            assert history[name] == near, name
        assert history["examples"][-1] == math.ceil(100 / ranks) * ranks * tokens
        assert history["batch_size"][0] == 8 * ranks * accumulate * tokens
        batches = math.ceil(100 / ranks / 8)
        full, over = divmod(batches, accumulate)
        assert history["accumulation"] == [accumulate] * full + [over] * (over > 0)
        assert set(history["devices"]) == {ranks}
        assert repr(result["noise_scale"]) == repr(results[0]["noise_scale"])
        low = result["metrics"]["noise_scale/lower_bound"]
        assert low == pytest.approx(result["noise_scale"].low)
    assert results[0]["noise_scale"].unit == "tokens"


def alone(monitor: NoiseScaleMonitor, *callbacks: Any, **options: Any) -> Any:
    """One process: 7 steps of two batches of 8, of which the last one has a batch of 4."""
    return fit_here(monitor, *callbacks, accumulate_grad_batches=2, **options)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of the noise scale: a value for each step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "noise" in tag]
    shown = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}
    assert all(math.isfinite(value) for tag in shown.values() for value in tag.values())
    return shown


def test_every_logger_gets_the_documented_keys_at_lightnings_own_steps(tmp_path: Path) -> None:
    monitor, loggers = NoiseScaleMonitor(every_n_steps=1), both_loggers(tmp_path)

    fitting = alone(monitor, train_loader=loader(30, 1000), logger=loggers, log_every_n_steps=7)

    shown = scalars(tmp_path / "board")
    assert shown.keys() == KEYS
    assert shown["noise_scale/batch_size"] == {6: 60, 13: 60, 16: 40}
    header = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {name for name in header if name.startswith("noise_scale/")} == KEYS
    assert fitting.callback_metrics.keys() >= KEYS
    columns = {
        "step": [7, 14, 17],
        "examples": [420, 840, 1000],
        "increment_measured_steps": [6, 7, 3],  # the first step sets the level of the next ones
        "increment_weight": [360, 420, 160],
    }
    assert {name: monitor.history[name].tolist() for name in columns} == columns


def test_unresolved_steps_log_a_lower_bound_and_no_point_estimate(tmp_path: Path) -> None:
    """TensorBoard draws a band only if value, low and high have the very same steps."""
    monitor, loggers = NoiseScaleMonitor(every_n_steps=1), both_loggers(tmp_path)

    alone(monitor, train_loader=loader(30, 1200), logger=loggers, log_every_n_steps=1)

    shown = scalars(tmp_path / "board")
    resolved = np.flatnonzero(np.isfinite(monitor.history["high"])).tolist()
    assert 0 < len(resolved) < 20
    assert all(list(shown[key]) == resolved for key in RESOLVED)
    assert list(shown["noise_scale/lower_bound"]) == list(range(20))


def test_sums_of_the_history_are_those_of_every_measured_step(recorded: list[StepNorms]) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=2)
    alone(monitor, train_loader=loader(8, 92), log_every_n_steps=1)

    assert [norms.examples for norms in recorded] == [16, 16, 16]
    increments = Increments()
    for number, norms in enumerate(recorded):
        increments.add(norms.moments(), 16, steps=1 if number == 0 else 2)
        taken = increments.take()
        for name, expected_sum in ((name, taken[name]) for name in (*SUMS, *SQUARES)):
            found = monitor.history[name][number]
            assert found == pytest.approx(expected_sum, rel=1e-8), name


def test_values_agree_with_one_another() -> None:
    monitor = NoiseScaleMonitor(window=50, every_n_steps=1)
    fitting = alone(monitor, log_every_n_steps=1)

    scale = monitor.noise_scale
    metrics = {
        k.removeprefix("noise_scale/"): v.item() for k, v in fitting.callback_metrics.items()
    }
    assert metrics["simple"] == pytest.approx(scale.value)
    assert metrics["simple_low"] == pytest.approx(scale.low)
    assert scale.value == pytest.approx(scale.noise_trace / scale.grad_sq_norm)
    assert metrics["efficiency"] == pytest.approx(scale.value / (scale.value + 4))
    assert metrics["skipped_steps"] == 0
    assert 0 < metrics["seconds_per_step"] < 10
    shown = fitting.progress_bar_metrics["noise_scale"]
    assert shown == scale.short()
    assert len(shown) <= 7


@pytest.mark.parametrize("value", [math.nan, slow(math.inf)])
def test_a_non_finite_gradient_on_one_rank_is_skipped_on_all(value: float) -> None:
    def bad(fitting: Any) -> bool:
        return fitting.global_rank == 1 and fitting.fit_loop.batch_idx in (2, 3)

    for result in fit(NoiseScaleMonitor(), NotFinite(bad, value)):
        assert result["metrics"]["noise_scale/skipped_steps"] == 2
        assert result["meter"]["counts"]["steps"] == 7
        assert result["meter"]["counts"]["skipped_steps"] == 2
        steps = result["meter"]["estimates"]["whole"]["recent"]["steps"]
        assert np.isfinite(steps).all()
        assert [int(row[0]) for row in steps] == [2, 5, 6, 7]  # the first sets the level


@pytest.mark.parametrize(
    ("every", "columns"),
    [
        (3, {"step": [1, 4, 7], "examples": [16, 64, 100]}),
        (
            5,  # the last row is of the last step, measured or not
            {
                "step": [1, 6, 7],
                "examples": [16, 96, 100],
                "increment_measured_steps": [0, 1, 0],  # the first sets the level
                "increment_weight": [0, 5 * 16, 0],
                "measured_steps": [1, 2, 2],
            },
        ),
    ],
)
def test_every_n_steps_measures_fewer_steps_and_counts_all_examples(
    every: int, columns: dict[str, list[float]]
) -> None:
    monitor = NoiseScaleMonitor(every_n_steps=every)
    alone(monitor, log_every_n_steps=1)

    assert {name: monitor.history[name].tolist() for name in columns} == columns
    (saved,) = monitor.state_dict()["optimizers"]
    assert saved["meter"]["counts"]["steps"] == 7
    if every == 3:
        assert monitor.noise_scale.steps == pytest.approx(20**2 / (16**2 + 4**2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 1),
        ("confidence", 95),
        ("every_n_steps", 2.5),
        ("unit", ""),
        ("batch_size_fn", 32),
    ],
)
def test_wrong_values_are_refused_at_construction(name: str, value: Any) -> None:
    kind = TypeError if name == "batch_size_fn" else ValueError
    with refused(name, error=kind, got=repr(value)):
        NoiseScaleMonitor(**{name: value})


@pytest.mark.parametrize(
    "count", [lambda _: -1, lambda batch: (batch[1] >= 0).sum()], ids=["negative", "tensor"]
)
def test_a_batch_size_that_is_none_stops_the_fit(count: Any) -> None:
    with refused("batch_size_fn", requirement="return a number"):
        alone(NoiseScaleMonitor(batch_size_fn=count))


def test_a_batch_without_examples_skips_the_step() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=1, batch_size_fn=lambda batch: len(batch[0]) % 8)
    fitting = alone(monitor)

    assert fitting.callback_metrics["noise_scale/skipped_steps"] == 6
    assert monitor.history["measured_steps"][-1] == 1


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_one_process_that_accumulates_is_measured(package: ModuleType) -> None:
    monitor = NoiseScaleMonitor(window=10)
    fitting = fit_here(
        monitor, package=package, accumulate_grad_batches=4, max_epochs=3, log_every_n_steps=1
    )

    # 13 batches: windows of 4, 4, 4 and 1, which is measured by its halves.
    assert fitting.callback_metrics["noise_scale/skipped_steps"] == 0
    assert monitor.history["examples"][-1] == 300
    assert monitor.noise_scale.low > 0
    assert not any(p._backward_hooks for p in fitting.lightning_module.parameters())


@pytest.mark.parametrize(
    ("limits", "last"),
    [
        ({"max_epochs": 3}, 21),
        ({"max_epochs": 3, "max_steps": 9}, 9),
        ({"max_epochs": -1, "max_steps": 9}, 9),
        ({"max_epochs": 3, "max_steps": 9, "limit_train_batches": 2}, 3),
    ],
)
def test_the_last_step_of_the_fit_is_known(limits: dict[str, Any], last: int) -> None:
    """100 examples in batches of 8, two of them in a step."""
    monitor = NoiseScaleMonitor()

    fitting = fit_here(monitor, accumulate_grad_batches=2, **limits)

    assert monitor.meter is not None
    assert monitor.meter.last_step == fitting.global_step == last


def test_a_monitor_that_is_followed_measures_more_and_says_what_follows_if_it_cannot() -> None:
    measured = []
    for followed in (False, True):
        monitor = NoiseScaleMonitor()
        if followed:
            monitor.follow(consequence="The batch size stays.")
        fit_here(monitor, train_loader=loader(8, 8 * 100), log_every_n_steps=10)
        measured.append(monitor.meters[0].meter.measured_steps)
    normalized = classifier(net=torch.nn.Sequential(torch.nn.BatchNorm1d(FEATURES), network()))
    monitor.follow(consequence="The batch size stays.")
    with pytest.warns(UserWarning, match=r"Training goes on.* The batch size stays\."):
        fit_here(monitor, model=normalized, train_loader=loader(8, 80))

    assert measured[0] < measured[1] < 50


def test_a_trainer_that_never_logs_keeps_its_loggers_empty(tmp_path: Path) -> None:
    monitor = NoiseScaleMonitor()
    alone(monitor, logger=CSVLogger(tmp_path, name="csv", version=""), log_every_n_steps=0)

    assert not (tmp_path / "csv" / "metrics.csv").exists()
    assert monitor.history["step"].tolist() == [7]


def test_its_repr_has_what_was_given_and_the_last_row() -> None:
    monitor = NoiseScaleMonitor(window=200)
    assert repr(monitor) == "NoiseScaleMonitor(window=200)"
    named = NoiseScaleMonitor(batch_size_fn=len, report=True, name="wide")
    given = "batch_size_fn=<built-in function len>, report=True, name='wide'"
    assert repr(named) == f"NoiseScaleMonitor({given})"

    alone(monitor)

    assert re.fullmatch(
        r"NoiseScaleMonitor\(window=200\): (above )?[\d.,]+ examples .*at step \d+.*", repr(monitor)
    )


def test_a_loader_that_does_not_shuffle_is_told_once_by_name() -> None:
    heard = {}
    for shuffled in (False, True):
        loaded = DataLoader(data(40), batch_size=8, shuffle=shuffled)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            alone(NoiseScaleMonitor(), train_loader=loaded, max_epochs=2)
        heard[shuffled] = [str(w.message) for w in caught if "train loader" in str(w.message)]

    assert [len(told) for told in heard.values()] == [1, 0]
    assert "(SequentialSampler)" in heard[False][0]
    assert "`DataLoader(..., shuffle=True)`" in heard[False][0]
