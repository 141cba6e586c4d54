# SPDX-License-Identifier: Apache-2.0
"""Monitors with names: several of them in one Trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fits import (
    both_loggers,
    classifier,
    fit_here,
    fit_sharded,
    loader,
    trainer,
)
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from refused import refused

from noisescale import BatchSizeScheduler, NoiseScaleMonitor, predict
from noisescale.history.reading import read_run


def rows(monitor: NoiseScaleMonitor) -> dict[str, list[float]]:
    return {k: v.tolist() for k, v in monitor.history.items() if k != "seconds_per_step"}


def pair() -> list[NoiseScaleMonitor]:
    return [
        NoiseScaleMonitor(small_batch="half", window=10),
        NoiseScaleMonitor(small_batch="micro_batch", every_n_steps=2, name="by micro-batch"),
    ]


def alone(*callbacks: Any, **options: Any) -> tuple[dict[Any, Any], list[torch.Tensor]]:
    """What monitors have and parameters are after two epochs in one process."""
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 2, "max_epochs": 2, **options}
    fitting = fit_here(*callbacks, **options)
    monitors = [c for c in callbacks if isinstance(c, NoiseScaleMonitor)]
    return {m.name: rows(m) for m in monitors}, list(fitting.lightning_module.parameters())


def test_two_monitors_measure_what_each_does_alone_and_training_is_the_same() -> None:
    measured, parameters = alone(*pair())

    assert list(measured) == [None, "by micro-batch"]
    for monitor in pair():
        ((name, expected),) = alone(monitor)[0].items()
        np.testing.assert_equal(measured[name], expected)
    assert all(map(torch.equal, parameters, alone()[1]))
    assert measured[None]["noise_trace"] != measured["by micro-batch"]["noise_trace"]


def test_sharded_gradients_are_measured_by_two_monitors_and_left_as_they_were() -> None:
    def results(fitting: Any, module: Any) -> Any:
        units = [
            group
            for part in module.modules()
            if hasattr(part, "_get_fsdp_state")
            for group in [part._get_fsdp_state()._fsdp_param_group]
            if group is not None
        ]
        first, second = (c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor))
        kinds = {type(unit._reduce_scatter_comm).__module__ for unit in units}
        return rows(first), rows(second), kinds

    for first, second, kinds in fit_sharded(
        NoiseScaleMonitor(),
        NoiseScaleMonitor(name="again"),
        model=classifier(sharded=True),
        results=results,
        log_every_n_steps=3,
    ):
        np.testing.assert_equal(first, second)
        assert kinds
        assert not any(kind.startswith("noisescale") for kind in kinds)


def test_both_are_logged_drawn_reported_and_read_back(tmp_path: Path) -> None:
    others = {"report": True}
    monitors = NoiseScaleMonitor(**others), NoiseScaleMonitor(window=20, name="wide", **others)
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 3, "max_epochs": 4}
    loggers = both_loggers(tmp_path)
    fitting = fit_here(*monitors, train_loader=loader(8, 320), logger=loggers, **options)

    for monitor in monitors:
        csv = read_run(tmp_path / "csv", monitor=monitor.name)
        board = read_run(tmp_path / "board", monitor=monitor.name)
        assert csv["step"].tolist() == monitor.history["step"].tolist()
        for name in ("low", "noise_trace", "increment_noise_trace"):
            assert csv[name].tolist() == pytest.approx(monitor.history[name].tolist())
            assert board[name].tolist() == pytest.approx(csv[name].tolist(), rel=1e-6)
        band, expected = predict(csv).critical_batch_size, predict(monitor.history)
        assert band.low == pytest.approx(expected.critical_batch_size.low)
        assert {"noise_scale", "noise_scale/wide"} <= fitting.progress_bar_metrics.keys()
    metrics = {k.removeprefix("noise_scale/") for k in fitting.callback_metrics}
    assert {f"wide/{key}" for key in metrics if not key.startswith("wide/")} < metrics
    pages = {page.name for page in tmp_path.glob("board/*.html")}
    assert pages == {"noise_scale.html", "noise_scale_wide.html"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    layout = EventAccumulator(str(tmp_path / "board")).Reload().Tensors("custom_scalars__config__")
    drawn = layout_pb2.Layout.FromString(layout[-1].tensor_proto.string_val[0])
    first = {c.title: c.chart[0] for c in drawn.category}
    bands = {name: c.margin.series[0].value for name, c in first.items() if c.HasField("margin")}
    assert bands == {
        "Noise scale": "noise_scale/simple",
        "Noise scale, wide": "noise_scale/wide/simple",
    }


def test_each_goes_on_from_its_own_part_of_a_checkpoint(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1)
    whole, _ = alone(*pair(), saved, enable_checkpointing=True)
    (path,) = tmp_path.glob("epoch=0*.ckpt")

    resumed, _ = alone(*reversed(pair()), ckpt_path=path)

    keys = set(torch.load(path, weights_only=True)["callbacks"])
    assert {"NoiseScaleMonitor", "NoiseScaleMonitor{'name': 'by micro-batch'}"} <= keys
    for name, history in whole.items():
        later = [step > 7 for step in history["step"]]
        for column, values in history.items():
            expected = [v for v, use in zip(values, later, strict=True) if use]
            np.testing.assert_equal(resumed[name][column][-len(expected) :], expected)


@pytest.mark.parametrize(
    ("name", "requirement"),
    [
        ("", "letters"),
        ("a:b", "letters"),
        ("a/b", "not contain `/`"),
        ("group", '"group"'),
        ("optimizer_1", "optimizer_<number>"),
        (3, "a string"),
    ],
)
def test_names_that_cannot_be_told_apart_in_logs_are_refused(name: Any, requirement: str) -> None:
    kind = ValueError if isinstance(name, str) else TypeError
    with refused("name", error=kind, requirement=requirement):
        NoiseScaleMonitor(name=name)


@pytest.mark.parametrize("name", [None, "wide"])
def test_namesakes_are_refused(name: str | None) -> None:
    with pytest.raises(RuntimeError, match=r"`callback\.state_key`"):
        trainer(1, callbacks=[NoiseScaleMonitor(name=name), NoiseScaleMonitor(name=name)])

    brought = BatchSizeScheduler(monitor=NoiseScaleMonitor(name=name))
    with refused("name", got=f"{name!r} twice"):
        fit_here(NoiseScaleMonitor(name=name), brought)


@pytest.mark.parametrize(
    ("names", "taken"), [(["a", None], None), (["b", "a"], "b"), ([None, "a"], None), ([], None)]
)
def test_a_scheduler_takes_the_monitor_without_a_name_or_else_the_first(
    names: list[str | None], taken: str | None
) -> None:
    found = []
    took = LambdaCallback(
        on_fit_end=lambda fitting, _: found.append(
            (
                scheduler._monitor.name,
                sum(isinstance(c, NoiseScaleMonitor) for c in fitting.callbacks),
            )
        )
    )
    scheduler = BatchSizeScheduler(max_batch_size=32)

    alone(*[NoiseScaleMonitor(name=name) for name in names], scheduler, took, max_epochs=1)

    assert found == [(taken, max(len(names), 1))]
