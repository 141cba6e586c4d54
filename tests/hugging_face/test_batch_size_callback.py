# SPDX-License-Identifier: Apache-2.0
"""Windows, learning rates and ends of trainings whose batch grows, against a loop of our own."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fits import data
from ranks import as_torchrun, on_ranks
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers_fits import Classifier, Fit, fit

from noisescale.hugging_face import BatchSizeCallback, NoiseScaleCallback
from noisescale.plan import Plan
from noisescale.refusal import Refusal
from noisescale.scheduling.policy import Progress

ROWS, EXAMPLES, LR = 4, 60, 0.05
GROWING = {0: 4, 2: 12, 7: 20}


class Seen(NamedTuple):
    """A step as a training took it."""

    ids: list[int]
    """The examples."""
    learning_rate: float
    """As the optimizer used it."""


class Numbered(Trainer):
    """Takes the numbers of the examples out of each batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ids: list[int] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        inputs = dict(inputs)
        self.ids += inputs.pop("number").tolist()
        return super().training_step(model, inputs, num_items_in_batch)


class Spy(TrainerCallback):
    """Keeps the examples of each step and the learning rate that the optimizer uses."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        optimizer.optimizer.register_step_pre_hook(self._keep)

    def _keep(self, optimizer: Any, *_: Any) -> None:
        self.seen.append(Seen(self.trainer.ids, optimizer.param_groups[0]["lr"]))
        self.trainer.ids = []


def numbered() -> list[dict[str, Tensor]]:
    return [
        {"x": x, "labels": y, "number": torch.tensor(i)} for i, (x, y) in enumerate(data(EXAMPLES))
    ]


class Stream(IterableDataset):
    """The same examples for ever, without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from numbered()


def trained(
    callback: TrainerCallback, *others: TrainerCallback, examples: Any = numbered, **options: Any
) -> tuple[Fit, list[Seen]]:
    spy = Spy()

    def prepare(trainer: Trainer) -> None:
        spy.trainer = trainer

    defaults: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "optim": "sgd",
        "learning_rate": LR,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.0,
        "remove_unused_columns": False,
    }
    run = fit(
        *others,
        callback,
        spy,
        kind=Numbered,
        examples=examples,
        prepare=prepare,
        **{**defaults, **options},
    )
    return run, spy.seen


def loop(seen: list[Seen]) -> list[Tensor]:
    """The parameters after the same steps: one mean gradient each, by plain descent."""
    model, examples = Classifier(), numbered()
    for step in seen:
        model.zero_grad()
        x = torch.stack([examples[i]["x"] for i in step.ids])
        y = torch.stack([examples[i]["labels"] for i in step.ids])
        model(x, y)["loss"].backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= step.learning_rate * p.grad
    return list(model.parameters())


def test_each_epoch_has_every_example_once_and_the_schedule_keeps_to_the_examples() -> None:
    run, seen = trained(BatchSizeCallback(GROWING))
    sizes = [len(step.ids) for step in seen]
    #  60 = 4 + 4 + 5 x 12 less what is left at the end, then 3 x 20
    assert sizes == [4, 4, 12, 12, 12, 12, 4, 20, 20, 20]
    for epoch in (seen[:7], seen[7:]):
        assert sorted(i for step in epoch for i in step.ids) == list(range(EXAMPLES))
    factors = [4, 4, 12, 12, 12, 12, 12, 20, 20, 20]
    done, expected = 0, []
    for size, planned in zip(sizes, factors, strict=True):
        expected.append(LR * (1 - done / 120) * math.sqrt(planned / 4))
        done += size
    assert [step.learning_rate for step in seen] == pytest.approx(expected)
    for ours, theirs in zip(run.parameters, loop(seen), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_logs_have_the_plan_and_the_loss_of_each_step() -> None:
    run, _ = trained(BatchSizeCallback(GROWING))
    rows = [row for row in run.log_history if "loss" in row]
    assert [row["batch_size/planned"] for row in rows] == [4, 12, 12, 12, 12, 12, 20, 20, 20, 20]
    assert rows[-1]["epoch"] == 2
    assert all(0.1 < row["loss"] < 3 for row in rows)


def test_a_part_of_an_epoch_ends_after_its_examples() -> None:
    _, seen = trained(BatchSizeCallback({0: 4, 2: 12}), num_train_epochs=0.6)
    assert [len(step.ids) for step in seen] == [4, 4, 12, 12, 4]  # 36


def test_steps_grow_by_multiples_of_the_accumulation() -> None:
    _, seen = trained(BatchSizeCallback({0: 8, 2: 20}), gradient_accumulation_steps=2)
    sizes = [len(step.ids) for step in seen]
    assert sizes == [8, 8, 24, 20, 24, 24, 12]  # 24 is nearer to 20 than 16, by their ratios
    assert sorted(i for step in seen[:4] for i in step.ids) == list(range(EXAMPLES))


def test_a_number_of_steps_is_one_of_examples() -> None:
    _, seen = trained(BatchSizeCallback(GROWING), max_steps=27)
    assert [len(step.ids) for step in seen] == [4, 4, 12, 12, 12, 12, 4, 20, 20, 8]  # 27 x 4


def test_a_stream_ends_after_as_many_examples() -> None:
    _, seen = trained(BatchSizeCallback({0: 4, 1: 20}), examples=Stream, max_steps=16)
    assert [len(step.ids) for step in seen] == [4, 20, 20, 20]
    assert [i for step in seen for i in step.ids] == [*range(60), *range(4)]


def stopping_at(step: int) -> TrainerCallback:
    """Saves a checkpoint after a step, and ends the training."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                control.should_training_stop = control.should_save = True

    return Stop()


@pytest.mark.parametrize("stop", [5, 7, 8])
def test_a_resumed_training_ends_as_the_whole_one(stop: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "num_train_epochs": 4}
    whole, seen = trained(BatchSizeCallback(GROWING), **options)
    _, before = trained(BatchSizeCallback(GROWING), stopping_at(stop), **options)
    folder = tmp_path / f"checkpoint-{stop}"
    saved = json.loads((folder / "trainer_state.json").read_text())
    done = sum(len(step.ids) for step in before)
    assert saved["global_step"] == done / ROWS
    assert b"noisescale" not in (folder / "training_args.bin").read_bytes()

    again, after = trained(BatchSizeCallback(GROWING), resume=str(folder), **options)

    assert [*before, *after] == seen
    for ours, theirs in zip(again.parameters, whole.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    rows = [row for row in again.log_history if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(seen) + 1))
    assert rows == [row for row in whole.log_history if "loss" in row]


def test_a_training_resumed_with_other_data_ends_where_the_trainer_does(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path)}
    trained(BatchSizeCallback({0: 4}), stopping_at(8), **options)
    resume = str(tmp_path / "checkpoint-8")
    for changed in (
        {"per_device_train_batch_size": 6},  # 8 steps of 6, and 12 more
        {"ignore_data_skip": True},
    ):
        _, plain = trained(TrainerCallback(), resume=resume, **options, **changed)

        _, kept = trained(BatchSizeCallback({0: 4}), resume=resume, **options, **changed)

        assert [s.ids for s in kept] == [s.ids for s in plain][: len(kept)]
        assert sum(len(s.ids) for s in kept) >= sum(len(s.ids) for s in plain) - 4


def test_a_checkpoint_of_a_training_without_it_is_continued(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path)}
    _, before = trained(stopping_at(8), **options)

    resume = str(tmp_path / "checkpoint-8")
    _, after = trained(BatchSizeCallback({0: 4, 2: 12}), resume=resume, **options)

    assert [len(step.ids) for step in after] == [4, 4, 12, 8, *[12] * 5]
    assert sorted(i for s in [*before, *after][:12] for i in s.ids) == list(range(EXAMPLES))


def test_a_checkpoint_that_counts_optimizer_steps_is_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path)}
    trained(BatchSizeCallback(GROWING), stopping_at(5), **options)
    folder = tmp_path / "checkpoint-5"
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": 5}))

    with pytest.warns(UserWarning, match="Examples come again. Resume from a checkpoint in"):
        trained(BatchSizeCallback(GROWING), resume=str(folder), **options)


def test_the_end_is_saved_and_evaluated_as_without_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "prediction_loss_only": True,
    }

    run, seen = trained(
        BatchSizeCallback(GROWING),
        extras={
            "eval_dataset": [{k: v for k, v in e.items() if k != "number"} for e in numbered()]
        },
        **options,
    )

    evaluated = [row["step"] for row in run.log_history if "eval_loss" in row]
    assert evaluated == [4, 8, len(seen)]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        f"checkpoint-{step}" for step in evaluated
    }


def test_a_schedule_that_waits_for_a_metric_is_left_alone() -> None:
    _, seen = trained(
        BatchSizeCallback(GROWING),
        lr_scheduler_type="reduce_lr_on_plateau",
        eval_strategy="epoch",
        prediction_loss_only=True,
        extras={
            "eval_dataset": [{k: v for k, v in e.items() if k != "number"} for e in numbered()]
        },
    )

    factors = [math.sqrt(k) for k in (1, 1, 3, 3, 3, 3, 3, 5, 5, 5)]
    assert [s.learning_rate for s in seen] == pytest.approx([LR * f for f in factors])


def test_an_error_leaves_no_factor_behind() -> None:
    class Fails(TrainerCallback):
        fails = True

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.fails and state.global_step == 4:
                raise RuntimeError("on purpose")

    trainers: list[Trainer] = []
    callback, fails = BatchSizeCallback(GROWING), Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(callback, fails, prepare=trainers.append, optim="sgd", max_steps=8)
    with pytest.raises(Refusal, match="gradient_accumulation_steps"):
        trainers[0].train()
    fails.fails, trainers[0].args.gradient_accumulation_steps = False, 1
    trainers[0].callback_handler.callbacks.remove(callback)
    rates: list[float] = []
    trainers[0].optimizer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )

    trainers[0].train()

    assert max(rates) <= LR


def test_steps_are_not_made_examples_by_a_checkpoint() -> None:
    state = json.loads(json.dumps(BatchSizeCallback(GROWING).state()))
    with pytest.raises(ValueError, match="policy"):
        BatchSizeCallback.from_state(state)

    again = BatchSizeCallback.from_state(json.loads(json.dumps(BatchSizeCallback("ratio").state())))
    assert repr(again) == "BatchSizeCallback(policy='ratio')"


def doubles(noise_scale: Any, plan: Plan, progress: Progress) -> float:
    """Grows once it is given a noise scale."""
    assert progress.share is not None
    return 2.0 * ROWS if noise_scale.steps >= 4 else plan.batch_size


doubles.needs_noise_scale = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [False, True])
def test_it_measures_by_the_callback_that_there_is_or_by_its_own(given: bool) -> None:
    own = [NoiseScaleCallback(every_n_steps=1)] if given else []
    callback = BatchSizeCallback(doubles, 8)
    run, seen = trained(callback, *own)
    assert {len(step.ids) for step in seen} == {ROWS, 2 * ROWS}
    assert any("noise_scale" in key for row in run.log_history for key in row)
    assert callback.moves[0].after.batch_size == 2 * ROWS


def test_ranks_grow_together() -> None:
    def one() -> list[Seen]:
        return trained(BatchSizeCallback(doubles, 16))[1]

    runs = on_ranks(2, as_torchrun(one))
    sizes = [[len(step.ids) for step in seen] for seen in runs]
    assert sizes[0] == sizes[1]
    assert [s.learning_rate for s in runs[0]] == [s.learning_rate for s in runs[1]]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"auto_find_batch_size": True}, "auto_find_batch_size")],
)
def test_settings_that_fix_a_step_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(Refusal, match=named):
        trained(BatchSizeCallback(GROWING), **options)


def test_arguments_are_checked_where_they_are_given() -> None:
    with pytest.raises(ValueError, match="max_batch_size"):
        BatchSizeCallback(max_batch_size=-1)
    with pytest.raises(ValueError, match="policy"):
        BatchSizeCallback("trade-off")  # type: ignore[arg-type]


def test_a_monitor_that_counts_otherwise_is_refused() -> None:
    monitor = NoiseScaleCallback(batch_size_fn=lambda inputs: 7.0, unit="tokens")
    with pytest.raises(Refusal, match="batch_size_fn"):
        trained(BatchSizeCallback(doubles), monitor)


@pytest.mark.parametrize("falls", [False, True])
def test_auto_says_once_what_it_makes_of_the_schedule(
    falls: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "linear" if falls else "constant"

    fit(NoiseScaleCallback(), BatchSizeCallback(max_batch_size=8), lr_scheduler_type=kind)

    said = capsys.readouterr().out
    assert said.count('policy="auto" is "bounded_seesaw"') == 1
    assert ("The learning rate never falls" in said) != falls
