# SPDX-License-Identifier: Apache-2.0
"""Every model trains bitwise as without the monitor, and is measured or refused by name."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import fit, needs_complex_broadcasts
from ranks import in_a_fork
from torch import Tensor
from zoo import EPOCHS, ZOO, Entry, Expected

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms


class Oracle(L.Callback):
    """Norms of each micro-batch's gradient and of each step's, from `p.grad` alone."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.windows: list[int] = []

    def on_train_start(self, fitting: Any, module: Any) -> None:
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.begin()

    def begin(self) -> None:
        self.so_far, self.parts = torch.zeros(1, dtype=torch.float64), []

    def gradient(self) -> Tensor:
        of_each = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
        dense = [torch.view_as_real(g) if g.is_complex() else g.to_dense() for g in of_each]
        return torch.cat([g.detach().flatten().double() for g in dense])

    def on_after_backward(self, fitting: Any, module: Any) -> None:
        gradient = self.gradient()
        self.parts.append((gradient - self.so_far).square().sum().item())
        self.so_far = gradient

    def on_before_optimizer_step(self, fitting: Any, module: Any, optimizer: Any) -> None:
        # Lightning has divided each loss by the full window.
        scale = fitting.accumulate_grad_batches / max(len(self.parts), 1)
        small = sum(self.parts) * fitting.accumulate_grad_batches * scale
        self.windows.append(len(self.parts))
        self.steps.append((small, scale**2 * self.gradient().square().sum().item()))
        self.begin()


def hooks_on(module: torch.nn.Module) -> int:
    of_parameters = [p._backward_hooks or {} for p in module.parameters()]
    after = [p._post_accumulate_grad_hooks or {} for p in module.parameters()]
    of_modules = [
        h for m in module.modules() for n, h in vars(m).items() if n.endswith("_hooks") and h
    ]
    return sum(len(hooks) for hooks in (*of_parameters, *after, *of_modules))


def outcome(fitting: Any, module: Any) -> dict[str, Any]:
    """Everything that training leaves, but for what the monitor makes public."""
    scaler = getattr(fitting.precision_plugin, "scaler", None)
    return {
        "module": module.state_dict(),
        "answers": module.answers,
        "optimizers": [o.state_dict() for o in fitting.optimizers],
        "schedules": [c.scheduler.state_dict() for c in fitting.lr_scheduler_configs],
        "scaler": scaler and scaler.state_dict(),
        "callbacks": [
            c.state_dict()
            for c in fitting.callbacks
            if not isinstance(c, (NoiseScaleMonitor, Oracle, L.callbacks.ModelCheckpoint))
        ],
        "best": [c.best_model_score for c in fitting.checkpoint_callbacks],
        "metrics": {
            name: value
            for name, value in fitting.callback_metrics.items()
            if not name.startswith("noise_scale/")
        },
        "random": torch.get_rng_state(),
        "steps": [fitting.global_step, fitting.current_epoch],
    }


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two outcomes are not bitwise alike."""
    if type(ours) is not type(theirs):
        return [f"{where}: {ours!r} is not {theirs!r}"]
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return [f"{where}: {list(ours)} is not {list(theirs)}"]
        return [d for key in ours for d in differences(ours[key], theirs[key], f"{where}/{key}")]
    if isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{where}: {len(ours)} is not {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where}/{i}")]
    if isinstance(ours, Tensor):
        alike = ours.dtype == theirs.dtype and bits(ours) == bits(theirs)
    else:
        alike = repr(ours) == repr(theirs)
    return [] if alike else [f"{where}: {ours!r} is not {theirs!r}"]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().to_dense().reshape(-1).view(torch.uint8).numpy().tobytes()


def trained(
    entry: Entry, folder: Path, *callbacks: Any, look: Any = lambda *_: None, **options: Any
) -> tuple[list[tuple[dict[str, Any], Any]], Counter[str]]:
    """What a fit leaves on each rank and what `look` sees there, and what was warned of."""
    folder.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def results(fitting: Any, module: Any) -> Any:
            return outcome(fitting, module), look(fitting, module), heard()

        def heard() -> list[str]:
            return [str(w.message) for w in caught or ()]

        torch.manual_seed(1)
        module = entry.module()
        module.val_dataloader = entry.loader
        own = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "limit_val_batches": 3}
        own |= {**entry.options(folder), **options}
        seen = fit(
            *callbacks,
            *own.pop("callbacks", []),
            model=module,
            train_loader=entry.loader(),
            log_every_n_steps=2,
            results=results,
            **own,
        )
    assert hooks_on(module) == 0
    on_others = [message for _, _, there in seen for message in there] if len(seen) > 1 else []
    return [(left, looked) for left, looked, _ in seen], Counter(heard() + on_others)


def check(
    entry: Entry,
    expected: Expected,
    folder: Path,
    *beside: L.Callback,
    monitor: Callable[[], NoiseScaleMonitor] = NoiseScaleMonitor,
    **options: Any,
) -> None:
    """Train without the monitor, with the callbacks `beside` instead, and with it."""
    theirs, before = trained(entry, folder / "without", *beside, **options)
    ours, after = trained(entry, folder / "with", monitor(), look=measured, **options)

    for (left, _), (without, _) in zip(ours, theirs, strict=True):
        assert differences(left, without) == []
    told = list((after - before).elements())
    assert len(told) == len(expected.warns), told
    assert all(any(re.search(pattern, message) for message in told) for pattern in expected.warns)
    assert all(meters for _, meters in ours) or not expected.measures
    if expected.measures is None:
        assert all(len({one["steps"] > 0 for one in meters}) == 2 for _, meters in ours)
        return
    for one in (meter for _, meters in ours for meter in meters):
        assert expected.left_out in (None, one["left_out"])
        assert (one["steps"] > 0) == expected.measures
        assert 0 <= one["low"] < math.inf
        assert one["low"] < one["high"]
        if math.isfinite(one["high"]):
            assert one["low"] <= one["value"] <= one["high"]
        assert one["rows"] > 0


def measured(fitting: Any, module: Any) -> list[dict[str, Any]]:
    """Of each optimizer."""
    (monitor,) = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
    return [
        {
            "value": m.meter.noise_scale.value,
            "low": m.meter.noise_scale.low,
            "high": m.meter.noise_scale.high,
            "steps": m.meter.measured_steps,
            "left_out": m.meter.skipped_steps,
            "rows": len(m.history["step"]),
        }
        for m in monitor._meters
    ]


COMPILED = {name for name in ZOO if name.startswith("compiled")}


@pytest.mark.parametrize("name", ZOO)
def test_in_one_process(name: str, tmp_path: Path) -> None:
    """By halves."""
    checked = in_a_fork(check) if name in COMPILED else check
    checked(
        ZOO[name],
        ZOO[name].halves,
        tmp_path,
        monitor=partial(NoiseScaleMonitor, every_n_steps=1),
        ranks=1,
        strategy="auto",
    )


@pytest.mark.parametrize("name", ZOO)
def test_by_example(name: str, tmp_path: Path) -> None:
    checked = in_a_fork(check) if name in COMPILED else check
    checked(
        ZOO[name],
        ZOO[name].examples,
        tmp_path,
        monitor=partial(NoiseScaleMonitor, small_batch="example", every_n_steps=1),
        ranks=1,
        strategy="auto",
    )


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.accumulated])
def test_with_accumulation(name: str, tmp_path: Path, recorded: list[StepNorms]) -> None:
    """The norms are those that an oracle sees of the fit without the monitor."""
    checked = in_a_fork(check_accumulating) if name in COMPILED else check_accumulating
    checked(name, tmp_path, recorded)


def check_accumulating(name: str, tmp_path: Path, recorded: list[StepNorms]) -> None:
    entry, oracle = ZOO[name], Oracle()
    assert entry.accumulated is not None
    options = {"ranks": 1, "strategy": "auto", "accumulate_grad_batches": 2}

    each_step = partial(NoiseScaleMonitor, every_n_steps=1)
    check(entry, entry.accumulated, tmp_path, oracle, monitor=each_step, **options)

    if recorded and entry.exact:
        steps = zip(recorded, oracle.windows, oracle.steps, strict=True)
        for got, micro_batches, (small, big) in steps:
            if got.comparable:
                assert micro_batches > 0
                if micro_batches == 1:  # measured by its halves
                    small = got.small_sq_norm
                assert got.small_sq_norm == pytest.approx(small, rel=1e-4)
                assert got.big_sq_norm == pytest.approx(big, rel=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[needs_complex_broadcasts] * (name == "complex"))
        for name, entry in ZOO.items()
        if entry.ranks
    ],
)
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    expected = ZOO[name].ranks
    assert expected is not None
    strategy = "ddp_fork_find_unused_parameters_true"
    check(ZOO[name], expected, tmp_path, ranks=2, strategy=strategy)
