# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer and RLOOTrainer: prompts and completions are told apart."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import as_torchrun, on_ranks
from refused import refused

from noisescale.guard import NotMeasured
from noisescale.hugging_face import rollouts

PAD, END, WORDS = 0, 1, 24
STEPS = 6


def settings(**changed: Any) -> Any:
    known = {"loss_type": "grpo", "steps_per_generation": 1, "gradient_accumulation_steps": 1}
    known |= {"per_device_train_batch_size": 12, "num_generations": 8, "world_size": 1}
    return SimpleNamespace(**{**known, "num_iterations": 1, **changed})


def micro_batch() -> dict[str, torch.Tensor]:
    """Four completions of two prompts, one of them padded, in turn; a token of both is the same."""
    ids = torch.tensor([[0, 5, 7, 1], [9, 5, 7, 1], [0, 5, 8, 7], [9, 5, 1, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0]])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# What a micro-batch shows


def test_completions_of_equal_prompts_are_one_group() -> None:
    rows = rollouts.rows_in(micro_batch(), settings())

    assert rows.groups.of_rows.tolist() == [0, 1, 0, 1]
    assert rows.groups.names == ((5,), (9, 5))
    assert rows.groups.apart


@pytest.mark.parametrize(
    ("loss_type", "steps", "weights", "of_means"),
    [
        ("grpo", 1, [1, 1, 1, 1], False),
        ("dr_grpo", 1, [1, 1, 1, 1], False),
        ("dapo", 1, [2, 2, 2, 1], False),
        ("dapo", 2, [1, 1, 1, 1], False),
        ("bnpo", 1, [2 / 7, 2 / 7, 2 / 7, 1 / 7], True),
        (None, 1, [1, 1, 1, 1], False),
    ],
)
def test_weights_are_those_of_the_loss(
    loss_type: str | None, steps: int, weights: list[float], of_means: bool
) -> None:
    rows = rollouts.rows_in(
        micro_batch(), settings(loss_type=loss_type, steps_per_generation=steps)
    )
    assert rows.weights.tolist() == pytest.approx(weights)
    assert rows.mean_of_means is of_means


def test_prompts_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(NotMeasured, match="with labels, got input_ids"):
        rollouts.rows_in({"input_ids": torch.zeros(2, 2)}, settings())
    images = micro_batch() | {"pixel_values": torch.zeros(4, 3)}
    with pytest.raises(NotMeasured, match=r"images.*`group_fn`"):
        rollouts.rows_in(images, settings())
    rows = rollouts.rows_in(images, settings(loss_type="dapo"), ["a", "b", "b", "a"])
    assert rows.groups.of_rows.tolist() == [0, 1, 1, 0]
    assert rows.groups.apart
    assert rows.weights.tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale_rewards", "batch"),
        ("multi_objective_aggregation", "normalize_then_sum"),
        ("normalize_advantages", True),
        ("use_adaptive_entropy", True),
        ("entropy_coef", 0.01),
        ("top_entropy_quantile", 0.5),
    ],
)
def test_what_couples_prompts_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(NotMeasured, match=f"`{name}` is {value!r}.*Set it to"):
        rollouts.check_rollouts(settings(**{name: value}))
    rollouts.check_rollouts(settings(scale_rewards="group", normalize_advantages=False))


def test_micro_batches_are_not_compared() -> None:
    with pytest.raises(NotMeasured, match="`small_batch` is micro_batch: completions are shuf"):
        rollouts.check_rollouts(settings(), "micro_batch")


def test_only_trainers_that_were_read_are_recognised() -> None:
    def kind(name: str, module: str, *bases: type) -> type:
        return type(name, bases, {"__module__": module})

    read = kind("GRPOConfig", "trl.trainer.grpo_config")
    assert rollouts.has_rollouts(read())
    assert rollouts.has_rollouts(kind("Mine", "mine", read)())
    other = kind("GOLDConfig", "trl.experimental.gold.gold_config", read)
    assert not rollouts.has_rollouts(other())
    assert not rollouts.has_rollouts(settings())


def test_prompts_that_are_shared_by_devices_are_refused_by_name() -> None:
    rollouts.check_rollouts(settings())
    rollouts.check_rollouts(settings(world_size=2, steps_per_generation=2))
    with pytest.raises(NotMeasured, match="`num_generations` is 8: the 12 completions"):
        rollouts.check_rollouts(settings(world_size=2))


def test_rollouts_that_serve_several_steps_are_told() -> None:
    assert rollouts.news_of(settings()) == []
    assert "serve 2 steps" in rollouts.news_of(settings(num_iterations=2))[0]
    assert "serve 4 steps" in rollouts.news_of(settings(steps_per_generation=4))[0]


def test_a_function_of_the_users_is_checked_at_once_and_shown() -> None:
    from noisescale.hugging_face import NoiseScaleCallback

    def prompt_of(inputs: Any) -> Any:
        return inputs["prompt"]

    assert "group_fn=" in repr(NoiseScaleCallback(group_fn=prompt_of))
    assert NoiseScaleCallback(group_fn=prompt_of).state()["args"]["group_fn"].endswith("prompt_of")
    with refused("group_fn", error=TypeError):
        NoiseScaleCallback(group_fn=1)  # type: ignore[arg-type]
    with refused("group_fn", requirement="be None with"):
        NoiseScaleCallback(group_fn=prompt_of, small_batch="rank")


# TRL itself


def train(folder: Path, kind: str, accumulation: int = 1, **changed: Any) -> dict[str, Any]:
    """What a callback has at the end of a training of a tiny model, and what was said."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from noisescale.hugging_face import NoiseScaleCallback

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1", padding_side="left"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    special = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": END}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads, **special))
    prompts = [f"w{2 + i % 11} w{2 + i % 7} w{2 + i % 5}" for i in range(385)]
    config, trainer = {
        "GRPO": (trl.GRPOConfig, trl.GRPOTrainer),
        "RLOO": (trl.RLOOConfig, trl.RLOOTrainer),
    }[kind]
    callback = NoiseScaleCallback(every_n_steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        arguments = config(
            output_dir=str(folder),
            per_device_train_batch_size=16 // accumulation,
            gradient_accumulation_steps=accumulation,
            **{"num_generations": 4, "max_completion_length": 4, "max_steps": STEPS, "beta": 0.0}
            | changed,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=2,
        )
        trainer(
            model=model,
            reward_funcs=lambda completions, **_: [float("w3" in one) for one in completions],
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": one} for one in prompts]),
            processing_class=tokens,
            callbacks=[callback],
        ).train()
    meter = callback.meter
    return {
        "measured": 0 if meter is None else meter.measured_steps,
        "levels": callback.levels,
        "unit": callback.noise_scale.unit,
        "loop": callback.history.loop,
        "told": "".join(str(one.message) for one in told),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changed"),
    [("GRPO", {}), ("GRPO", {"loss_type": "bnpo", "num_iterations": 2}), ("RLOO", {})],
)
def test_a_trainer_of_trl_shows_both_levels(
    kind: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    found = train(tmp_path, kind, **changed)

    assert found["measured"] == STEPS
    levels = found["levels"]
    assert levels.rows_per_group * levels.groups == pytest.approx(16, rel=0.2)
    assert levels.within.low > 0
    assert (found["unit"], found["loop"]) == ("completions", "trl")
    assert "outside of the model" not in found["told"]


@pytest.mark.slow
def test_shuffled_micro_batches_are_measured_and_batch_wide_scales_refused(tmp_path: Path) -> None:
    split = train(tmp_path, "GRPO", 2)
    assert split["measured"] >= STEPS - 2  # a first micro-batch may have no two of a prompt
    assert split["levels"].groups * split["levels"].rows_per_group == pytest.approx(16, rel=0.2)
    scaled = train(tmp_path, "GRPO", scale_rewards="batch")
    assert "`scale_rewards` is 'batch'" in scaled["told"]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_ranks_of_trl_may_shuffle_between_their_micro_batches(
    accumulation: int, tmp_path: Path
) -> None:
    def levels_of_rank() -> dict[str, Any]:
        return train(tmp_path, "GRPO", accumulation)

    first, second = on_ranks(2, as_torchrun(levels_of_rank))

    assert first["measured"] == second["measured"] == STEPS
    assert repr(first["levels"]) == repr(second["levels"])  # some of it is NaN
    levels = first["levels"]
    assert levels.groups * levels.rows_per_group == pytest.approx(32, rel=0.2)
    assert levels.groups <= 8
