# SPDX-License-Identifier: Apache-2.0
"""Every model trains bitwise as without the monitor, and is measured or refused by name."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import fit
from ranks import in_a_fork
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from zoo import EPOCHS, ZOO, Entry, Expected

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

ALONE = {"ranks": 1, "strategy": "auto"}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "halves": ({"every_n_steps": 1}, ALONE),
    "accumulated": ({"every_n_steps": 1}, {**ALONE, "accumulate_grad_batches": 2}),
    "ranks": ({}, {"ranks": 2, "strategy": "ddp_fork_find_unused_parameters_true"}),
}
"""The options of the monitor and of the Trainer."""
QUICK = {
    "sparse embeddings",
    "batch normalization",
    "sometimes nothing",
    "gan",
    "thaws",
    "16-mixed",
}


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
    found = [h for m in module.modules() for n, h in vars(m).items() if n.endswith("_hooks")]
    for p in module.parameters():
        found += [p._backward_hooks, p._post_accumulate_grad_hooks]
    return sum(len(hooks or ()) for hooks in found)


def outcome(fitting: Any, module: Any) -> dict[str, Any]:
    """Everything that training leaves, bit by bit, but for what the monitor makes public."""
    scaler = getattr(fitting.precision_plugin, "scaler", None)
    left, _ = tree_flatten_with_path(
        {
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
    )
    return {keystr(path): bits(leaf) for path, leaf in left}


def bits(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    dense = leaf.detach().to_dense().reshape(-1).view(torch.uint8)
    return leaf.dtype, leaf.shape, dense.numpy().tobytes()


def trained(
    entry: Entry, folder: Path, *callbacks: Any, **options: Any
) -> tuple[list[tuple[dict[str, Any], Any]], Counter[str]]:
    """What a fit leaves on each rank and what is measured there, and what was warned of."""
    folder.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def results(fitting: Any, module: Any) -> Any:
            return outcome(fitting, module), measured(fitting), heard()

        def heard() -> list[str]:
            messages = [str(w.message) for w in caught or ()]
            return [one for one in messages if not one.startswith("The train loader takes")]

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


def measured(fitting: Any) -> list[dict[str, Any]]:
    """Of each optimizer."""
    return [
        {
            "scale": m.meter.noise_scale,
            "steps": m.meter.measured_steps,
            "left_out": m.meter.skipped_steps,
            "rows": len(m.history["step"]),
        }
        for monitor in fitting.callbacks
        if isinstance(monitor, NoiseScaleMonitor)
        for m in monitor.meters
    ]


def check(name: str, way: str, folder: Path, recorded: list[StepNorms]) -> None:
    """Train without the monitor and with it. Accumulated norms are an oracle's of the former."""
    entry, (of_monitor, options) = ZOO[name], WAYS[way]
    expected: Expected = getattr(entry, way)
    oracle = Oracle()

    beside = [oracle] * (way == "accumulated")
    theirs, before = trained(entry, folder / "without", *beside, **options)
    ours, after = trained(entry, folder / "with", NoiseScaleMonitor(**of_monitor), **options)

    for (left, _), (without, _) in zip(ours, theirs, strict=True):
        assert left == without
    told = list((after - before).elements())
    assert len(told) == len(expected.warns), told
    assert all(any(re.search(pattern, message) for message in told) for pattern in expected.warns)
    if recorded and beside and entry.exact:
        check_norms(recorded, oracle)
    assert all(meters for _, meters in ours) or not expected.measures
    if expected.measures is None:
        assert all(len({one["steps"] > 0 for one in meters}) == 2 for _, meters in ours)
        return
    for one in (meter for _, meters in ours for meter in meters):
        assert expected.left_out in (None, one["left_out"])
        assert (one["steps"] > 0) == expected.measures
        scale = one["scale"]
        assert 0 <= scale.low < math.inf
        assert scale.low < scale.high
        if math.isfinite(scale.high):
            assert scale.low <= scale.value <= scale.high
        assert one["rows"] > 0


def check_norms(recorded: list[StepNorms], oracle: Oracle) -> None:
    steps = zip(recorded, oracle.windows, oracle.steps, strict=True)
    for got, micro_batches, (small, big) in steps:
        if got.comparable:
            assert micro_batches > 0
            if micro_batches == 1:  # measured by its halves
                small = got.small_sq_norm
            assert got.small_sq_norm == pytest.approx(small, rel=1e-4)
            assert got.big_sq_norm == pytest.approx(big, rel=1e-4)


def cases() -> Iterator[Any]:
    for name, entry in ZOO.items():
        for way in WAYS:
            if getattr(entry, way) is not None:
                marks = [pytest.mark.slow] * (name not in QUICK or way == "ranks")
                yield pytest.param(name, way, marks=marks)


@pytest.mark.parametrize(("name", "way"), [*cases()])
def test_training_is_bitwise_as_without_and_measured_or_refused_by_name(
    name: str, way: str, tmp_path: Path, recorded: list[StepNorms]
) -> None:
    forks = name.startswith("compiled") and way != "ranks"
    (in_a_fork(check) if forks else check)(name, way, tmp_path, recorded)
