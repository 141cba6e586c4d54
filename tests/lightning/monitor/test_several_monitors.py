# SPDX-License-Identifier: Apache-2.0
"""Monitors with names: several of them in one Trainer."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from fits import (
    both_loggers,
    classifier,
    fit,
    fit_sharded,
    loader,
    needs_measurable_shards,
    trainer,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from noisescale import BatchSizeScheduler, NoiseScaleMonitor, predict
from noisescale.history.reading import read_run


def rows(monitor: NoiseScaleMonitor) -> dict[str, list[float]]:
    history = {name: column.tolist() for name, column in monitor.history.items()}
    del history["seconds_per_step"]
    return history


def seen(fitting: Any, module: Any) -> Any:
    monitors = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
    parameters = [p.detach().clone() for p in module.parameters()]
    return {m.name: rows(m) for m in monitors}, parameters


def pair() -> list[NoiseScaleMonitor]:
    return [
        NoiseScaleMonitor(small_batch="rank", window=10),
        NoiseScaleMonitor(small_batch="micro_batch", every_n_steps=2, name="by micro-batch"),
    ]


def test_two_monitors_measure_what_each_does_alone_and_training_is_the_same() -> None:
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 2, "results": seen}
    both = fit(*pair(), **options)
    alone = [fit(monitor, **options) for monitor in pair()]
    neither = fit(**options)

    for rank in (0, 1):
        measured, parameters = both[rank]
        assert list(measured) == [None, "by micro-batch"]
        for each in alone:
            ((name, expected),) = each[rank][0].items()
            np.testing.assert_equal(measured[name], expected)
        assert all(map(torch.equal, parameters, neither[rank][1]))
    assert both[0][0][None]["noise_trace"] != both[0][0]["by micro-batch"]["noise_trace"]


@needs_measurable_shards
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
    monitors = [
        NoiseScaleMonitor(report=True),
        NoiseScaleMonitor(window=20, name="wide", report=True),
    ]
    fitting = trainer(
        1,
        strategy="auto",
        callbacks=monitors,
        accumulate_grad_batches=2,
        log_every_n_steps=3,
        max_epochs=4,
        logger=both_loggers(tmp_path),
    )
    fitting.fit(classifier(), loader(8, 320))

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
    layout = EventAccumulator(str(tmp_path / "board")).Reload().Tensors("custom_scalars__config__")
    drawn = layout_pb2.Layout.FromString(layout[-1].tensor_proto.string_val[0])
    first = {c.title: c.chart[0] for c in drawn.category}
    bands = {name: c.margin.series[0].value for name, c in first.items() if c.HasField("margin")}
    assert bands == {
        "Noise scale": "noise_scale/simple",
        "Noise scale, wide": "noise_scale/wide/simple",
    }


def test_each_goes_on_from_its_own_part_of_a_checkpoint(tmp_path: Path) -> None:
    options = {"log_every_n_steps": 2, "max_epochs": 2, "results": seen}
    saved = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1)
    whole, _ = fit(*pair(), saved, enable_checkpointing=True, **options)
    (path,) = tmp_path.glob("epoch=0*.ckpt")

    resumed, _ = fit(*reversed(pair()), ckpt_path=path, **options)

    keys = set(torch.load(path, weights_only=True)["callbacks"])
    assert {"NoiseScaleMonitor", "NoiseScaleMonitor{'name': 'by micro-batch'}"} <= keys
    for name, history in whole[0].items():
        later = [step > 7 for step in history["step"]]
        for column, values in history.items():
            expected = [v for v, use in zip(values, later, strict=True) if use]
            np.testing.assert_equal(resumed[0][name][column][-len(expected) :], expected)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ValueError, "`name` must be made of letters, digits, spaces and `_-./` only"),
        ("a:b", ValueError, "`name` must be made of letters, digits, spaces and `_-./` only"),
        (
            "a/b",
            ValueError,
            '`name` must not be "group" or "optimizer_<number>" and must not contain `/`',
        ),
        (
            "group",
            ValueError,
            '`name` must not be "group" or "optimizer_<number>" and must not contain `/`',
        ),
        ("optimizer_1", ValueError, '`name` must not be "group" or "optimizer_<number>" and'),
        (3, TypeError, "`name` must be a string, got 3. Pass a word, or leave it out."),
    ],
)
def test_names_that_cannot_be_told_apart_in_logs_are_refused(
    name: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        NoiseScaleMonitor(name=name)


@pytest.mark.parametrize("name", [None, "wide"])
def test_namesakes_are_refused(name: str | None) -> None:
    with pytest.raises(RuntimeError, match=r"The `callback\.state_key` must be unique"):
        trainer(1, callbacks=[NoiseScaleMonitor(name=name), NoiseScaleMonitor(name=name)])

    brought = BatchSizeScheduler(monitor=NoiseScaleMonitor(name=name))
    fitting = trainer(1, strategy="auto", callbacks=[NoiseScaleMonitor(name=name), brought])
    with pytest.raises(Exception, match=f"`name` must differ .*, got {name!r} twice. Pass"):
        fitting.fit(classifier(), loader())


class Took(L.Callback):
    """Which monitor a scheduler takes."""

    def on_fit_end(self, fitting: Any, module: Any) -> None:
        (scheduler,) = (c for c in fitting.callbacks if isinstance(c, BatchSizeScheduler))
        self.name = scheduler._monitor.name
        self.brought = sum(isinstance(c, NoiseScaleMonitor) for c in fitting.callbacks)


@pytest.mark.parametrize(
    ("names", "taken"), [(["a", None], None), (["b", "a"], "b"), ([None, "a"], None), ([], None)]
)
def test_a_scheduler_takes_the_monitor_without_a_name_or_else_the_first(
    names: list[str | None], taken: str | None
) -> None:
    took = Took()
    monitors = [NoiseScaleMonitor(name=name) for name in names]
    fitting = trainer(
        1,
        strategy="auto",
        callbacks=[*monitors, BatchSizeScheduler(max_batch_size=32), took],
        accumulate_grad_batches=2,
    )

    fitting.fit(classifier(), loader())

    assert took.name == taken
    assert took.brought == max(len(names), 1)
