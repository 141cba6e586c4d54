# SPDX-License-Identifier: Apache-2.0
"""N steps == N/2 + checkpoint + N/2, and what goes on where the number of devices changes."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from fits import fit, untimed
from lightning.pytorch.callbacks import ModelCheckpoint
from named_batches import InMemory
from resumable import EPOCHS, Restless, Resumable, model
from tiers import slow

from noisescale import BatchSizeScheduler, NoiseScaleMonitor


def results(fitting: Any, module: Any) -> dict[str, Any]:
    (callback,) = [c for c in fitting.callbacks if isinstance(c, BatchSizeScheduler)]
    (monitor,) = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
    (logger,) = fitting.loggers
    return {
        "parameters": [p.detach().numpy().copy() for p in module.parameters()],
        "scheduler": callback.state_dict(),
        "moves": [str(move) for move in callback.moves],
        "meter": untimed(monitor.state_dict()["optimizers"][0]["meter"]),
        "schedule": fitting.lr_scheduler_configs[0].scheduler.state_dict(),
        "logged": logger.logged,
        "step": fitting.global_step,
        "began": getattr(module, "began", None),
    }


def run(
    ranks: int, kind: str, *callbacks: Any, policy: Any = None, most: int = 160, **options: Any
) -> list[dict[str, Any]]:
    scheduler = BatchSizeScheduler(
        policy or Restless(),
        lr_scaling="sqrt",
        progress="examples" if kind == "cosine" else "steps",
        decide_every_n_steps=2,
        max_batch_size=most,
    )
    return fit(
        scheduler,
        NoiseScaleMonitor(),
        *callbacks,
        ranks=ranks,
        model=model(kind),
        results=results,
        logger=InMemory(),
        log_every_n_steps=1,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        train_loader=Resumable(),
        **{"accumulate_grad_batches": 2, "max_epochs": EPOCHS, **options},
    )


def saves(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)


@pytest.mark.parametrize(
    ("kind", "when", "ranks"),
    [  # pairwise
        ("cosine", {"every_n_train_steps": 5}, 1),
        slow("cosine", {"every_n_epochs": 1}, 2),
        slow("exponential", {"every_n_epochs": 1}, 1),
        slow("exponential", {"every_n_train_steps": 5}, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:The learning-rate schedule counts optimizer steps")
def test_resuming_goes_on_exactly(
    tmp_path: Path, kind: str, when: dict[str, int], ranks: int
) -> None:
    whole = run(ranks, kind, saves(tmp_path, **when))
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda p: int(p.stem[5:]))
    path = paths[len(paths) // 2 - 1]
    half = int(path.stem[5:])
    resumed = run(ranks, kind, ckpt_path=path)

    checkpoint = torch.load(path, weights_only=True)
    done = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
    assert (done < 40 // ranks) == ("every_n_train_steps" in when)
    controller = checkpoint["callbacks"]["BatchSizeScheduler"]["controller"]
    assert controller["factors"]["learning_rate"] != 1
    for ours, theirs in zip(resumed, whole, strict=True):
        assert len(theirs["moves"]) > 6
        assert ours["step"] == theirs["step"] > half + 6
        assert ours["moves"] == theirs["moves"][-len(ours["moves"]) :]
        assert len(ours["moves"]) > 2
        for name in ("scheduler", "meter", "schedule", "parameters"):
            np.testing.assert_equal(ours[name], theirs[name])
    ours, theirs = (
        {
            step: {k: v for k, v in row.items() if "seconds" not in k}
            for step, row in result[0]["logged"].items()
            if step >= half
        }
        for result in (resumed, whole)
    )
    assert len(ours) > 6
    assert any("batch_size/noise_scale" in row for row in ours.values())
    np.testing.assert_equal(ours, theirs)


class Begins(L.Callback):
    """Note the scheduler's state at the first batch."""

    def on_train_batch_start(self, fitting: Any, *_: Any) -> None:
        (callback,) = [c for c in fitting.callbacks if isinstance(c, BatchSizeScheduler)]
        fitting.lightning_module.__dict__.setdefault("began", callback.state_dict())


@pytest.mark.parametrize(("ranks", "most"), [(2, 48), slow(1, 64), slow(1, 160), slow(2, 160)])
def test_on_another_number_of_devices_all_but_the_plan_goes_on(
    tmp_path: Path, ranks: int, most: int
) -> None:
    """Also where as many micro-batches as the run began with would be too many there."""

    def once(noise_scale: Any, plan: Any, progress: Any) -> float:
        return float(plan.batch_size) if progress.steps else 96.0

    options: dict[str, Any] = {"most": most, "policy": once, "accumulate_grad_batches": 4}
    run(3 - ranks, "cosine", saves(tmp_path, every_n_epochs=2), max_epochs=2, **options)
    (path,) = tmp_path.glob("*.ckpt")

    resumed = run(ranks, "cosine", Begins(), ckpt_path=path, max_epochs=3, **options)

    saved = torch.load(path, weights_only=True)["callbacks"]["BatchSizeScheduler"]
    before = saved["controller"]
    size, accumulation, devices, _ = before["plan"].values()
    assert (size * accumulation * devices, devices) == (min(most, 96), 3 - ranks)
    for now in (of_rank["began"]["controller"] for of_rank in resumed):
        assert [*now["plan"].values()] == [8.0, accumulation * devices // ranks, ranks, 1]
        for name in ("base_batch_size", "steps", "examples", "factors", "peak_learning_rate"):
            assert now[name] == before[name]
        assert now["clock"] == {**before["clock"], "epoch_began": before["clock"]["time"]}
        assert now["run"]["min_steps"] > before["run"]["min_steps"] > 0  # one more decision
