# SPDX-License-Identifier: Apache-2.0
"""The callback against gradients of plain copies of the model, micro-batch by micro-batch."""

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import brute_force
import numpy as np
import pytest
import torch
from brute_force import micro_batch, whole
from fits import FEATURES, heard
from packaging.version import Version
from ranks import in_a_fork
from refused import refused
from tiers import slow, slow_after, slow_but
from torch import Tensor, nn

from noisescale.guard import Guard, NotMeasured
from noisescale.history.document import Document
from noisescale.history.reading import read_metric, read_run

CLIPPED = {"max_grad_norm": 1e-3}
LANGUAGE = {"language": True}

Weigh = Callable[[list[Any]], np.ndarray]


def evenly(of_rank: list[Any]) -> np.ndarray:
    """What the Trainer divides losses by that are means: the micro-batches there are."""
    return np.full(len(of_rank), 1 / len(of_rank))


def by_labels(of_rank: list[Any]) -> np.ndarray:
    """What it has models weigh losses by: their share of all labels, up to a factor."""
    return np.array([float(p.labels) for p in of_rank])


def by_labels_of_the_rank(of_rank: list[Any]) -> np.ndarray:
    return by_labels(of_rank) / sum(by_labels(of_rank))


def expected(runs: list[Any], weigh: Weigh, *, by_rank: bool) -> tuple[float, float]:
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


def skip_unless_labels_are_counted(weigh: Weigh) -> None:
    if weigh is not evenly and Version(metadata.version("transformers")) < Version("5.12"):
        pytest.skip("this transformers counts a label of each sequence that is no target")


def loads_on_a_numbered_cpu() -> bool:
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    file.seek(0)
    try:
        torch.load(file, map_location="cpu:0")
    except RuntimeError:
        return False
    return True


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


ON_RANKS: dict[str, tuple[dict[str, Any], Weigh]] = {
    "by labels, accumulation": (
        {**CLIPPED, **LANGUAGE, "gradient_accumulation_steps": 3},
        by_labels,
    ),
    "plain": (CLIPPED, evenly),
    "accumulation": ({**CLIPPED, "gradient_accumulation_steps": 2}, evenly),
    "by labels": ({**CLIPPED, **LANGUAGE}, by_labels),
    "by a rank's labels": (
        {**LANGUAGE, "average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
        by_labels_of_the_rank,
    ),
    "bf16": ({"bf16": True, "max_grad_norm": 0.1, "gradient_accumulation_steps": 2}, evenly),
}


@pytest.mark.parametrize("case", slow_but(ON_RANKS, "by labels, accumulation"))
def test_ranks_are_compared_by_unclipped_gradients_and_train_as_without(case: str, hf: Any) -> None:
    """One of them warns where they share examples."""
    options, weigh = ON_RANKS[case]

    def one() -> Any:
        with heard() as said:
            run = hf.recorded(**options)
        without = hf.fit(kind=hf.RecordingTrainer, **options).parameters
        with heard() as shared:
            hf.fit(hf.NoiseScaleCallback(), kind=hf.OneForAll, max_steps=18)
        return run, without, *(["Ranks train" in text for text in of] for of in (said, shared))

    of_ranks = hf.each(2, one)

    assert all(same(run.parameters, without) for run, without, *_ in of_ranks)
    assert not any(of_ranks[0][2] + of_ranks[1][2])
    assert [sum(shared) for *_, shared in of_ranks] == [1, 0]
    skip_unless_labels_are_counted(weigh)
    signal, trace = expected([run for run, *_ in of_ranks], weigh, by_rank=True)
    for run, *_ in of_ranks:
        assert run.moments == (pytest.approx(signal, rel=1e-4), pytest.approx(trace, rel=1e-4))
        assert run.logged["noise_scale/skipped_steps"] == 0


@cache
def one_process(hf: Any, options: str, accumulated: int = 4) -> SimpleNamespace:
    """A fit with some options switched on, and what it informs of.

    An epoch has 15 micro-batches: the last one of windows of 4 has 3.
    """
    seen = SimpleNamespace(folder=Path(mkdtemp()), callback=hf.NoiseScaleCallback(window=50))
    with TestCase().assertLogs("transformers", "INFO") as informed:
        seen.run = hf.fit(
            seen.callback,
            kind=hf.RecordingTrainer,
            output_dir=str(seen.folder),
            gradient_accumulation_steps=accumulated,
            **CLIPPED,
            **dict.fromkeys(options.split(), True),
        )
    seen.informed = [record.getMessage() for record in informed.records]
    return seen


@pytest.mark.parametrize(
    ("options", "windows", "weigh"),
    slow_after(2, [("", {3, 4}, evenly), ("language", {3, 4}, by_labels), ("bf16", {2}, evenly)]),
)
def test_one_process_compares_its_micro_batches(
    options: str, windows: set[int], weigh: Weigh, hf: Any
) -> None:
    skip_unless_labels_are_counted(weigh)

    seen = one_process(hf, options, max(windows))

    run = seen.run
    shown = [logged["loss"] for logged in run.log_history if "loss" in logged]
    # The Trainer's mean is over tokens, ours over sequences.
    near = pytest.approx(shown[1:], rel=1e-3 if weigh is evenly else 0.2)
    assert seen.callback.history["training_loss"][1:] == near
    assert {len(step) for step in run.steps} == windows
    signal, trace = expected([run], weigh, by_rank=False)
    assert run.moments.grad_sq_norm == pytest.approx(signal, rel=1e-4, abs=1e-6)
    assert run.moments.noise_trace == pytest.approx(trace, rel=1e-4)


def test_the_unit_is_guessed_from_what_the_model_takes_and_is_said(hf: Any) -> None:
    for options, unit in (("", "examples"), ("language", "sequences")):
        seen = one_process(hf, options)
        assert seen.run.noise_scale.unit == unit
        assert sum(text.endswith(f"counted in {unit}") for text in seen.informed) == 1

    counts_tokens = hf.NoiseScaleCallback(batch_size_fn=lambda inputs: inputs["input_ids"].numel())
    run = hf.fit(counts_tokens, gradient_accumulation_steps=2, max_steps=2, **LANGUAGE)
    assert run.noise_scale.unit == "examples"
    assert run.logged["noise_scale/batch_size"] == 2 * 4 * hf.LENGTH


def test_the_last_step_of_the_training_is_known(hf: Any) -> None:
    callback = hf.NoiseScaleCallback()
    hf.fit(callback, gradient_accumulation_steps=2, max_steps=2)

    assert callback.meter.last_step == 2


class OfParts(nn.Module):
    """A class for each example, by the mean over its parts: the first dimension counts these."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def forward(self, parts: Tensor, of: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = torch.zeros(len(labels), 3).index_add(0, of, self.net(parts))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_halves_have_the_rows_that_a_function_counts(hf: Any) -> None:
    def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        of = torch.arange(len(examples)).repeat_interleave(3)
        parts = torch.stack([one["x"] for one in examples])[of]
        return {"parts": parts, "of": of, "labels": torch.stack([e["labels"] for e in examples])}

    callback = hf.NoiseScaleCallback(every_n_steps=1, batch_size_fn=lambda x: len(x["labels"]))

    run = hf.fit(
        callback,
        model=OfParts,
        extras={"data_collator": collate},
        remove_unused_columns=False,
    )

    assert run.logged["noise_scale/batch_size"] == 4
    assert callback.noise_scale.steps > 5


def test_loss_scaling_is_taken_out(hf: Any) -> None:
    """Accelerate refuses fp16 on CPU: what it does on a GPU is set up by hand, with a real scaler.

    The scale halves at the first steps, whose gradients overflow and which are left out.
    """

    def scale_losses(trainer: Any) -> None:
        accelerator = trainer.accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"

    run = hf.recorded(prepare=scale_losses, gradient_accumulation_steps=2, **CLIPPED)

    skipped = int(run.logged["noise_scale/skipped_steps"])
    assert 0 < skipped < 4
    others = run._replace(steps=run.steps[skipped:])
    signal, trace = expected([others], evenly, by_rank=False)
    assert run.moments == (pytest.approx(signal, rel=1e-2), pytest.approx(trace, rel=1e-2))


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_a_loss_of_the_users_own_and_of_several_passes_is_one_micro_batch(
    ranks: int, hf: Any
) -> None:
    def trained(kind: Any) -> Any:
        options = {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": True}
        return hf.each(ranks, lambda: hf.recorded(kind=kind, **options))[0]

    own, models = trained(hf.LossOfLogits), trained(hf.Trainer)

    assert own.moments == pytest.approx(models.moments, rel=1e-4)
    assert own.state["meter"]["counts"]["examples"] == 7 * 8 * ranks


def test_a_backward_pass_begins_once_at_the_first_of_several_tensors(hf: Any) -> None:
    from noisescale.hugging_face.backward_start import BackwardStart, differentiable

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


@pytest.mark.parametrize("options", [{}, slow(LANGUAGE)], ids=["own loss", "of the model"])
def test_halves_are_measured_when_the_pass_begins(options: dict[str, Any], hf: Any) -> None:
    """The Trainer does not tell what it goes back from: it is where a gradient comes to first."""
    callback, counts = hf.NoiseScaleCallback(small_batch="half", every_n_steps=1), hf.CountsHooks()

    ours, theirs = hf.fit(callback, counts, **options), hf.fit(**options)

    assert same(ours.parameters, theirs.parameters)
    assert callback.noise_scale.steps > 5
    assert ours.logged["noise_scale/skipped_steps"] == 0
    assert max(counts.seen) <= 0


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_training_resumes_as_if_nothing_had_happened(ranks: int, tmp_path: Path, hf: Any) -> None:
    if ranks == 2 and not loads_on_a_numbered_cpu():
        pytest.skip("this torch does not load what transformers saves of several ranks on CPUs")
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 3, **LANGUAGE}
    options |= {"gradient_accumulation_steps": 3 - ranks, "logging_steps": 2}

    def run(resume: str | None, unit: str | None = None) -> list[Any]:
        def one() -> Any:
            groups = {"first": "layers.0"}
            callback = hf.NoiseScaleCallback(every_n_steps=2, groups=groups, unit=unit)
            return hf.fit(callback, resume=resume, **options)

        return hf.each(ranks, one)

    whole = run(None, "texts")
    resumed = run(str(tmp_path / "checkpoint-3"))

    for ours, theirs in zip(resumed, whole, strict=True):
        # How norms are summed up changes after the first two steps of a run, and the rounding.
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-10, nan_ok=True)
        assert len(numbers(ours)) > 200
        assert ours.noise_scale.unit == "texts"


def numbers(found: Any) -> dict[str, float]:
    """All that was measured and logged, by its path; not times, nor the Trainer's own values."""
    flat = {}

    def add(value: Any, path: str) -> None:
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in items:
                add(inner, f"{path}/{key}")
        elif isinstance(value, int | float) and "second" not in path and path[-5:] != "/loss":
            flat[path] = value

    (part,) = Document(found.state["document"]).parts.values()
    rows = {name: values.tolist() for name, values in part.history().items()}
    add([{**found.state, "document": rows}, found.log_history[:-1]], "")
    return flat


def test_the_averages_also_go_on_where_the_trainer_restores_callbacks(
    tmp_path: Path, hf: Any
) -> None:
    options = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2}
    first = hf.fit(hf.NoiseScaleCallback(), hf.Stop(3), **options)
    options |= {"restore_callback_states_from_checkpoint": True, "max_steps": 5}
    resume = str(tmp_path / "checkpoint-3")

    resumed = hf.fit(hf.NoiseScaleCallback(window=3), resume=resume, **options)

    rows = [row for row in resumed.log_history if "noise_scale/batch_size" in row]
    assert first.state["meter"]["counts"]["examples"] == 24
    assert len(rows) == 5


def test_a_function_is_not_lost_where_the_trainer_restores_callbacks(hf: Any) -> None:
    state = hf.NoiseScaleCallback(batch_size_fn=len).state()

    with refused("batch_size_fn", error=TypeError, got="'len'"):
        hf.NoiseScaleCallback.from_state(json.loads(json.dumps(state)))


@pytest.fixture(scope="module")
def watched(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A fit of 41 steps that is evaluated, printed and reported; all see every tenth one."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    folder = tmp_path_factory.mktemp("watched")
    seen = SimpleNamespace(folder=folder, hooks=hf.CountsHooks())
    seen.before, seen.after = hf.Recorder(), hf.Recorder()
    seen.callback = hf.NoiseScaleCallback(
        every_n_steps=1, unit="pixels", batch_size_fn=lambda inputs: inputs["x"].numel()
    )

    def prepare(trainer: Any) -> None:
        trainer.add_callback(seen.after)  # after the one that prints
        seen.callbacks = trainer.callback_handler.callbacks
        seen.known = set(seen.callbacks)

    with redirect_stdout(io.StringIO()) as console:
        seen.run = hf.fit(
            TensorBoardCallback(SummaryWriter(str(folder))),
            seen.before,
            seen.callback,
            seen.hooks,
            prepare=prepare,
            gradient_accumulation_steps=2,
            learning_rate=0.0,
            max_steps=41,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=10,
            extras={"eval_dataset": hf.digits()[:8]},
        )
    seen.last = console.getvalue().splitlines()[-2:]
    seen.printed = [line for line in console.getvalue().splitlines() if "'loss'" in line]
    return seen


def test_the_charts_of_tensorboard_have_the_keys_that_the_trainer_writes(
    watched: SimpleNamespace,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    events = EventAccumulator(str(watched.folder)).Reload()

    (written,) = events.Tensors("custom_scalars__config__")
    bands, details = layout_pb2.Layout.FromString(written.tensor_proto.string_val[0]).category
    tags = events.Tags()["scalars"]
    (series,) = bands.chart[0].margin.series
    assert {series.value, series.lower, series.upper} <= {*tags}
    patterns = [pattern for chart in details.chart for pattern in chart.multiline.tag]
    assert len(patterns) == 5
    for pattern in patterns:
        assert any(re.search(pattern, tag) for tag in tags), pattern


def ours(logs: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in logs.items() if key.startswith("noise_scale/")}


def test_all_that_report_see_the_metrics_of_training_alone(watched: SimpleNamespace) -> None:
    reported = [ours(logs) for logs in watched.before.logs]

    assert reported == [ours(logs) for logs in watched.after.logs]
    assert reported == [ours(logs) for logs in watched.run.log_history]
    of_evaluation = ["eval_loss" in logs for logs in watched.before.logs]
    assert of_evaluation == [False, True] * 4 + [True, False]
    for metrics, evaluated in zip(reported[:-1], of_evaluation, strict=False):
        assert ("noise_scale/lower_bound" in metrics) != evaluated
        assert (len(metrics) > 4) != evaluated
    assert "noise_scale/noise_trace" in reported[-1]  # step 41, measured after the last log step
    assert reported[0]["noise_scale/batch_size"] == 2 * 4 * FEATURES  # by the user's function


def test_the_console_shows_three_keys_and_between_steps_the_model_has_no_hooks(
    watched: SimpleNamespace,
) -> None:
    resolved = {"simple", "simple_low", "simple_high"}

    shown = [
        {part.split("'")[0] for part in line.split("noise_scale/")[1:]} for line in watched.printed
    ]

    assert watched.last[0].startswith("NoiseScaleCallback: ")
    assert watched.last[1] == f"Next: noisescale predict {watched.folder}"
    assert len(shown) == 4
    assert all(keys in (resolved, {"lower_bound"}) for keys in shown)
    assert resolved in shown
    assert set(watched.callbacks) == watched.known
    # Evaluation is as it is without, and a copy or a pickle is of the model alone.
    assert len(watched.hooks.seen) > 41
    assert max(watched.hooks.seen) <= 0


def test_a_run_is_read_back_from_where_the_trainer_writes(
    watched: SimpleNamespace, hf: Any
) -> None:
    """In TensorBoard the Trainer puts "train/" before the names, and counts steps from 1."""
    for seen, steps in ((one_process(hf, ""), range(1, 8)), (watched, [10, 20, 30, 40, 41])):
        read = read_run(seen.folder)

        assert read.loop == "transformers"
        assert read["step"].tolist() == seen.callback.history["step"].tolist() == list(steps)
        for column in ("examples", "low", "increment_noise_trace", "accumulation"):
            assert read[column].tolist() == seen.callback.history[column].tolist()
    assert read.unit == "pixels"
    steps, _ = read_metric(watched.folder, "train/loss")
    assert steps.tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize("kind", ["MLflowCallback", "TrackioCallback", "WandbCallback"])
def test_trackers_get_the_record_at_checkpoints_and_before_their_run_ends(
    kind: str, tmp_path: Path, hf: Any
) -> None:
    given: list[tuple[str, int]] = []

    def take(path: str, name: str = "", **_: Any) -> None:
        given.append((name, Path(path).read_text().count('"row"')))

    class Tracker(getattr(hf.trainer_access, kind)):  # type: ignore[misc]  # as the kind says
        def __init__(self) -> None:
            run = SimpleNamespace(id="a1", save=take)
            current = SimpleNamespace(get=lambda: self._wandb.run)
            context = SimpleNamespace(current_run=current)
            self._initialized, self._auto_end_run = True, False
            self._trackio = self._ml_flow = SimpleNamespace(log_artifact=take, context_vars=context)
            self._wandb = SimpleNamespace(run=run)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._initialized, self._wandb.run = False, None

        def on_log(self, *_: Any, **__: Any) -> None:
            """Show nothing."""

        on_train_begin = on_save = on_log

    saved = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 3}
    hf.fit(Tracker(), hf.NoiseScaleCallback(), gradient_accumulation_steps=2, **saved)

    name = "run-a1-noise_scale.jsonl" if kind == "TrackioCallback" else ""
    assert given == [(name, 3), (name, 6), (name, 7), (name, 7)]


def test_evaluation_and_checkpoints_are_left_out_of_the_times(tmp_path: Path, hf: Any) -> None:
    def timed(run: Any) -> list[int]:
        rows = [row for row in run.log_history[:-1] if "loss" in row]
        return [row["step"] for row in rows if "noise_scale/seconds_per_step" in row]

    interrupted = hf.fit(
        hf.NoiseScaleCallback(),
        gradient_accumulation_steps=2,
        output_dir=str(tmp_path),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
        extras={"eval_dataset": hf.digits()[:8]},
    )

    assert timed(one_process(hf, "").run) == [2, 3, 4, 5, 6, 7]
    assert timed(interrupted) == [2, 6]  # not after steps 2, 3, 4 and 6


@pytest.mark.parametrize("failing_step", [slow(0), 2])
def test_nothing_stays_in_the_model_after_training_nor_after_an_error(
    failing_step: int, hf: Any
) -> None:
    trainers: list[Any] = []
    callback = hf.NoiseScaleCallback()
    options = {"gradient_accumulation_steps": 2, "prepare": trainers.append}
    with pytest.raises(RuntimeError, match="on purpose"):
        hf.fit(callback, hf.Fails(failing_step), **options)

    trainers[0].train()

    assert hooks_on(trainers[0].model) == 0
    assert callback.history["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]


def hooks_on(model: nn.Module) -> int:
    found = len(nn.modules.module._global_forward_pre_hooks)
    found += sum(len(m._forward_hooks) for m in model.modules())
    return found + sum(len(p._backward_hooks or ()) for p in model.parameters())


def test_an_unforeseen_error_while_a_meter_is_made_ends_no_training(hf: Any) -> None:
    class Broken(hf.NoiseScaleCallback):
        def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
            super().on_train_begin(*arguments, **keywords)
            object.__setattr__(self._options, "extra", [object()])

    with pytest.warns(UserWarning, match="TypeError"):
        broken = hf.fit(Broken(every_n_steps=1), max_steps=2)

    assert same(broken.parameters, hf.fit(max_steps=2).parameters)


def test_labels_that_are_hidden_are_told_of(hf: Any) -> None:
    model, hidden = nn.Linear(1, 1), {"input_ids": torch.zeros(2, 3), "num_items_in_batch": 4}
    hf.trainer_access._warn_that_labels_are_hidden.cache_clear()

    with pytest.warns(UserWarning, match="assumes"):
        share = hf.trainer_access.loss_share(model, hidden)

    assert share is None


TEXT = ["GPT2LMHeadModel", "T5ForConditionalGeneration", "BertModel", "CLIPTextModel"]
OTHERS = ["CLIPModel", "ViTModel", "LlavaModel", "ClapModel", "WhisperModel"]
OTHERS += ["Qwen2AudioForConditionalGeneration"]


@pytest.mark.parametrize("name", slow_but(TEXT + OTHERS, *TEXT[:2], *OTHERS[:2]))
def test_models_of_transformers_say_what_their_examples_are(name: str, hf: Any) -> None:
    import transformers

    assert hf.trainer_access.takes_token_ids(getattr(transformers, name)) is (name in TEXT)


def test_batches_are_counted_by_what_their_tensors_share(hf: Any) -> None:
    from transformers import BatchEncoding

    def count(batch: Any) -> float:
        return hf.trainer_access.BatchCounter()(batch)

    encoded = BatchEncoding({"input_ids": torch.zeros(4, 7), "labels": torch.zeros(4, 7)})
    boxes = [{"boxes": torch.zeros(2, 4)}] * 4
    assert count(encoded) == count({"pixel_values": torch.zeros(4, 3), "labels": boxes}) == 4

    counter = hf.trainer_access.BatchCounter()
    in_doubt = {"a": torch.zeros(1), "b": torch.zeros(2, 2)}
    with pytest.warns(UserWarning, match=r"NoiseScaleCallback counts 1 example\.") as warned:
        assert [counter(in_doubt) for _ in range(2)] == [1, 1]
    assert len(warned) == 1
    with pytest.raises(NotMeasured, match="of text"):
        count({"text": ["one", "two"]})
    endless: dict[str, Any] = {}
    endless["itself"] = endless
    with pytest.raises(NotMeasured, match="of itself") as error:
        count(endless)
    assert isinstance(error.value.__cause__, RecursionError)


def test_a_batch_that_the_model_gets_as_one_dict_is_counted(hf: Any) -> None:
    """As in sentence-transformers, whose models put what they compute into it."""

    class OfFeatures(hf.Classifier):
        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            found = super().forward(features["x"], features["labels"])
            features.update(found | {"pairs": found["logits"].repeat(3, 1)})
            return features

    class Calls(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
            loss: Tensor = model(dict(inputs))["loss"]
            return loss

    options = {"gradient_accumulation_steps": 2, "remove_unused_columns": False}
    runs = [
        hf.fit(hf.NoiseScaleCallback(every_n_steps=1), kind=kind, model=model, **options)
        for kind, model in ((Calls, OfFeatures), (hf.Trainer, hf.Classifier))
    ]

    assert runs[0].noise_scale == runs[1].noise_scale
    assert runs[0].noise_scale.steps > 5
    assert runs[0].state["meter"]["counts"] == runs[1].state["meter"]["counts"]


@pytest.mark.parametrize("accumulated", [1, slow(2)])
def test_sequences_that_are_packed_in_one_row_are_counted(accumulated: int, hf: Any) -> None:
    from transformers import DataCollatorWithFlattening

    callback = hf.NoiseScaleCallback()

    with heard() as told:
        hf.fit(
            callback,
            model=hf.language_model,
            examples=lambda: [{"input_ids": list(range(2 + i % 8))} for i in range(60)],
            extras={"data_collator": DataCollatorWithFlattening()},
            gradient_accumulation_steps=accumulated,
            max_steps=3,
        )

    assert list(callback.history["batch_size"]) == [4 * accumulated] * 3
    assert list(callback.history["examples"]) == [4 * accumulated * step for step in (1, 2, 3)]
    # One row has no halves.
    assert sum("no halves" in text for text in told) == (accumulated == 1)


CONTEXTS = SimpleNamespace(tp_size=1, cp_size=2)


@pytest.mark.parametrize(
    ("settings", "distributed_type", "named"),
    [
        ({}, "XLA", "`distributed_type` is XLA:"),
        ({"n_gpu": 2}, "NO", "`n_gpu` is 2:"),
        ({"parallelism_config": CONTEXTS}, "FSDP", "`parallelism_config.cp_size` is 2:"),
        ({"optim": "galore_adamw_layerwise"}, "NO", "`optim` is galore_adamw_layerwise:"),
        ({"tp_size": 2}, "MULTI_GPU", "`tp_plan` is over 2 ranks:"),
    ],
)
def test_settings_that_cannot_be_measured_are_named(
    settings: dict[str, Any], distributed_type: str, named: str, hf: Any
) -> None:
    from noisescale.hugging_face.supported import check_supported

    model: Any = nn.Linear(1, 1)
    model.tp_size = settings.pop("tp_size", None)
    defaults = {"n_gpu": 1, "parallelism_config": None, "optim": "adamw_torch"}

    with pytest.raises(NotMeasured, match=f"^{named}"):
        check_supported(SimpleNamespace(**{**defaults, **settings}), distributed_type, model)


def test_its_repr_has_what_was_given_and_wrong_arguments_are_refused_at_once(hf: Any) -> None:
    assert repr(hf.NoiseScaleCallback()) == "NoiseScaleCallback()"
    given = "batch_size_fn=<built-in function len>, unit='tokens'"
    counts = hf.NoiseScaleCallback(batch_size_fn=len, unit="tokens")
    assert repr(counts) == f"NoiseScaleCallback({given})"
    with refused("batch_size_fn", error=TypeError, got="3"):
        hf.NoiseScaleCallback(batch_size_fn=3)
    with refused("every_n_steps", got="0"):
        hf.NoiseScaleCallback(every_n_steps=0)


def check_alike(hf: Any, ranks: int, how: str, **more: Any) -> None:
    """The noise of a model that is checkpointed or compiled is that of the plain one."""
    options = {**LANGUAGE, "gradient_accumulation_steps": 2, "max_steps": 4}
    if how != "compiled":
        name = "activation_checkpointing"
        if name not in hf.TrainingArguments.__dataclass_fields__:  # early transformers 5
            name = "gradient_checkpointing"
        more = {name: True, f"{name}_kwargs": {"use_reentrant": how == "reentrant"}}

    def trace(**more: Any) -> float:
        def one() -> float:
            return hf.fit(hf.NoiseScaleCallback(), **options, **more).noise_scale.noise_trace

        return hf.each(ranks, one)[0]

    assert trace(**more) == pytest.approx(trace(), rel=1e-5)


def test_checkpointed_models_are_measured_alike(hf: Any) -> None:
    check_alike(hf, 1, "reentrant")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ranks"),
    [("checkpointed", 1), ("checkpointed", 2), ("reentrant", 2), ("compiled", 1), ("compiled", 2)],
)
# The hook that torch tells of is gone when the model is compiled: it waits for this first call.
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@in_a_fork
def test_compiled_and_checkpointed_models_are_measured_alike(how: str, ranks: int, hf: Any) -> None:
    check_alike(hf, ranks, how, torch_compile=True, torch_compile_backend="eager")


def test_a_printer_has_one_pair_after_trainings_that_were_interrupted_too(hf: Any) -> None:
    from transformers import PrinterCallback, ProgressCallback

    from noisescale.hugging_face.console import print_all, print_less

    printers = [PrinterCallback(), ProgressCallback()]
    callbacks = [*printers]

    print_less(callbacks, Guard())
    once = [*callbacks]
    print_less(callbacks, Guard())
    again = [*callbacks]
    print_all(callbacks)

    assert len(once) == 6
    assert again == once
    assert callbacks == printers


def changed(hf: Any, kind: Any, **options: Any) -> tuple[Any, list[str]]:
    """A fit by a Trainer that writes to gradients, or whose passes begin within a pass."""
    callback = hf.NoiseScaleCallback(every_n_steps=1)
    with heard() as told:
        found = hf.fit(callback, kind=kind, learning_rate=0.0, **options)
    return found, [text for text in told if "steps are not measured" in text]


def test_gradients_changed_before_the_step_are_measured_as_the_pass_made_them(hf: Any) -> None:
    untouched, _ = changed(hf, hf.Trainer, gradient_accumulation_steps=2)

    found, told = changed(hf, hf.ScalingTrainer, gradient_accumulation_steps=2)

    assert found.noise_scale == untouched.noise_scale
    assert found.state["meter"]["counts"]["measured_steps"] == 7
    assert told == []


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), slow(1, 2), slow(2, 1)])
def test_passes_that_begin_within_a_pass_are_refused_by_name_on_all_ranks(
    ranks: int, accumulation: int, hf: Any
) -> None:
    def one() -> tuple[float, list[str]]:
        found, told = changed(hf, hf.CachingTrainer, gradient_accumulation_steps=accumulation)
        return found.noise_scale.steps, told

    (steps, told), *others = hf.each(ranks, one)

    assert steps == 0
    assert others == [(0, [])] * (ranks - 1)
    assert "GradCache" in told[0]
    assert len(told) == 1


@pytest.mark.parametrize("order", ["sequential", slow("group_by_length")])
def test_an_order_that_the_trainer_knows_is_told_once_by_name(hf: Any, order: str) -> None:
    name = {"sequential": "SequentialSampler", "group_by_length": "LengthGroupedSampler"}[order]

    with pytest.warns(UserWarning, match=f"The train loader takes .*{name}\\)") as told:
        hf.fit(hf.NoiseScaleCallback(), train_sampling_strategy=order, **LANGUAGE)

    assert len(told) == 1
    assert '(`train_sampling_strategy="random"`)' in str(told[0].message)
