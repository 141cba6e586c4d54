# SPDX-License-Identifier: Apache-2.0
"""Timed trainings by copies of transformers' Trainer, by a clock that goes on in passes alone."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refused import refused
from tiers import slow
from torch import Tensor

import noisescale
from noisescale.profiling import blocks, time_loader

PASS, EXAMPLE = 0.01, 0.001
"""Seconds of a pass, and of an example in it, by the clock."""


@pytest.fixture(scope="module")
def hf() -> Any:
    """Import transformers here alone: it takes seconds."""
    import transformers_fits

    return transformers_fits


class Trained:
    """A Trainer of a small classifier, with what its passes saw."""

    def __init__(self, hf: Any, folder: Path, *, largest: int = 64, **options: Any) -> None:
        now, self.seen = [0.0], []
        self.clock = SimpleNamespace(perf_counter=lambda: now[0])
        seen = self.seen

        class Model(hf.Classifier):  # type: ignore[misc]  # it comes from a fixture
            def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
                if len(x) > largest:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                now[0] += PASS + EXAMPLE * len(x)
                seen.append(len(x))
                return super().forward(x, labels)

        arguments = {
            **{"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True},
            **{"dataloader_pin_memory": False, "logging_steps": 1, "save_strategy": "no"},
            **{"per_device_train_batch_size": 4, "max_steps": 24, "learning_rate": 0.01},
            **{"ddp_find_unused_parameters": False, "gradient_accumulation_steps": 2},
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}},
        }
        self.model = Model()
        self.recorder = hf.Recorder()
        self.trainer = options.pop("kind", hf.Trainer)(
            self.model,
            hf.TrainingArguments(**arguments),
            train_dataset=hf.digits(),
            callbacks=[hf.NoiseScaleCallback(), self.recorder],
            **options,
        )


@pytest.fixture
def trained(hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(**options: Any) -> Trained:
        found = Trained(hf, tmp_path, **options)
        monkeypatch.setattr(blocks, "time", found.clock)
        monkeypatch.setattr(time_loader, "time", found.clock)
        return found

    return made


def test_a_copy_is_timed_and_the_trainer_stays_as_it_is(trained: Any) -> None:
    one = trained()
    before = [p.clone() for p in one.model.parameters()]
    arguments, state = dict(vars(one.trainer.args)), torch.get_rng_state()

    found = noisescale.profile(one.trainer, device_batch_sizes=[4, 16], steps=5)

    for timing in found.timings:
        each = PASS + EXAMPLE * timing.device_batch_size
        assert timing.seconds == pytest.approx(timing.accumulation * each)
    assert [(t.device_batch_size, t.accumulation) for t in found.timings] == [
        *((4, 1), (4, 2)),
        *((16, 1), (16, 2)),
    ]
    # 5 + 5 steps of each, whole batches alone, and then the fastest one without its loader.
    assert one.seen == [4] * 30 + [16] * 30 + [16] * 10
    assert found.loader.seconds == 0
    assert all(map(torch.equal, before, one.model.parameters()))
    assert vars(one.trainer.args) == arguments
    assert torch.equal(torch.get_rng_state(), state)
    assert one.recorder.logs == []
    assert one.trainer.model is one.model
    assert one.trainer.state.global_step == 0
    # No copy stays, which would take the device's memory from the next.
    assert [x for x in gc.get_objects() if type(x) is type(one.model)] == [one.model]


def test_an_optimizer_of_the_users_begins_anew_with_the_copys_parameters(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    one = trained()
    one.trainer.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.3)
    before = [p.clone() for p in one.model.parameters()]
    plain = torch.optim.SGD.step

    def step(self: Any, *arguments: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return plain(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", step)

    noisescale.profile(one.trainer, device_batch_sizes=[4], accumulation=[1], steps=5)

    assert len(rates) == 20
    assert rates[0] == 0.3
    assert all(map(torch.equal, before, one.model.parameters()))


def test_the_ladder_ends_where_memory_does(trained: Any) -> None:
    found = noisescale.profile(trained(largest=6).trainer, accumulation=[1], steps=5)

    assert [timing.device_batch_size for timing in found.timings] == [1, 2, 4]
    assert found.stopped == ("A device batch size of 8 does not fit in memory.",)


def test_a_size_that_does_not_fit_is_not_timed_as_a_smaller_one(trained: Any) -> None:
    one = trained(largest=6)
    one.trainer.args.auto_find_batch_size = True

    found = noisescale.profile(one.trainer, accumulation=[1], steps=5)

    assert [timing.device_batch_size for timing in found.timings] == [1, 2, 4]


def test_what_a_trainer_of_the_users_keeps_beside_the_model_stays(trained: Any, hf: Any) -> None:
    elsewhere: list[Any] = []  # what log() writes is no attribute that a copy could have

    class Keeps(hf.Trainer):  # type: ignore[misc]  # it comes from a fixture
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.losses: dict[str, list[Tensor]] = {"train": []}
            self.loss_norm = torch.nn.BatchNorm1d(1)

        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            self.losses["train"].append(loss.detach())
            self.loss_norm(loss.detach().expand(2, 1))
            return loss

        def log(self, *arguments: Any, **options: Any) -> None:
            elsewhere.append(arguments)
            super().log(*arguments, **options)

    one = trained(kind=Keeps).trainer

    noisescale.profile(one, device_batch_sizes=[4], accumulation=[1], steps=5)

    assert one.losses == {"train": []}
    assert one.loss_norm.num_batches_tracked == 0
    assert elsewhere == []


def test_predict_finds_the_times_that_stand_in_the_output_folder(
    trained: Any, tmp_path: Path
) -> None:
    one = trained()
    one.trainer.train()

    found = noisescale.profile(one.trainer, run=tmp_path, steps=5)

    assert [timing.device_batch_size for timing in found.timings] == [2, 4, 8, 16, 32, 4]
    timed = {row.batch_size for row in noisescale.predict(tmp_path).rows if row.basis == "timed"}
    assert {4, 8, 16, 32} <= timed


def test_what_cannot_be_timed_is_refused(trained: Any, hf: Any) -> None:
    with refused("devices", got="2"):
        noisescale.profile(trained().trainer, devices=2)
    with refused("target", got="a OneForAll, which makes its own loader"):
        noisescale.profile(trained(kind=hf.OneForAll).trainer, steps=5)


@pytest.mark.parametrize("ranks", [slow(2)])
def test_ranks_train_together(ranks: int, hf: Any, tmp_path: Path) -> None:
    def one() -> Any:
        trainer = Trained(hf, tmp_path).trainer
        return noisescale.profile(trainer, device_batch_sizes=[4], steps=5).timings

    first, second = hf.each(ranks, one)

    assert first == second
    assert [(t.devices, t.nodes, t.accumulation) for t in first] == [(2, 1, 1), (2, 1, 2)]
