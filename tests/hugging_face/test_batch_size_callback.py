# SPDX-License-Identifier: Apache-2.0
"""Windows, learning rates and ends of trainings whose batch grows, against a loop of our own."""

import json
import math
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from refused import refused
from tiers import slow
from torch import Tensor

from noisescale import BatchSizeController
from noisescale.plan import Plan
from noisescale.scheduling.policy import Policy, Progress

ROWS, EXAMPLES, LR = 4, 60, 0.05
GROWING = {0: 4, 2: 12, 7: 20}


def trained(hf: Any, callback: Any, *others: Any, **options: Any) -> tuple[Any, list[Any]]:
    spy = hf.Spy()
    defaults: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "optim": "sgd",
        "learning_rate": LR,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.0,
        "remove_unused_columns": False,
        "kind": hf.Numbered,
        "examples": hf.numbered,
    }
    run = hf.fit(*others, callback, spy, prepare=spy.watch, **{**defaults, **options})
    return run, spy.seen


def sizes_of(seen: list[Any]) -> list[int]:
    return [len(step.ids) for step in seen]


def loop(hf: Any, seen: list[Any]) -> list[Tensor]:
    """The parameters after the same steps: one mean gradient each, by plain descent."""
    model, examples = hf.Classifier(), hf.numbered()
    for step in seen:
        model.zero_grad()
        x = torch.stack([examples[i]["x"] for i in step.ids])
        y = torch.stack([examples[i]["labels"] for i in step.ids])
        model(x, y)["loss"].backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= step.learning_rate * p.grad
    return list(model.parameters())


def evaluated(hf: Any) -> dict[str, Any]:
    return {"prediction_loss_only": True, "extras": {"eval_dataset": hf.digits()}}


@pytest.fixture(scope="module")
def grown(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A training that is saved and evaluated at every fourth step."""
    folder = tmp_path_factory.mktemp("grown")
    every: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    every |= {"eval_strategy": "steps", "eval_steps": 4, **evaluated(hf)}
    run, seen = trained(hf, hf.BatchSizeCallback(GROWING), output_dir=str(folder), **every)
    return SimpleNamespace(run=run, seen=seen, folder=folder)


def test_each_epoch_has_every_example_once_and_the_schedule_keeps_to_the_examples(
    grown: SimpleNamespace, hf: Any
) -> None:
    sizes = sizes_of(grown.seen)
    #  60 = 4 + 4 + 5 x 12 less what is left at the end, then 3 x 20
    assert sizes == [4, 4, 12, 12, 12, 12, 4, 20, 20, 20]
    for epoch in (grown.seen[:7], grown.seen[7:]):
        assert sorted(i for step in epoch for i in step.ids) == list(range(EXAMPLES))
    factors = [4, 4, 12, 12, 12, 12, 12, 20, 20, 20]
    done, expected = 0, []
    for size, planned in zip(sizes, factors, strict=True):
        expected.append(LR * (1 - done / 120) * math.sqrt(planned / 4))
        done += size
    assert [step.learning_rate for step in grown.seen] == pytest.approx(expected)
    torch.testing.assert_close(grown.run.parameters, loop(hf, grown.seen))


def test_the_logs_have_the_plan_and_the_loss_of_each_step_and_the_end_is_saved_and_evaluated(
    grown: SimpleNamespace,
) -> None:
    rows = [row for row in grown.run.log_history if "loss" in row]
    assert [row["batch_size/planned"] for row in rows] == [4, 12, 12, 12, 12, 12, 20, 20, 20, 20]
    assert rows[-1]["epoch"] == 2
    assert all(0.1 < row["loss"] < 3 for row in rows)
    evaluated = [row["step"] for row in grown.run.log_history if "eval_loss" in row]
    assert evaluated == [4, 8, len(grown.seen)]
    saved = {path.name for path in grown.folder.glob("checkpoint-*")}
    assert saved == {f"checkpoint-{step}" for step in evaluated}


@pytest.mark.parametrize(
    ("schedule", "options", "sizes"),
    [
        ({0: 4, 2: 12}, {"num_train_epochs": 0.6}, [4, 4, 12, 12, 4]),  # 36
        # 24 is nearer to 20 than 16, by their ratios
        ({0: 8, 2: 20}, {"gradient_accumulation_steps": 2}, [8, 8, 24, 20, 24, 24, 12]),
        (GROWING, {"max_steps": 27}, [4, 4, 12, 12, 12, 12, 4, 20, 20, 8]),  # 27 x 4
        ({0: 4, 1: 20}, {"max_steps": 16}, [4, 20, 20, 20]),
    ],
    ids=["part of an epoch", "accumulation", "steps", "stream"],
)
def test_a_training_ends_after_the_examples_that_it_would_have(
    schedule: dict[int, float], options: dict[str, Any], sizes: list[int], hf: Any
) -> None:
    endless = options.get("max_steps") == 16
    examples = hf.Stream if endless else hf.numbered

    _, seen = trained(hf, hf.BatchSizeCallback(schedule), examples=examples, **options)

    assert sizes_of(seen) == sizes
    ids = [i for step in seen for i in step.ids]
    assert len({*ids[:EXAMPLES]}) == min(len(ids), EXAMPLES)
    assert not endless or ids == [*range(EXAMPLES), *range(4)]


@pytest.mark.parametrize("stop", [5, slow(7), slow(8)])
def test_a_resumed_training_ends_as_the_whole_one(stop: int, tmp_path: Path, hf: Any) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "num_train_epochs": 4}
    whole, seen = trained(hf, hf.BatchSizeCallback(GROWING), **options)
    _, before = trained(hf, hf.BatchSizeCallback(GROWING), hf.Stop(stop), **options)
    folder = tmp_path / f"checkpoint-{stop}"
    saved = json.loads((folder / "trainer_state.json").read_text())
    assert saved["global_step"] == sum(sizes_of(before)) / ROWS
    assert b"noisescale" not in (folder / "training_args.bin").read_bytes()

    again, after = trained(hf, hf.BatchSizeCallback(GROWING), resume=str(folder), **options)

    assert [*before, *after] == seen
    torch.testing.assert_close(again.parameters, whole.parameters, rtol=0, atol=0)
    rows = [row for row in again.log_history if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(seen) + 1))
    assert rows == [row for row in whole.log_history if "loss" in row]


@pytest.mark.parametrize(
    "changed",
    [
        {"per_device_train_batch_size": 6},  # 8 steps of 6, and 12 more
        slow({"ignore_data_skip": True}),
    ],
)
def test_a_training_resumed_with_other_data_ends_where_the_trainer_does(
    changed: dict[str, Any], tmp_path: Path, hf: Any
) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path)}
    trained(hf, hf.BatchSizeCallback({0: 4}), hf.Stop(8), **options)
    options |= {"resume": str(tmp_path / "checkpoint-8"), **changed}

    _, plain = trained(hf, hf.TrainerCallback(), **options)
    _, kept = trained(hf, hf.BatchSizeCallback({0: 4}), **options)

    assert [s.ids for s in kept] == [s.ids for s in plain][: len(kept)]
    assert sum(sizes_of(kept)) >= sum(sizes_of(plain)) - 4


def test_a_checkpoint_of_a_training_without_it_is_continued(tmp_path: Path, hf: Any) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path)}
    _, before = trained(hf, hf.Stop(8), **options)

    resume = str(tmp_path / "checkpoint-8")
    _, after = trained(hf, hf.BatchSizeCallback({0: 4, 2: 12}), resume=resume, **options)

    assert sizes_of(after) == [4, 4, 12, 8, *[12] * 5]
    assert sorted(i for s in [*before, *after][:12] for i in s.ids) == list(range(EXAMPLES))


def test_a_checkpoint_that_counts_optimizer_steps_is_told(tmp_path: Path, hf: Any) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path)}
    trained(hf, hf.BatchSizeCallback(GROWING), hf.Stop(5), **options)
    folder = tmp_path / "checkpoint-5"
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": 5}))

    with pytest.warns(UserWarning, match="Examples come again"):
        trained(hf, hf.BatchSizeCallback(GROWING), resume=str(folder), **options)


def test_a_schedule_that_waits_for_a_metric_is_left_alone(hf: Any) -> None:
    waits = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}

    _, seen = trained(hf, hf.BatchSizeCallback(GROWING), **waits, **evaluated(hf))

    factors = [math.sqrt(k) for k in (1, 1, 3, 3, 3, 3, 3, 5, 5, 5)]
    assert [s.learning_rate for s in seen] == pytest.approx([LR * f for f in factors])


def test_an_error_leaves_no_factor_behind(hf: Any) -> None:
    trainers: list[Any] = []
    callback = hf.BatchSizeCallback(GROWING)
    with pytest.raises(RuntimeError, match="on purpose"):
        hf.fit(callback, hf.Fails(3), prepare=trainers.append, optim="sgd", max_steps=8)
    (trainer,) = trainers
    with refused("gradient_accumulation_steps"):
        trainer.train()
    trainer.args.gradient_accumulation_steps = 1
    trainer.callback_handler.callbacks.remove(callback)
    rates: list[float] = []
    trainer.optimizer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )

    trainer.train()

    assert max(rates) <= LR


def doubles(noise_scale: Any, plan: Plan, progress: Progress) -> float:
    """Grows once it is given a noise scale."""
    assert progress.share is not None
    return 2.0 * ROWS * plan.devices if noise_scale.steps >= 4 else plan.batch_size


doubles.needs_noise_scale = True  # type: ignore[attr-defined]


def test_it_measures_by_the_callback_that_there_is(hf: Any) -> None:
    callback = hf.BatchSizeCallback(doubles, 8)

    run, seen = trained(hf, callback, hf.NoiseScaleCallback(every_n_steps=1))

    assert {*sizes_of(seen)} == {ROWS, 2 * ROWS}
    assert any("noise_scale" in key for row in run.log_history for key in row)
    assert callback.moves[0].after.batch_size == 2 * ROWS


def test_ranks_grow_together_by_a_callback_of_their_own(hf: Any) -> None:
    first, second = hf.each(2, lambda: trained(hf, hf.BatchSizeCallback(doubles, 16))[1])

    assert sizes_of(first) == sizes_of(second)
    assert len({*sizes_of(first)}) > 1
    assert [s.learning_rate for s in first] == [s.learning_rate for s in second]


def test_what_cannot_be_is_refused(hf: Any) -> None:
    counts_tokens = hf.NoiseScaleCallback(batch_size_fn=lambda inputs: 7.0, unit="tokens")

    with refused("max_batch_size"):
        hf.BatchSizeCallback(max_batch_size=-1)
    with refused("policy", got="'trade-off'"):
        hf.BatchSizeCallback("trade-off")
    with refused("policy", got="'nanochat'", remedy="quarter"):
        hf.BatchSizeCallback("nanochat")
    with refused("auto_find_batch_size"):
        trained(hf, hf.BatchSizeCallback(GROWING), auto_find_batch_size=True)
    with refused("batch_size_fn"):
        trained(hf, hf.BatchSizeCallback(doubles), counts_tokens)
    for policy in (GROWING, "ratio"):  # JSON has no keys that are steps
        state = json.loads(json.dumps(hf.BatchSizeCallback(policy).state()))
        with refused("policy") if policy is GROWING else nullcontext():
            again = hf.BatchSizeCallback.from_state(state)
    assert repr(again) == "BatchSizeCallback(policy='ratio')"


def test_auto_says_where_the_learning_rate_is_no_guide_and_at_the_end_why_the_batch_stayed(
    capsys: pytest.CaptureFixture[str], hf: Any
) -> None:
    hf.fit(
        hf.NoiseScaleCallback(),
        hf.BatchSizeCallback(),
        per_device_train_batch_size=32,
        max_steps=70,
    )

    said = capsys.readouterr().out
    assert said.count("so the learning rate is no guide") == 1
    assert said.count("the batch size stayed 32") == 1


def test_the_loss_of_a_training_reaches_a_policy_that_finds_a_batch(hf: Any) -> None:
    """Also a loss that is divided by the labels of the whole step."""
    from noisescale.hugging_face import BatchSizeCallback

    callback = BatchSizeCallback("find", max_batch_size=64)
    hf.fit(
        callback,
        model=hf.language_model,
        examples=lambda: hf.sentences() * 40,
        max_steps=-1,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )

    losses = callback._controller.losses
    assert not losses.has_a_floor
    assert len(losses.slices) > 3
    assert all(1 < one.loss < 2 * math.log(64) for one in losses.slices)


def test_the_loss_of_an_epochs_short_last_step_is_that_of_its_batches(hf: Any) -> None:
    """Transformers divides by the labels of the batches that came, not of the planned ones."""
    from noisescale.hugging_face import BatchSizeCallback

    class Keeps(Policy):
        needs_loss = True

        def __call__(self, noise_scale: Any, plan: Plan, progress: Progress) -> float:
            return float(plan.batch_size)

    heard: list[float] = []
    with mock.patch.object(
        BatchSizeController, "add_loss", lambda _, loss, __: heard.append(float(loss.detach()))
    ):
        hf.fit(
            BatchSizeCallback(Keeps(), max_batch_size=8),
            model=hf.language_model,
            examples=lambda: hf.sentences()[:1] * 11,
            max_steps=-1,
            num_train_epochs=2,
            learning_rate=0.0,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
        )

    assert len(heard) >= 11
    assert max(heard) < 1.01 * min(heard)


def test_a_model_that_is_saved_while_it_trains_hears_nothing(hf: Any) -> None:
    from noisescale.hugging_face.batch_size_callback import _Hears

    def tell(*_: Any) -> None:
        raise AssertionError

    saved = pickle.loads(pickle.dumps(_Hears(tell)))

    saved(None, (), {}, None)
