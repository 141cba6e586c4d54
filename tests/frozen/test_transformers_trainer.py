# SPDX-License-Identifier: Apache-2.0
"""Runs of transformers' Trainer, measured at its checkpoints."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program import ended
from refused import refused

from noisescale import predict, read_run
from noisescale.frozen.along_run import measure_checkpoints
from noisescale.frozen.transformers_trainer import as_module
from noisescale.frozen.wrapped_network import WrappedNetwork
from noisescale.lightning.checkpoints import Checkpoint, load_weights, steps_in

SCRIPT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from noisescale.hugging_face import NoiseScaleCallback

def make(**options):
    torch.manual_seed(0)
    words = (torch.randint(8, (256, 1)) + torch.arange(6) * torch.randint(1, 3, (256, 1))) % 8
    small = dict(n_embd=8, n_layer=1, n_head=2, n_positions=6, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        "out", max_steps=40, save_steps=20, logging_steps=10, per_device_train_batch_size=4,
        lr_scheduler_type="constant", learning_rate=1e-3, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )
    return Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=8, **{**small, **options})), arguments,
        train_dataset=[{"input_ids": x, "labels": x} for x in words],
        callbacks=[NoiseScaleCallback(every_n_steps=5)],
    )
"""


@pytest.fixture(scope="module")
def make() -> Callable[..., Any]:
    """The function of the script."""
    names: dict[str, Any] = {}
    exec(compile(SCRIPT, "train.py", "exec"), names)
    made: Callable[..., Any] = names["make"]
    return made


@pytest.fixture(scope="module")
def trained(make: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, and with the Trainer's own folder `out`."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer = make()
        trainer.train()
        trainer.save_state()  # beside the record
    return folder


def test_the_command_that_predict_names_runs_and_decides(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    before = predict("out")
    command = before.decision.next[0].splitlines()[-1]
    assert command == "  noisescale measure train.py:make --checkpoint out/checkpoint-40"

    code, output, _ = ended(*shlex.split(command)[1:])

    assert code == 0
    assert "as the look at step 40" in output
    after = predict("out")
    assert before.decision.verdict == "unknown"
    assert after.position.at_end
    assert after.decision.verdict != "unknown"


def test_the_noise_scale_along_a_run(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)

    found = measure_checkpoints(
        "train.py:make", None, "out", batches=10, ways=[], accelerator="cpu"
    )

    assert found.record == "out/noise_scale"
    history = read_run(found.record)
    assert history["step"].tolist() == [20, 40]
    assert history["learning_rate"].tolist() == [1e-3, 1e-3]
    assert (history.loop, history.unit) == ("transformers", "sequences")


@pytest.mark.parametrize("form", ["whole", "shards", "pytorch_model.bin", "other names"])
def test_weights_are_read_in_each_form(
    trained: Path, tmp_path: Path, make: Callable[..., Any], form: str
) -> None:
    """Tied weights have one name in the file; experts are one tensor in the model alone."""
    from transformers import GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

    path = trained / "out" / "checkpoint-40"
    model: Any = GPT2LMHeadModel.from_pretrained(path)
    if form != "whole":
        path = Path(shutil.copytree(path, tmp_path / "a"))
        (path / "model.safetensors").unlink()
    trainer = make()
    if form == "shards":
        model.save_pretrained(path, max_shard_size="2KB")
        assert len([*path.glob("model-*")]) > 1
    elif form == "pytorch_model.bin":
        torch.save(model.state_dict(), path / form)
    elif form == "other names":
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        few = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
        model = MixtralForCausalLM(config := MixtralConfig(vocab_size=8, **sizes, **few))
        model.save_pretrained(path)
        trainer.model = MixtralForCausalLM(config)
    module = WrappedNetwork(trainer.model) if form == "whole" else as_module(trainer)[0]

    load_weights(module, found := Checkpoint.read(path))

    assert found.step == 40
    loaded: Any = module.network
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize(
    ("removed", "got", "remedy"),
    [
        ("model.safetensors", "{} without the weights of a model", "Name a file"),
        (
            "adapter",
            "{} without the weights of a model",
            "by `PeftModel.from_pretrained(model, folder",
        ),
        ("trainer_state.json", "{} without trainer_state.json", "checkpoint-N"),
    ],
)
def test_a_folder_in_which_a_part_is_missing_is_refused(
    trained: Path, tmp_path: Path, removed: str, got: str, remedy: str
) -> None:
    path = Path(shutil.copytree(trained / "out" / "checkpoint-40", tmp_path / "a"))
    if removed == "adapter":
        (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    else:
        (path / removed).unlink()

    with refused("checkpoint", error=OSError, got=got.format(path), remedy=remedy):
        Checkpoint.read(path)


def test_weights_of_another_model_and_a_damaged_state_are_refused(
    trained: Path, tmp_path: Path, make: Callable[..., Any]
) -> None:
    path = trained / "out" / "checkpoint-40"

    for other in ({"n_layer": 2}, {"n_positions": 9}):
        with refused("checkpoint", got=str(path), remedy="Its weights do not fit"):
            load_weights(as_module(make(**other))[0], Checkpoint.read(path))
    damaged = Path(shutil.copytree(path, tmp_path / "checkpoint-60"))
    (damaged / "trainer_state.json").write_text("{")
    assert steps_in(tmp_path) == {damaged: 60}  # by its name
    with refused("checkpoint", requirement="of transformers' Trainer"):
        Checkpoint.read(damaged)
    with refused("checkpoint", error=OSError, requirement="be a file"):
        Checkpoint.read(path, to_train=True)
