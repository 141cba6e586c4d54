# SPDX-License-Identifier: Apache-2.0
"""The callback against gradients of plain copies of the model, micro-batch by micro-batch."""

import copy
import gc
import io
import json
import logging
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import brute_force
import numpy as np
import pytest
import torch
import transformers
from brute_force import micro_batch, whole
from fits import FEATURES, Opaque
from packaging.version import Version
from ranks import as_torchrun, in_a_fork, on_ranks
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    BatchEncoding,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback
from transformers_fits import (
    Classifier,
    Fit,
    Part,
    RecordingTrainer,
    digits,
    fit,
    fits,
    language_model,
    sentences,
)

from noisescale.estimation.moments import GradientMoments
from noisescale.guard import NotMeasured
from noisescale.history.reading import read_metric, read_run
from noisescale.hugging_face import NoiseScaleCallback, trainer_access
from noisescale.hugging_face.backward_start import BackwardStart, differentiable
from noisescale.hugging_face.supported import check_supported
from noisescale.meter.estimates import MomentSums

CLIPPED = {"max_grad_norm": 1e-3}


Weigh = Callable[[list[Part]], np.ndarray]


def evenly(of_rank: list[Part]) -> np.ndarray:
    """What the Trainer divides losses by that are means: the micro-batches there are."""
    return np.full(len(of_rank), 1 / len(of_rank))


def by_labels(of_rank: list[Part]) -> np.ndarray:
    """What it has models weigh losses by: their share of all labels, up to a factor."""
    return np.array([float(p.labels) for p in of_rank])


def by_labels_of_the_rank(of_rank: list[Part]) -> np.ndarray:
    return by_labels(of_rank) / sum(by_labels(of_rank))


def expected(runs: list[Fit], weigh: Weigh, *, by_rank: bool) -> tuple[float, float]:
    """The averages over all steps, of parts that are micro-batches or ranks."""
    found, sizes = [], []
    shares: dict[int, list[float]] = {}
    for step in zip(*(run.steps for run in runs), strict=True):
        parts = []
        for of_rank in step:
            mine = [
                micro_batch(torch.as_tensor(p.gradient).double(), p.examples, weight)
                for p, weight in zip(of_rank, weigh(of_rank), strict=True)
            ]
            parts += [whole(mine)] if by_rank else mine
        sizes.append(sum(p.examples for of_rank in step for p in of_rank))
        if weigh is evenly:
            found.append(brute_force.expected(parts).moments)
            continue
        # The products of different parts, over the mean share that they have in the weights.
        of_step = brute_force.expected(parts)
        total = sum(part.weight for part in parts)
        same = sum((part.weight / total) ** 2 for part in parts)
        shares.setdefault(sizes[-1], []).append(1 - same)
        signal = of_step.big_sq_norm - same * of_step.small_sq_norm
        signal /= np.mean(shares[sizes[-1]])
        found.append((signal, sizes[-1] * (of_step.big_sq_norm - signal)))
    return tuple(np.average(found, axis=0, weights=sizes))


def measured(run: Fit) -> GradientMoments:
    """What the callback found, averaged over all steps."""
    return MomentSums(**run.state["meter"]["estimates"]["sums"]).mean


def logged(run: Fit) -> dict[str, float]:
    return [row for row in run.log_history if "loss" in row][-1]


LANGUAGE = {"model": language_model, "examples": sentences}

counts_labels = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.12"),
    reason="this transformers divides losses by too many labels: one of each sequence is no target",
)


def loads_on_a_numbered_cpu() -> bool:
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    file.seek(0)
    try:
        torch.load(file, map_location="cpu:0")
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "weigh"),
    [
        (CLIPPED, evenly),
        ({**CLIPPED, "gradient_accumulation_steps": 2}, evenly),
        pytest.param({**CLIPPED, **LANGUAGE}, by_labels, marks=counts_labels),
        pytest.param(
            {**CLIPPED, **LANGUAGE, "gradient_accumulation_steps": 3},
            by_labels,
            marks=counts_labels,
        ),
        pytest.param(
            {**LANGUAGE, "average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
            by_labels_of_the_rank,
            marks=counts_labels,
        ),
    ],
    ids=["plain", "accumulation", "by labels", "by labels, accumulation", "by a rank's labels"],
)
def test_ranks_are_compared_by_unclipped_gradients(options: dict[str, Any], weigh: Weigh) -> None:
    runs = fits(2, **options)

    signal, trace = expected(runs, weigh, by_rank=True)
    for run in runs:
        assert measured(run) == (pytest.approx(signal, rel=1e-4), pytest.approx(trace, rel=1e-4))
        assert logged(run)["noise_scale/skipped_steps"] == 0


@pytest.mark.parametrize(
    ("options", "weigh"),
    [
        # 60 examples: the last of 5 windows in an epoch is of 3 micro-batches, the others of 4.
        ({**CLIPPED, "gradient_accumulation_steps": 4}, evenly),
        pytest.param(
            {**CLIPPED, **LANGUAGE, "gradient_accumulation_steps": 4},
            by_labels,
            marks=counts_labels,
        ),
        ({**CLIPPED, "gradient_accumulation_steps": 2, "bf16": True}, evenly),
    ],
    ids=["plain", "by labels", "bf16"],
)
def test_one_process_compares_its_micro_batches(options: dict[str, Any], weigh: Weigh) -> None:
    class Recording(RecordingTrainer):
        precision = torch.bfloat16 if options.get("bf16") else torch.float64

    run = fit(NoiseScaleCallback(window=50), kind=Recording, **options)

    assert {len(step) for step in run.steps} <= {2, 3, 4}
    signal, trace = expected([run], weigh, by_rank=False)
    assert measured(run).grad_sq_norm == pytest.approx(signal, rel=1e-4, abs=1e-6)
    assert measured(run).noise_trace == pytest.approx(trace, rel=1e-4)


def test_loss_scaling_is_taken_out() -> None:
    """Accelerate refuses fp16 on CPU: what it does on a GPU is set up by hand, with a real scaler.

    The scale halves at the first steps, whose gradients overflow and which are left out.
    """

    def scale_losses(trainer: Trainer) -> None:
        accelerator = trainer.accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"

    class Recording(RecordingTrainer):
        precision = torch.float16

    run = fit(
        NoiseScaleCallback(window=50),
        kind=Recording,
        prepare=scale_losses,
        gradient_accumulation_steps=2,
        **CLIPPED,
    )

    skipped = int(logged(run)["noise_scale/skipped_steps"])
    assert 0 < skipped < 4
    others = run._replace(steps=run.steps[skipped:])
    signal, trace = expected([others], evenly, by_rank=False)
    assert measured(run) == (pytest.approx(signal, rel=1e-2), pytest.approx(trace, rel=1e-2))


class LossOfLogits(Trainer):
    """A loss the model knows nothing of, from two forward passes."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
        logits = [model(**inputs)["logits"] for _ in range(2)]
        return sum(nn.functional.cross_entropy(x, inputs["labels"]) for x in logits) / 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_of_the_users_own_and_of_several_passes_is_one_micro_batch(ranks: int) -> None:
    def states(kind: type[Trainer]) -> list[Fit]:
        def one() -> Fit:
            options = {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": True}
            return fit(NoiseScaleCallback(window=50), kind=kind, **options)

        return [one()] if ranks == 1 else on_ranks(ranks, as_torchrun(one))

    own, models = states(LossOfLogits)[0], states(Trainer)[0]

    assert measured(own) == pytest.approx(measured(models), rel=1e-4)
    assert own.state["meter"]["counts"]["examples"] == 7 * 8 * ranks


def test_a_backward_pass_begins_once_at_the_first_of_several_tensors() -> None:
    x = torch.ones(2, requires_grad=True)
    logits = x * 2
    unused, loss, late = logits + 1, logits.sum(), x * 3
    seen: list[float] = []
    start = BackwardStart(differentiable({"loss": loss, "more": (unused, [logits]), "no": 1}))
    start.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    start.add([late])

    (7 * loss + late.sum()).backward()

    assert len(seen) == 1
    assert seen[0] in (7, 2)  # of the loss or of what came late, not of the logits


@pytest.mark.parametrize("options", [{}, {**LANGUAGE, "bf16": True}], ids=["plain", "bf16"])
def test_parameters_are_bit_identical(options: dict[str, Any]) -> None:
    options = {**options, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}

    def parameters(*callbacks: TrainerCallback) -> list[list[Tensor]]:
        return on_ranks(2, as_torchrun(lambda: fit(*callbacks, **options).parameters))

    with_it, without = parameters(NoiseScaleCallback()), parameters()

    for ours, theirs in zip(with_it, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", [{}, LANGUAGE], ids=["own loss", "of the model"])
def test_halves_are_measured_when_the_pass_begins(options: dict[str, Any]) -> None:
    """The Trainer does not tell what it goes back from: it is where a gradient comes to first."""
    callback = NoiseScaleCallback(small_batch="half", every_n_steps=1)

    ours, theirs = fit(callback, **options), fit(**options)

    for a, b in zip(ours.parameters, theirs.parameters, strict=True):
        assert torch.equal(a, b)
    assert callback.noise_scale.steps > 5
    assert logged(ours)["noise_scale/skipped_steps"] == 0


@pytest.mark.skipif(
    not loads_on_a_numbered_cpu(),
    reason="this torch does not load what transformers saves of several ranks on CPUs",
)
def test_training_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 3, **LANGUAGE}

    def run(resume: str | None) -> list[Fit]:
        def one() -> Fit:
            callback = NoiseScaleCallback(every_n_steps=2, groups={"first": "layers.0"})
            return fit(callback, resume=resume, logging_steps=2, **options)

        return on_ranks(2, as_torchrun(one))

    whole = run(None)
    resumed = run(str(tmp_path / "checkpoint-3"))

    for ours, theirs in zip(resumed, whole, strict=True):
        # How norms are summed up changes after the first two steps of a run, and the rounding.
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-10, nan_ok=True)
        assert len(numbers(ours)) > 200


def numbers(found: Fit) -> dict[str, float]:
    """All that was measured and logged, by its path; not times, nor the Trainer's own values."""
    flat = {}

    def add(value: Any, path: str) -> None:
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in items:
                add(inner, f"{path}/{key}")
        elif isinstance(value, int | float) and "second" not in path and path[-5:] != "/loss":
            flat[path] = value

    add([found.state, found.log_history[:-1]], "")
    return flat


def test_the_averages_also_go_on_where_the_trainer_restores_callbacks(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2}
    saved = fit(NoiseScaleCallback(), save_strategy="steps", save_steps=7, **options)
    options |= {"restore_callback_states_from_checkpoint": True, "max_steps": 9}
    resume = str(tmp_path / "checkpoint-7")

    resumed = fit(NoiseScaleCallback(window=3), resume=resume, **options)

    rows = [row for row in resumed.log_history if "noise_scale/batch_size" in row]
    assert saved.state["meter"]["counts"]["examples"] == 56
    assert len(rows) == 9


def test_a_function_is_not_lost_where_the_trainer_restores_callbacks() -> None:
    state = NoiseScaleCallback(batch_size_fn=len).state()

    with pytest.raises(TypeError, match="`batch_size_fn` must be callable, got 'len'"):
        NoiseScaleCallback.from_state(json.loads(json.dumps(state)))


class Recorder(TrainerCallback):
    """Stands for TensorBoard's and others, which come before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logs.append(dict(logs))


def test_all_that_report_see_the_metrics_of_training_alone() -> None:
    recorder = Recorder()

    run = fit(
        recorder,
        NoiseScaleCallback(every_n_steps=3),
        gradient_accumulation_steps=2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        extras={"eval_dataset": digits()[:8]},
    )

    ours = [{k for k in logs if k.startswith("noise_scale/")} for logs in recorder.logs]
    kept = [{k for k in logs if k.startswith("noise_scale/")} for logs in run.log_history]
    assert ours == kept
    assert all("noise_scale/lower_bound" in row for row in ours[:6:2])
    assert "noise_scale/noise_trace" in ours[-1]  # step 7, measured after the last log step
    assert not any(k for k, logs in zip(ours, recorder.logs, strict=True) if "eval_loss" in logs)


def test_the_console_shows_three_keys_and_what_reports_gets_all(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before, after, callback = Recorder(), Recorder(), NoiseScaleCallback(every_n_steps=1)
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=40, logging_steps=10, **quiet)
    trainer = Trainer(Classifier(), args, train_dataset=digits(), callbacks=[before, callback])
    trainer.add_callback(after)  # after the one that prints
    known = list(trainer.callback_handler.callbacks)

    trainer.train()

    printed = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert len(printed) == 4
    resolved = {f"noise_scale/{key}" for key in ("simple", "simple_low", "simple_high")}
    shown = [set(re.findall(r"noise_scale/\w+", line)) for line in printed]
    assert all(keys in (resolved, {"noise_scale/lower_bound"}) for keys in shown)
    assert resolved in shown
    ours, theirs = (
        [{k: v for k, v in logs.items() if k.startswith("noise_scale/")} for logs in them.logs]
        for them in (before, after)
    )
    assert ours == theirs
    assert all(len(keys) > 4 for keys in theirs[:4])
    assert set(known) == set(trainer.callback_handler.callbacks)


@pytest.mark.parametrize("reported", [True, False])
def test_a_run_is_read_back_from_where_the_trainer_writes(tmp_path: Path, reported: bool) -> None:
    """In TensorBoard the Trainer puts "train/" before the names, and counts steps from 1."""
    callback, board, output = NoiseScaleCallback(unit="rows"), tmp_path / "board", tmp_path / "out"
    reports = [TensorBoardCallback(SummaryWriter(str(board)))] if reported else []

    fit(*reports, callback, gradient_accumulation_steps=2, output_dir=str(output))

    read = read_run(board if reported else output)
    assert read.loop == "transformers"
    assert read["step"].tolist() == callback.history["step"].tolist() == list(range(1, 8))
    assert read.unit == "rows"
    for column in ("examples", "low", "increment_noise_trace", "accumulation"):
        assert read[column].tolist() == callback.history[column].tolist()
    if reported:
        steps, _ = read_metric(board, "train/loss")
        assert steps.tolist() == list(range(1, 8))


def test_evaluation_and_checkpoints_are_left_out_of_the_times(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "output_dir": str(tmp_path)}

    def timed(**more: Any) -> list[bool]:
        run = fit(NoiseScaleCallback(), **options, **more)
        return ["noise_scale/seconds_per_step" in row for row in run.log_history[:-1]]

    evaluating = timed(eval_strategy="steps", eval_steps=1, extras={"eval_dataset": digits()[:8]})

    assert timed() == [False] + [True] * 6
    assert not any(evaluating)
    assert not any(timed(save_strategy="steps", save_steps=1))


def hooks_on(model: nn.Module) -> int:
    found = len(torch_modules._global_forward_pre_hooks)
    found += sum(len(m._forward_hooks) for m in model.modules())
    return found + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("failing_step", [0, 2])
def test_nothing_stays_in_the_model_after_training_nor_after_an_error(failing_step: int) -> None:
    class Failing(TrainerCallback):
        fails = True

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.fails and state.global_step == failing_step:
                raise RuntimeError("on purpose")

    trainers: list[Trainer] = []
    callback, failing = NoiseScaleCallback(), Failing()
    options = {"gradient_accumulation_steps": 2, "prepare": trainers.append}
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(callback, failing, **options)
    failing.fails = False

    trainers[0].train()

    assert hooks_on(trainers[0].model) == 0
    assert callback.history["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_between_steps_the_model_has_no_hooks(accumulated: int, tmp_path: Path) -> None:
    """Evaluation is as it is without, and a copy or a pickle is of the model alone."""
    seen: list[int] = []

    class Looking(TrainerCallback):
        def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            pickle.dumps(copy.deepcopy(model))
            self.on_prediction_step(model=model)

        def on_prediction_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            hooks = len(torch_modules._global_forward_hooks)
            seen.append(hooks + sum(len(m._forward_hooks) for m in model.modules()))

    gc.collect()
    there = len(torch_modules._global_forward_hooks)
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "output_dir": str(tmp_path)}
    callback = NoiseScaleCallback(every_n_steps=1)

    fit(
        callback,
        Looking(),
        gradient_accumulation_steps=accumulated,
        extras={"eval_dataset": digits()[:8]},
        **evaluated,
    )

    assert len(seen) > 7
    assert max(seen) <= there
    assert callback.noise_scale.steps > 4


def test_labels_that_are_hidden_are_told_of() -> None:
    def loss(output: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        logits = output["logits"][:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    options = {"gradient_accumulation_steps": 2, "extras": {"compute_loss_func": loss}}
    trainer_access._warn_that_labels_are_hidden.cache_clear()

    with pytest.warns(UserWarning, match="assumes that all micro-batches have equally many"):
        run = fit(NoiseScaleCallback(), **LANGUAGE, **options)

    assert run.noise_scale.noise_trace > 0


def test_the_batch_size_is_that_of_the_users_function() -> None:
    callback = NoiseScaleCallback(batch_size_fn=lambda inputs: inputs["x"].numel(), unit="pixels")

    run = fit(callback, gradient_accumulation_steps=2)

    assert logged(run)["noise_scale/batch_size"] == 2 * 4 * FEATURES


@pytest.mark.parametrize(
    ("workload", "options", "unit"),
    [
        (LANGUAGE, {}, "sequences"),
        (LANGUAGE, {"unit": "texts"}, "texts"),
        (LANGUAGE, {"batch_size_fn": lambda inputs: inputs["input_ids"].numel()}, "examples"),
        ({}, {}, "examples"),
    ],
)
def test_the_unit_is_guessed_from_what_the_model_takes(
    workload: dict[str, Any], options: dict[str, Any], unit: str
) -> None:
    callback = NoiseScaleCallback(**options)

    run = fit(callback, gradient_accumulation_steps=2, **workload)

    assert run.noise_scale.unit == unit


def test_a_training_that_is_resumed_keeps_its_unit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps"}
    options |= {"save_steps": 3, "gradient_accumulation_steps": 2, **LANGUAGE}
    fit(NoiseScaleCallback(unit="texts"), **options)

    resumed = fit(NoiseScaleCallback(), resume=str(tmp_path / "checkpoint-3"), **options)

    assert resumed.noise_scale.unit == "texts"


def test_a_guessed_unit_is_said_where_the_trainer_says_how_it_trains() -> None:
    with TestCase().assertLogs("transformers", logging.INFO) as logged:
        fit(NoiseScaleCallback(), gradient_accumulation_steps=2, **LANGUAGE)

    assert "  Noise scale is counted in sequences" in [r.getMessage() for r in logged.records]


@pytest.mark.parametrize(
    ("model", "is_text"),
    [
        (transformers.GPT2LMHeadModel, True),
        (transformers.BertModel, True),
        (transformers.T5ForConditionalGeneration, True),
        (transformers.CLIPTextModel, True),
        (transformers.CLIPModel, False),
        (transformers.LlavaModel, False),
        (transformers.ClapModel, False),
        (transformers.Qwen2AudioForConditionalGeneration, False),
        (transformers.ViTModel, False),
        (transformers.WhisperModel, False),
        (nn.Linear, False),
    ],
)
def test_models_of_transformers_say_what_their_examples_are(model: Any, is_text: bool) -> None:
    assert trainer_access.takes_token_ids(model) is is_text


def test_the_batch_size_cannot_always_be_inferred() -> None:
    message = (
        "`batch_size_fn` must be given for batches whose size cannot be inferred, got a batch of"
        " text. Pass a function from the model's keyword arguments to the number of this rank's"
        " examples."
    )
    with pytest.raises(ValueError, match="batch_size_fn") as error:
        trainer_access.BatchCounter()({"text": ["one", "two"]})
    assert str(error.value) == message


def test_a_batch_in_doubt_is_told_of_once() -> None:
    count = trainer_access.BatchCounter()
    message = (
        "The tensors of a batch differ in their first dimension. NoiseScaleCallback counts 3"
        " examples. If this number is wrong, pass `batch_size_fn`."
    )

    with pytest.warns(UserWarning, match="differ in their first") as warned:
        counted = [count({"a": torch.zeros(3), "b": torch.zeros(2, 2)}) for _ in range(2)]

    assert counted == [3, 3]
    assert [str(w.message) for w in warned] == [message]


def test_what_cannot_be_gone_through_is_refused_with_the_remedy() -> None:
    batch: dict[str, Any] = {}
    batch["itself"] = batch

    with pytest.raises(ValueError, match="got a batch of itself") as error:
        trainer_access.BatchCounter()(batch)

    assert isinstance(error.value.__cause__, RecursionError)


def ragged_sentences() -> list[dict[str, Any]]:
    return [{"input_ids": list(range(2 + i % 8))} for i in range(60)]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_sequences_that_are_packed_in_one_row_are_counted(accumulated: int) -> None:
    callback = NoiseScaleCallback()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(
            callback,
            model=language_model,
            examples=ragged_sentences,
            extras={"data_collator": DataCollatorWithFlattening()},
            gradient_accumulation_steps=accumulated,
            max_steps=3,
        )

    assert list(callback.history["batch_size"]) == [4 * accumulated] * 3
    assert list(callback.history["examples"]) == [4 * accumulated * step for step in (1, 2, 3)]
    # One row has no halves.
    single = [w for w in told if "A batch of 1 has no halves to compare" in str(w.message)]
    assert len(single) == (accumulated == 1)


def test_one_example_in_doubt_is_told_of_in_the_singular() -> None:
    with pytest.warns(UserWarning, match=r" counts 1 example\. If"):
        trainer_access.BatchCounter()({"a": torch.zeros(1), "b": torch.zeros(2)})


def test_a_batch_that_transformers_encoded_counts_its_sequences() -> None:
    encoded = BatchEncoding({"input_ids": torch.zeros(4, 7), "labels": torch.zeros(4, 7)})
    detection = {
        "pixel_values": torch.zeros(4, 3, 8, 8),
        "labels": [{"boxes": torch.zeros(2, 4)}] * 4,
    }

    assert [trainer_access.BatchCounter()(batch) for batch in (encoded, detection)] == [4, 4]


def test_one_process_whose_examples_cannot_be_told_apart_trains_on() -> None:
    with pytest.warns(UserWarning, match="NoiseScaleCallback has nothing to measure") as warned:
        run = fit(NoiseScaleCallback(), model=lambda: Classifier(Opaque()))

    assert "(`gradient_accumulation_steps=2`)" in str(warned[0].message)
    assert not any(key.startswith("noise_scale/") for row in run.log_history for key in row)


@pytest.mark.parametrize(
    ("settings", "distributed_type", "named"),
    [
        ({}, "XLA", "^`distributed_type` is XLA: "),
        ({"n_gpu": 2}, "NO", "^`n_gpu` is 2: nn.DataParallel"),
        (
            {"parallelism_config": SimpleNamespace(tp_size=1, cp_size=2)},
            "FSDP",
            "^`parallelism_config.cp_size` is 2: 2 ranks have one example together",
        ),
        ({"optim": "lomo"}, "NO", "^`optim` is lomo: it steps within the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "NO", "^`optim` is galore_adamw_layerwise"),
    ],
)
def test_settings_that_cannot_be_measured_are_named(
    settings: dict[str, Any], distributed_type: str, named: str
) -> None:
    defaults = {"n_gpu": 1, "parallelism_config": None, "optim": "adamw_torch"}
    args: Any = SimpleNamespace(**{**defaults, **settings})

    with pytest.raises(NotMeasured, match=named):
        check_supported(args, distributed_type, nn.Linear(1, 1))


def test_a_model_that_is_shared_out_over_ranks_is_named() -> None:
    args: Any = SimpleNamespace(n_gpu=1, parallelism_config=None, optim="adamw_torch")
    model: Any = nn.Linear(1, 1)
    model.tp_size = 2

    with pytest.raises(NotMeasured, match=r"^`tp_plan` is over 2 ranks: the Trainer gives"):
        check_supported(args, "MULTI_GPU", model)


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="`batch_size_fn` must be callable, got 3"):
        NoiseScaleCallback(batch_size_fn=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`every_n_steps` must be at least 1, got 0"):
        NoiseScaleCallback(every_n_steps=0)


def test_its_repr_has_what_was_given() -> None:
    assert repr(NoiseScaleCallback()) == "NoiseScaleCallback()"
    given = "batch_size_fn=<built-in function len>, unit='tokens'"
    assert (
        repr(NoiseScaleCallback(batch_size_fn=len, unit="tokens")) == f"NoiseScaleCallback({given})"
    )


CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:  # early versions of transformers 5
    CHECKPOINTING = "gradient_checkpointing"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        {f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}},
        {f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=["checkpointed", "checkpointed, reentrant", "compiled"],
)
# The hook that torch tells of is gone when the model is compiled: it waits for this first call.
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@in_a_fork
def test_compiled_and_checkpointed_models_are_measured_alike(
    ranks: int, more: dict[str, Any]
) -> None:
    def trace(**more: Any) -> float:
        def one() -> float:
            options = {**LANGUAGE, "gradient_accumulation_steps": 2, "max_steps": 4}
            return fit(NoiseScaleCallback(), **options, **more).noise_scale.noise_trace

        return one() if ranks == 1 else on_ranks(ranks, as_torchrun(one))[0]

    more = {CHECKPOINTING: f"{CHECKPOINTING}_kwargs" in more, **more}

    assert trace(**more) == pytest.approx(trace(), rel=1e-5)


@pytest.mark.parametrize("distributed", [True, False])
def test_ranks_that_share_examples_are_warned_about(distributed: bool) -> None:
    class OneForAll(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(digits(), batch_size=4)

    def said() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(NoiseScaleCallback(), kind=Trainer if distributed else OneForAll, max_steps=18)
        return [str(w.message) for w in caught if "Ranks train" in str(w.message)]

    first, second = on_ranks(2, as_torchrun(said))

    assert len(first) == (not distributed)
    assert second == []
