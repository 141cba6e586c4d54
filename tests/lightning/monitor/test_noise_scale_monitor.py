# SPDX-License-Identifier: Apache-2.0
import copy
import math
import re
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from fits import (
    both_loggers,
    classifier,
    data,
    fit,
    loader,
    loss_of,
    monitored,
    network,
    opaque_network,
    trainer,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DistributedSampler

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

KEYS = {
    f"noise_scale/{key}"
    for key in (
        "simple",
        "simple_low",
        "simple_high",
        "lower_bound",
        "grad_sq_norm",
        "noise_trace",
        "batch_size",
        "efficiency",
        "seconds_per_step",
        "skipped_steps",
    )
}


def simulated_moments(ranks: int, accumulate: int) -> dict[str, list[float]]:
    """The run of `fit(...)` in one process and float64: averages of the moments at every step.

    100 examples in batches of 8 a rank, dealt out as Lightning's default sampler does it (at 3
    ranks two of them twice). Each loss is divided by `accumulate`, also in the short last window.
    """
    net = network().double()
    x, y = data().tensors
    dealt = [torch.tensor(list(DistributedSampler(data(), ranks, r))) for r in range(ranks)]
    batches = [
        [(x[indices[i : i + 8]].double(), y[indices[i : i + 8]]) for indices in dealt]
        for i in range(0, len(dealt[0]), 8)
    ]
    weights: list[float] = []
    noises: list[float] = []
    signals: list[float] = []
    averages: dict[str, list[float]] = {"grad_sq_norm": [], "noise_trace": []}
    for start in range(0, len(batches), accumulate):
        micros = batches[start : start + accumulate]
        gradients = []
        for rank in range(ranks):
            plain = copy.deepcopy(net)
            for micro in micros:
                (loss_of(plain, micro[rank]) / accumulate).backward()
            gradients.append([p.grad for p in plain.parameters()])
        mean = [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]
        mean_over_window = accumulate / len(micros)
        small = np.mean([sum(g.square().sum().item() for g in part) for part in gradients])
        big = sum(g.square().sum().item() for g in mean)
        a = np.mean(
            [sum(1 / len(m[r][0]) for m in micros) / len(micros) ** 2 for r in range(ranks)]
        )
        c = a / ranks
        noises.append(mean_over_window**2 * (small - big) / (a - c))
        signals.append(mean_over_window**2 * (a * big - c * small) / (a - c))
        weights.append(sum(len(part[0]) for m in micros for part in m))
        averages["noise_trace"].append(float(np.average(noises, weights=weights)))
        averages["grad_sq_norm"].append(float(np.average(signals, weights=weights)))
        with torch.no_grad():
            for p, g in zip(net.parameters(), mean, strict=True):
                p -= 0.1 * g
    return averages


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (2, 3), (3, 2)])
def test_moments_are_those_of_a_simulation_in_float64(
    package: Any, ranks: int, accumulate: int
) -> None:
    """Unequal last batches and a short last window included."""
    results = fit(
        NoiseScaleMonitor(),
        ranks=ranks,
        package=package,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
    )

    expected = simulated_moments(ranks, accumulate)
    for result in results:
        history = result["history"]
        for name, averages in expected.items():
            found = np.divide(history[f"sum_{name}"], history["sum_weight"])
            assert found == pytest.approx(averages, rel=2e-5)
        assert history["examples"][-1] == math.ceil(100 / ranks) * ranks


def test_every_logger_gets_the_documented_keys_at_lightnings_own_steps(tmp_path: Any) -> None:
    loggers = both_loggers(tmp_path)

    (result, _) = fit(
        NoiseScaleMonitor(every_n_steps=1),
        train_loader=loader(30, 1000),
        logger=loggers,
        log_every_n_steps=7,
    )

    events = EventAccumulator(str(tmp_path / "board")).Reload()
    logged = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if "noise" in tag}
    assert logged.keys() == KEYS
    assert [event.step for event in logged["noise_scale/batch_size"]] == [6, 13, 16]
    assert [event.value for event in logged["noise_scale/batch_size"]] == [60, 60, 40]
    assert all(math.isfinite(event.value) for tag in logged for event in logged[tag])
    header = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {name for name in header if name.startswith("noise_scale/")} == KEYS
    assert result["metrics"].keys() >= KEYS
    history = result["history"]
    assert history["step"] == [7, 14, 17]
    assert history["examples"] == [420, 840, 1000]
    # The first step only sets the level of the next ones.
    assert history["increment_measured_steps"] == [6, 7, 3]
    assert history["increment_weight"] == [360, 420, 160]


def test_what_a_step_was_made_of_is_in_the_history() -> None:
    """Two ranks, windows of three batches of 4, the last one of two: 20 a rank in 5 batches."""
    results = fit(
        NoiseScaleMonitor(every_n_steps=1),
        train_loader=loader(4, 40),
        accumulate_grad_batches=3,
        log_every_n_steps=1,
    )

    for result in results:
        history = result["history"]
        assert history["devices"] == [2, 2]
        assert history["accumulation"] == [3, 2]
        assert history["examples"] == [24, 40]


def test_sums_of_the_history_are_those_of_every_measured_step(
    recorded: list[StepNorms],
) -> None:
    """Every second step of one process that accumulates two batches; the last one is short."""

    def history_and_steps(fitting: Any, module: Any) -> Any:
        history = monitored(fitting, module)["history"]
        return history, [(norms.examples, norms.moments()) for norms in recorded]

    ((history, steps),) = fit(
        NoiseScaleMonitor(every_n_steps=2),
        ranks=1,
        train_loader=loader(8, 92),
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        results=history_and_steps,
    )

    weights, moments = zip(*steps, strict=True)
    assert weights == (16, 16, 16)
    assert history["sum_weight"][-1] == sum(weights)
    for name in ("grad_sq_norm", "noise_trace"):
        expected = sum(w * getattr(m, name) for w, m in zip(weights, moments, strict=True))
        assert history[f"sum_{name}"][-1] == pytest.approx(expected, rel=1e-12)


def test_values_agree_with_one_another() -> None:
    (result, other) = fit(NoiseScaleMonitor(window=50), log_every_n_steps=2)

    metrics, scale = result["metrics"], result["noise_scale"]
    assert metrics["noise_scale/simple"] == pytest.approx(scale.value)
    assert metrics["noise_scale/simple_low"] == pytest.approx(scale.low)
    assert scale.value == pytest.approx(scale.noise_trace / scale.grad_sq_norm)
    assert metrics["noise_scale/efficiency"] == pytest.approx(scale.value / (scale.value + 4))
    assert metrics["noise_scale/skipped_steps"] == 0
    assert 0 < metrics["noise_scale/seconds_per_step"] < 10
    assert other["noise_scale"] == scale


class Spoiler(lightning.pytorch.Callback):
    """Make one rank's gradient non-finite at some batches; the update leaves such steps out."""

    def __init__(self, rank: int, batches: set[int], value: float) -> None:
        self.rank, self.batches, self.value = rank, batches, value
        self.batch = -1

    def on_fit_start(self, fitting: Any, module: Any) -> None:
        def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
            bad = fitting.global_rank == self.rank and self.batch in self.batches
            return torch.full_like(gradient, self.value) if bad else None

        next(module.parameters()).register_hook(spoil)

        def leave_out_non_finite(optimizer: Any, *_: Any, **__: Any) -> None:
            for p in module.parameters():
                p.grad.nan_to_num_(0, 0, 0)

        module.configure_gradient_clipping = leave_out_non_finite

    def on_train_batch_start(self, fitting: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_gradient_on_one_rank_is_skipped_on_all(value: float) -> None:
    def parameters_and_monitor(fitting: Any, module: Any) -> Any:
        monitor = next((c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)), None)
        return {
            "parameters": [p.detach().clone() for p in module.parameters()],
            "skipped": fitting.callback_metrics.get("noise_scale/skipped_steps"),
            "state": monitor and monitor.state_dict(),
        }

    spoil = Spoiler(1, {2, 3}, value)
    without = fit(spoil, results=parameters_and_monitor)
    results = fit(NoiseScaleMonitor(), spoil, results=parameters_and_monitor)

    assert [r["skipped"] for r in results] == [2, 2]
    for result, plain in zip(results, without, strict=True):
        (measurement,) = result["state"]["optimizers"]
        assert measurement["meter"]["counts"]["steps"] == 7
        assert measurement["meter"]["counts"]["skipped_steps"] == 2
        steps = measurement["meter"]["estimates"]["whole"]["recent"]["steps"]
        assert np.isfinite(steps).all()
        assert [int(row[0]) for row in steps] == [2, 5, 6, 7]  # the first sets the level
        for ours, theirs in zip(result["parameters"], plain["parameters"], strict=True):
            assert torch.equal(ours, theirs)


def test_batch_size_fn_counts_in_another_unit() -> None:
    results = fit(
        NoiseScaleMonitor(window=10, batch_size_fn=lambda batch: 5 * len(batch[0]), unit="tokens"),
        log_every_n_steps=1,
    )

    expected = simulated_moments(2, 1)
    history = results[0]["history"]
    noise = np.divide(history["sum_noise_trace"], history["sum_weight"])
    assert noise == pytest.approx([5 * s for s in expected["noise_trace"]], rel=2e-5)
    assert results[0]["history"]["batch_size"] == [80] * 6 + [20]
    assert " tokens (" in str(results[0]["noise_scale"])


def test_every_n_steps_measures_fewer_steps_and_counts_all_examples() -> None:
    (result, _) = fit(NoiseScaleMonitor(every_n_steps=3), log_every_n_steps=1)

    assert result["history"]["step"] == [1, 4, 7]
    assert result["history"]["examples"] == [16, 64, 100]
    assert result["noise_scale"].steps == pytest.approx(
        20**2 / (16**2 + 4**2)
    )  # the first sets the level
    assert result["meter"]["counts"]["steps"] == 7


def test_the_last_row_is_of_the_last_step_measured_or_not() -> None:
    (result, _) = fit(NoiseScaleMonitor(every_n_steps=5), log_every_n_steps=1)

    assert result["history"]["step"] == [1, 6, 7]
    assert result["history"]["examples"] == [16, 96, 100]
    assert result["history"]["increment_measured_steps"] == [0, 1, 0]  # the first sets the level
    assert result["history"]["increment_weight"] == [0, 5 * 16, 0]
    assert result["history"]["measured_steps"] == [1, 2, 2]


def test_one_process_is_told_once_what_to_do_and_trains() -> None:
    monitor = NoiseScaleMonitor()
    model = classifier(net=opaque_network())
    before = copy.deepcopy(model.state_dict())

    with pytest.warns(UserWarning, match="nothing to measure") as warned:
        trainer(1, strategy="auto", callbacks=[monitor]).fit(model, loader())

    ours = [str(w.message) for w in warned if "NoiseScaleMonitor" in str(w.message)]
    assert len(ours) == 1
    assert ours[0].count("Accumulate two or more micro-batches") == 1
    assert "Accumulate two or more micro-batches in each step (`Trainer(accumulate" in ours[0]
    assert '`Trainer(devices=2, strategy="ddp")`' in ours[0]
    assert str(monitor.noise_scale) == "not measured yet"
    assert not torch.equal(before["net.weight"], model.state_dict()["net.weight"])


def test_the_progress_bar_shows_a_short_value() -> None:
    (shown, _) = fit(
        NoiseScaleMonitor(),
        log_every_n_steps=1,
        results=lambda fitting, _: (
            fitting.progress_bar_metrics["noise_scale"],
            fitting.callbacks[0].noise_scale.short(),
        ),
    )

    assert shown[0] == shown[1]
    assert len(shown[0]) <= 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"window": 1},
            '`window` must be "auto" or at least 2 steps, got 1.'
            ' With "auto" the estimator chooses the window from the noise.',
        ),
        (
            {"confidence": 95},
            "`confidence` must lie between 0 and 1, got 95. Pass 0.95 for 95 %.",
        ),
        (
            {"every_n_steps": 0},
            '`every_n_steps` must be at least 1, got 0. Pass 1 to measure every step, or "auto".',
        ),
        (
            {"every_n_steps": 2.5},
            '`every_n_steps` must be at least 1, got 2.5. Pass 1 to measure every step, or "auto".',
        ),
        (
            {"unit": ""},
            "`unit` must be a word, got ''."
            ' Name the unit of batch sizes, for example "examples".',
        ),
    ],
)
def test_wrong_values_are_refused_at_construction(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NoiseScaleMonitor(**arguments)


def test_a_batch_size_fn_that_is_no_function_is_refused_at_construction() -> None:
    message = (
        "`batch_size_fn` must be callable, got 32."
        " Pass a function from a batch to the number of examples in it."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        NoiseScaleMonitor(batch_size_fn=32)


def test_a_negative_batch_size_stops_the_fit() -> None:
    monitor = NoiseScaleMonitor(batch_size_fn=lambda _: -1)
    with pytest.raises(Exception, match="`batch_size_fn` must return a number of examples, got -1"):
        fit(monitor)


def test_a_batch_size_that_is_a_tensor_stops_the_fit() -> None:
    monitor = NoiseScaleMonitor(batch_size_fn=lambda batch: (batch[1] >= 0).sum())
    with pytest.raises(Exception, match="`batch_size_fn` must return a number, got an object of"):
        fit(monitor)


def test_a_batch_without_examples_skips_the_step() -> None:
    (result, _) = fit(NoiseScaleMonitor(batch_size_fn=lambda batch: len(batch[0]) % 8))

    assert result["meter"]["counts"]["skipped_steps"] == 6
    assert result["history"]["measured_steps"][-1] == 1


def test_unresolved_steps_log_a_lower_bound_and_no_point_estimate(tmp_path: Any) -> None:
    """TensorBoard draws a band only if value, low and high have the very same steps."""
    (result, _) = fit(
        NoiseScaleMonitor(every_n_steps=1),
        train_loader=loader(30, 1200),
        logger=TensorBoardLogger(tmp_path, name="", version=""),
        log_every_n_steps=1,
    )

    events = EventAccumulator(str(tmp_path)).Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in KEYS}
    resolved = [i for i, high in enumerate(result["history"]["high"]) if math.isfinite(high)]
    assert 0 < len(resolved) < 20
    for key in ("simple", "simple_low", "simple_high", "efficiency"):
        assert steps[f"noise_scale/{key}"] == resolved
    assert steps["noise_scale/lower_bound"] == list(range(20))
    assert all(math.isfinite(event.value) for tag in KEYS for event in events.Scalars(tag))


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_one_process_that_accumulates_is_measured(package: Any) -> None:
    monitor = NoiseScaleMonitor(window=10)
    model = classifier(package)
    alone = trainer(
        1,
        package,
        strategy="auto",
        callbacks=[monitor],
        accumulate_grad_batches=4,
        max_epochs=3,
        log_every_n_steps=1,
    )
    alone.fit(model, loader())

    # 13 batches: windows of 4, 4, 4 and 1, which is measured by its halves.
    assert alone.callback_metrics["noise_scale/skipped_steps"] == 0
    assert monitor.history["examples"][-1] == 300
    assert monitor.noise_scale.low > 0
    assert not any(p._backward_hooks for p in model.parameters())


def test_one_process_that_accumulates_trains_as_without_the_monitor() -> None:
    def parameters_after(*callbacks: Any) -> list[torch.Tensor]:
        model = classifier()
        torch.manual_seed(0)
        fitting = trainer(
            1, strategy="auto", callbacks=[*callbacks], accumulate_grad_batches=3, max_epochs=2
        )
        fitting.fit(model, loader())
        return [p.detach() for p in model.parameters()]

    with_it, without = parameters_after(NoiseScaleMonitor()), parameters_after()

    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_a_trainer_that_never_logs_keeps_its_loggers_empty(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path, name="csv", version="")

    (result, _) = fit(NoiseScaleMonitor(), logger=logger, log_every_n_steps=0)

    assert not (tmp_path / "csv" / "metrics.csv").exists()
    assert result["history"]["step"] == [7]


def test_its_repr_has_what_was_given_and_the_last_row() -> None:
    monitor = NoiseScaleMonitor(window=200)
    assert repr(monitor) == "NoiseScaleMonitor(window=200)"
    named = NoiseScaleMonitor(batch_size_fn=len, report=True, name="wide")
    given = "batch_size_fn=<built-in function len>, report=True, name='wide'"
    assert repr(named) == f"NoiseScaleMonitor({given})"

    lightning.pytorch.Trainer(
        accelerator="cpu",
        max_steps=20,
        log_every_n_steps=5,
        accumulate_grad_batches=2,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(classifier(), loader(8, 400))

    assert re.fullmatch(
        r"NoiseScaleMonitor\(window=200\): (above )?[\d.,]+ examples .*at step \d+.*", repr(monitor)
    )
