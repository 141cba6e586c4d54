# SPDX-License-Identifier: Apache-2.0
"""Each script in examples/, run by the command in its docstring."""

import ast
import re
import shlex
from pathlib import Path

import program
import pytest
from scripts import ROOT, printed

from noisescale.history.reading import read_metric, read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

IN_PYTORCH_LIGHTNING = {
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
}

PACKAGES = ["lightning", "pytorch_lightning"]


def usage(script: str) -> str:
    """The command that a script's docstring gives."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / script).read_text())) or ""
    (command,) = re.findall(r"^    ((?:python|torchrun) .+)$", docstring, re.MULTILINE)
    return str(command)


def shown(script: str, folder: Path, *options: object, package: str = "lightning") -> str:
    """What the command prints, with further options."""
    launcher, *words = shlex.split(re.sub(r" *\[.*?\]", "", usage(script)))
    assert words.pop() == f"examples/{script}"
    if launcher == "torchrun":
        return printed("-m", "torch.distributed.run", *words, f"examples/{script}", *options)
    assert not words
    text = (ROOT / "examples" / script).read_text()
    if package == "pytorch_lightning":
        for theirs, ours in IN_PYTORCH_LIGHTNING.items():
            text = text.replace(f"from {theirs}", f"from {ours}")
        assert not re.search(r"^(from|import) lightning\b", text, re.MULTILINE)
    copy = folder / script
    copy.write_text(text)
    return printed(copy, *options, cwd=folder)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_options_in_the_docstring_exist(script: str, tmp_path: Path) -> None:
    documented = re.findall(r"\[(--[\w-]+)", usage(script))

    (copy := tmp_path / script).write_text((ROOT / "examples" / script).read_text())
    offered = set(re.findall(r"--[\w-]+", printed(copy, "--help", cwd=tmp_path)))

    assert set(documented) <= offered


def test_every_example_is_tested() -> None:
    tests = "\n".join(name for name in globals() if name.startswith("test_"))

    for script in SCRIPTS:
        assert f"test_{script.partition('_')[0]}_" in tests


@pytest.mark.parametrize("package", PACKAGES)
def test_digits_are_measured_and_it_says_where_to_look(package: str, tmp_path: Path) -> None:
    output = shown("digits_ddp.py", tmp_path, "--epochs", 3, "--logs", tmp_path, package=package)

    assert re.search(r"Gradient noise scale at the end: .*\(.*95 %.* \d+ steps\)", output)
    assert re.search(r"Critical batch size +[\d.,]+ examples \(.* [\d.]+ to [\d.]+\)", output)
    assert "batch size 8 on 2 devices" in output
    assert list(tmp_path.glob("digits/version_0/noise_scale.html"))
    assert f"tensorboard --logdir {tmp_path}" in output
    assert list(tmp_path.glob("digits/version_0/events*"))


def test_digits_are_learned_at_a_batch_size_that_follows(tmp_path: Path) -> None:
    options = ["--schedule", "--batch-size", 2, "--epochs", 1, "--logs", tmp_path]

    output = shown("digits_ddp.py", tmp_path, *options)

    assert re.search(r"step \d+: batch size 4 -> \d+ = 2 x \d+ .* x 2 devices, lr x \d", output)


@pytest.mark.parametrize("package", PACKAGES)
def test_char_transformer_measures_each_kind_of_layer(package: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be, " * 50)
    tiny = {"steps": 12, "batch-size": 4, "context": 8, "width": 16, "layers": 1, "window": 8}
    options = [argument for name, value in tiny.items() for argument in (f"--{name}", value)]

    # By default it reads Python's own standard library.
    options += ["--logs", tmp_path, *(["--text", "text"] if package == "lightning" else [])]
    output = shown("char_transformer.py", tmp_path, *options, package=package)

    for layers in ("all", "embedding", "normalization", "attention", "mlp", "head"):
        assert re.search(rf"│ {layers} +│ .* steps\) +│", output)
    assert "12: " in output


@pytest.mark.parametrize("package", PACKAGES)
def test_fabric_loop_measures_on_two_processes(package: str, tmp_path: Path) -> None:
    assert_measures("fabric_loop.py", tmp_path, package=package)


def test_torchrun_loop_measures_on_two_processes(tmp_path: Path) -> None:
    assert_measures("torchrun_loop.py", tmp_path)


def test_accelerate_loop_measures_in_one_process(tmp_path: Path) -> None:
    assert_measures("accelerate_loop.py", tmp_path, least_steps=10)
    assert read_metric(tmp_path, "loss")[0].tolist() == [112, 224]


def test_plain_loop_predicts_in_sequences_and_has_a_loss_to_compare(tmp_path: Path) -> None:
    output = shown("plain_loop.py", tmp_path, "--steps", 60, "--log-to", tmp_path)

    assert re.findall(r"^step (\d+): val_loss [\d.]+, noise scale", output, re.M) == ["50", "60"]
    assert_predicted(output, tmp_path, unit="sequences")
    assert read_metric(tmp_path, "val_loss")[0].tolist() == [50, 60]


def test_adasum_loop_combines_four_processes_and_measures(tmp_path: Path) -> None:
    output = shown("adasum_loop.py", tmp_path, "--epochs", 2)

    assert_measured(output, least_steps=7)
    found = re.findall(r"loss ([\d.]+), cosine .* (-?[\d.]+), orthogonality ([\d.]+)", output)
    (first, _, _), (last, cosine, orthogonality) = found
    assert float(last) < float(first)
    assert -1 < float(cosine) < 1
    assert 0.25 < float(orthogonality) <= 1.1


def test_decentlam_loop_learns_on_four_processes_that_stay_together(tmp_path: Path) -> None:
    output = shown("decentlam_loop.py", tmp_path, "--epochs", 3)

    found = re.findall(r"loss ([\d.]+), ([\d.]+)% .* distance ([\de.-]+)", output)
    assert len(found) == 3
    assert float(found[-1][1]) > 80
    assert 0 < float(found[-1][2]) < 0.05


def test_optimizer_sweep_prints_the_command_that_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = shown("optimizer_sweep.py", tmp_path, "--quick")

    name, *words = shlex.split(output.partition("Next: ")[2])
    monkeypatch.chdir(tmp_path)
    compared = program.run(*words)

    assert name == "noisescale"
    assert "first reached by adam" in compared
    assert (tmp_path / "report.html").exists()


def assert_predicted(output: str, logs: Path, unit: str = "examples") -> None:
    (command,) = re.findall(r"^Next: (.*)$", output, re.M)
    name, *words = shlex.split(command)
    assert name == "noisescale"
    predicted = program.run(*words)
    assert "You train at batch size " in predicted
    assert f" {unit}" in predicted
    history = read_run(logs)
    assert len(history) >= 6
    assert history.optimizer is not None


def assert_measures(script: str, logs: Path, least_steps: int = 20, **options: str) -> None:
    output = shown(script, logs, "--epochs", 2, "--log-to", logs, **options)
    assert_measured(output, least_steps)
    assert_predicted(output, logs)


def assert_measured(output: str, least_steps: int = 20) -> None:
    estimates = re.findall(r"epoch (\d): .* examples \(.*95 %.* (\d+) steps\)", output)
    assert [epoch for epoch, _ in estimates] == ["1", "2"]
    assert float(estimates[1][1]) > least_steps


def test_repeated_augmentation_counts_distinct_digits(tmp_path: Path) -> None:
    output = shown("repeated_augmentation.py", tmp_path, "--steps", 40)

    for repeats in (1, 4):
        assert re.search(rf"^{repeats} x: .* batch size 32 distinct digits, noise", output, re.M)
