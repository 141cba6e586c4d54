# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from logged_runs import record
from program import ended
from tiers import slow

import noisescale
from noisescale.step_time import DeviceTimes, StepTiming

MODEL = """
import time
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Model(LightningModule):
    def __init__(self, most=10**9, per_example=0.0):
        super().__init__()
        self.net, self.most, self.per_example = nn.Linear(4, 1), most, per_example

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        time.sleep(0.01 + self.per_example * len(batch[0]))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Wrong(Model):
    def training_step(self, batch, batch_idx):
        raise ValueError("mistake of the user's")



class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(examples())

def examples():
    return TensorDataset(torch.randn(100, 4))

model = Model()

def both():
    return Model(), examples()

def pair():
    return Model(), (DataLoader(examples(), batch_size=2), DataLoader(examples(), batch_size=4))

def small():
    return Model(most=4), DataLoader(examples(), batch_size=2)

class SlowExamples(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.004)
        return (torch.randn(4),)

def starved():
    return Model(), DataLoader(SlowExamples(), batch_size=8)

def saturated():
    return Model(per_example=0.005), examples()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model is; in this process its sleep alone moves the clock, and takes no time."""
    now = [0.0]
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("noisescale.profiling.blocks.time", clock)
    monkeypatch.setattr("noisescale.profiling.time_loader.time", clock)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_model.py").write_text(MODEL)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    return tmp_path


def profile(*arguments: str) -> tuple[int, str, str]:
    """The command's exit code, output and errors."""
    return ended("profile", "--accelerator", "cpu", "--steps", 5, *arguments)


def sizes(path: str) -> list[tuple[float, int]]:
    return [
        (timing.device_batch_size, timing.accumulation) for timing in DeviceTimes.read(path).timings
    ]


@pytest.mark.parametrize(
    "target",
    [
        "own_model.py:both",
        slow("own_model:Model --data own_model:Data"),
        slow("own_model:both"),
        slow("own_model:pair"),
        slow("own_model:model --data own_model:examples"),
    ],
)
def test_a_model_is_found_and_timed(target: str) -> None:
    code, out, err = profile(
        *target.split(), "--device-batch-sizes", "4,2", "--accumulation", "1,3"
    )

    assert code == 0, err
    assert sizes("step_times.json") == [(2, 1), (2, 3), (4, 1), (4, 3)]
    assert re.search(r"\n +4 +3 +1 +30\.0 +30\.0 +400\n", out)
    assert "noisescale predict RUN --step-times step_times.json" in " ".join(out.split())


def test_the_function_finds_what_the_command_finds_and_the_knee_is_marked() -> None:
    import own_model

    options = ("own_model:saturated", "--device-batch-sizes", "1,16,24")
    _, out, _ = profile(*options, "--json")
    _, text, _ = profile(*options, "--accumulation", "1", "--output", "text.json")
    lines: list[str] = []

    found = noisescale.profile(
        own_model.saturated, device_batch_sizes=[1, 16, 24], steps=5, accelerator="cpu",
        output="here.json", progress=lines.append,
    )  # fmt: skip

    shown = json.loads(out)
    assert shown | found.to_dict() == shown
    assert Path("here.json").read_bytes() == Path("step_times.json").read_bytes()
    assert lines[0] == "1 examples x 1: 15.0 ms/step, 66.7 examples/s"
    document = found.document()
    (_, micro_batch, loader) = document.answers
    assert re.findall(r"\d+\.\d+", micro_batch.sentence) == ["10.0", "5.00"]
    assert re.findall(r"\d+", loader.sentence) == ["0", "24", "130"]
    assert [line.marks for line in document.tables[0].lines[2:4]] == [["knee"], ["knee"]]
    assert "<b>A device batch size of 16 has 90%" in found._repr_html_()
    assert text.startswith("A device batch size of 16 has 90%")
    assert re.search(r"\n +16 .*\n +knee *\n", text)
    seconds = found.step_time.seconds(32).value
    assert seconds == pytest.approx(0.17, rel=0.01)


def test_a_module_is_timed_as_it_is_and_no_file_is_written(folder: Path) -> None:
    import own_model

    found = noisescale.profile(
        own_model.Model(), own_model.examples(), device_batch_sizes=[2], steps=5, accelerator="cpu"
    )

    assert [timing.seconds for timing in found.timings] == pytest.approx([0.01, 0.02])
    assert found.document().written == []
    assert not list(folder.glob("*.json"))


def test_out_of_memory_ends_it_cleanly_and_is_shown() -> None:
    code, out, err = profile("own_model:small", "--accumulation", "1", "--json")

    assert code == 0, err
    found = json.loads(out)
    assert [row["device_batch_size"] for row in found["step_times"]] == [1, 2, 4]
    assert found["knee"] is None
    assert sizes("step_times.json") == [(1, 1), (2, 1), (4, 1)]
    (stopped,) = found["stopped"]
    assert "of 8 does" in stopped
    assert stopped in profile("own_model:small", "--accumulation", "1")[1]


def test_runs_add_up_in_one_file() -> None:
    earlier = StepTiming(8, 1, devices=4, nodes=2, seconds=0.5)
    profile("own_model:both", "--device-batch-sizes", "2", "--accumulation", "2", "--output", "all")
    found = DeviceTimes.read("all")
    found.with_timing(earlier).write(Path("all"))
    options = ("--device-batch-sizes", "2", "--accumulation", "1", "--output", "all")

    code, _, _ = profile("own_model:both", *options)

    assert code == 0
    assert DeviceTimes.read("all").timings[:-1] == (*found.timings, earlier)
    assert sizes("all")[-1] == (2, 1)


def logged_run(folder: Path, size: int = 4, seconds: float = 0.01) -> Path:
    """1,000 steps on one device."""
    step = np.arange(10, 1001, 10)
    ends = {"noise_scale": 50, "low": 40, "high": 60}
    same = {"batch_size": size, **ends, "seconds_per_step": seconds, "devices": 1}
    record(folder, step=step, examples=size * step, **same)
    return folder


def test_times_for_a_run_are_found_by_predict(folder: Path) -> None:
    run = logged_run(folder / "logs/version_0")

    code, out, err = ended("profile", "own_model:both", "--run", run, "--accelerator", "cpu")

    assert code == 0, err
    times = json.loads((run / "step_times.json").read_text())
    plans = [(t["device_batch_size"], t["accumulation"]) for t in times["timings"]]
    assert plans == [(2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (4, 2)]
    assert times["device"].startswith("CPU")
    assert times["torch"].startswith(version("torch"))  # a build with CUDA adds +cu130
    assert f"Predict this run: noisescale predict {run}\n" in out
    assert not list(folder.glob("*.json"))
    code, out, err = ended("predict", run, "--json", "--batch-sizes", "4,32", "--devices", "1")
    assert code == 0, err
    rows = [(row["device_batch_size"], row["basis"]) for row in json.loads(out)["rows"]]
    assert rows == [(4, "timed"), (32, "timed")]


@pytest.mark.slow
def test_a_loader_that_bounds_the_training_is_told_and_kept(folder: Path) -> None:
    run = logged_run(folder / "version_0", size=8, seconds=0.042)

    code, out, err = ended("profile", "own_model:starved", "--run", run, "--accelerator", "cpu")

    assert code == 0, err
    assert re.search(
        r"Data loader bounds .* 32\.0 ms .* 8, the step 10\.0 ms", " ".join(out.split())
    )
    loader = noisescale.predict(run).hardware.loader
    assert loader is not None
    assert (loader.seconds, loader.step_seconds) == pytest.approx((0.032, 0.01))
    assert loader.bounds_training
    code, out, err = profile("own_model:starved", "--device-batch-sizes", "8", "--json")
    assert json.loads(out)["loader"]["bounds_training"]


def test_assumptions_are_details(folder: Path) -> None:
    options = ("own_model:both", "--device-batch-sizes", "2", "--accumulation", "1")

    _, short, _ = profile(*options)
    code, long, err = profile(*options, "--details", "--html", "page.html")

    assert code == 0, err
    assert "synchronise" not in short
    assert "synchronise" in long
    page = (folder / "page.html").read_text()
    assert "synchronise" in page
    assert "Data loader" in page


def test_times_of_another_device_are_not_mixed_with_these(folder: Path) -> None:
    run = logged_run(folder / "version_0")
    DeviceTimes((StepTiming(4, 1, 1, 1, 0.1),), "NVIDIA H100", "2.9").write(run / "step_times.json")

    code, _, err = ended("profile", "own_model:both", "--run", run, "--accelerator", "cpu")

    assert code == 2
    assert "got times of NVIDIA H100. Remove the file, or give another one as `--output`" in err
    assert DeviceTimes.read(run / "step_times.json").device == "NVIDIA H100"


@pytest.mark.slow
def test_two_devices_are_timed_by_the_command_that_lightning_starts_again(folder: Path) -> None:
    (folder / "command.py").write_text("from noisescale.cli.app import main\nmain()\n")
    options = (
        "profile own_model:both --device-batch-sizes 2 --accumulation 1 --devices 2 --strategy ddp"
        " --steps 5 --accelerator cpu"
    )

    finished = subprocess.run(
        [sys.executable, "command.py", *options.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,  # five seconds where nothing else runs
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    (timing,) = DeviceTimes.read("step_times.json").timings
    assert (timing.device_batch_size, timing.devices) == (2, 2)
    assert finished.stdout.count("Step times: step_times.json") == 1


def test_a_mistake_in_the_model_shows_where_it_is() -> None:
    code, _, err = profile("own_model:Wrong", "--data", "own_model:examples")

    assert code == 1
    assert 'own_model.py", line' in err
    assert err.endswith("ValueError: mistake of the user's\n")


def test_help_is_light() -> None:
    code = (
        "import sys; from noisescale.cli.app import app\n"
        "try: app(['profile', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'numpy', 'pytorch_lightning'} & sys.modules.keys())"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.endswith("set()\n")
