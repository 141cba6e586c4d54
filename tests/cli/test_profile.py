# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from program import ended

import noisescale
from noisescale.step_time import DeviceTimes, StepTiming, read_timings, write_timings

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

class Needy(Model):
    def __init__(self, width):
        super().__init__()

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
    monkeypatch.setattr("noisescale.profiling.time_fit.time", clock)
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
    return [(timing.device_batch_size, timing.accumulation) for timing in read_timings(path)]


@pytest.mark.parametrize(
    "target",
    [
        ["own_model:both"],
        ["own_model:pair"],
        ["own_model.py:both"],
        ["own_model:model", "--data", "own_model:examples"],
        ["own_model:Model", "--data", "own_model:Data"],
    ],
    ids=" ".join,
)
def test_a_model_is_found_and_timed(target: list[str]) -> None:
    code, out, err = profile(*target, "--device-batch-sizes", "4,2", "--accumulation", "1,3")

    assert code == 0, err
    assert sizes("step_times.csv") == [(2, 1), (2, 3), (4, 1), (4, 3)]
    assert re.search(r"\n +4 +3 +1 +30\.0 +30\.0 +400\n", out)
    assert "noisescale predict RUN --step-times step_times.csv" in " ".join(out.split())


def test_the_function_finds_what_the_command_finds() -> None:
    import own_model

    _, out, _ = profile("own_model:saturated", "--device-batch-sizes", "1,16,24", "--json")
    lines: list[str] = []

    found = noisescale.profile(
        own_model.saturated, device_batch_sizes=[1, 16, 24], steps=5, accelerator="cpu",
        output="here.csv", progress=lines.append,
    )  # fmt: skip

    shown = json.loads(out)
    assert shown | found.to_dict() == shown
    assert Path("here.csv").read_bytes() == Path("step_times.csv").read_bytes()
    assert lines[0] == "1 examples x 1: 15.0 ms/step, 66.7 examples/s"
    document = found.document()
    labels = ["Highest throughput", "Micro-batch", "Data loader"]
    assert [one.label for one in document.answers] == labels
    assert document.answers[2].sentence == "takes 0 ms for a batch of 24, the step 130 ms"
    assert document.answers[1].sentence == "takes 10.0 ms and 5.00 ms for each example"
    assert [line.marks for line in document.tables[0].lines[2:4]] == [["knee"], ["knee"]]
    assert "<b>A device batch size of 16 has 90% of the highest" in found._repr_html_()
    seconds = found.step_time.seconds(32).value
    assert seconds == pytest.approx(0.17, rel=0.01)


def test_a_module_is_timed_as_it_is_and_no_file_is_written(folder: Path) -> None:
    import own_model

    found = noisescale.profile(
        own_model.Model(), own_model.examples(), device_batch_sizes=[2], steps=5, accelerator="cpu"
    )

    assert [timing.seconds for timing in found.timings] == pytest.approx([0.01, 0.02])
    assert found.document().written == []
    assert not list(folder.glob("*.csv"))


def test_the_knee_is_marked_where_more_bring_little() -> None:
    options = ("--device-batch-sizes", "1,16,24", "--accumulation", "1")
    code, out, err = profile("own_model:saturated", *options)

    assert code == 0, err
    assert out.startswith("A device batch size of 16 has 90% of the highest examples/s, or more\n")
    assert re.search(r"\n +16 .*\n +knee *\n", out)
    assert "knee: at least 90% of the highest examples/s" in out


def test_out_of_memory_ends_it_cleanly_and_is_shown() -> None:
    code, out, err = profile("own_model:small", "--accumulation", "1", "--json")

    assert code == 0, err
    found = json.loads(out)
    assert [row["device_batch_size"] for row in found["step_times"]] == [1, 2, 4]
    assert found["stopped"] == ["A device batch size of 8 does not fit in memory."]
    assert found["knee"] is None
    assert sizes("step_times.csv") == [(1, 1), (2, 1), (4, 1)]
    _, out, _ = profile("own_model:small", "--accumulation", "1")
    assert "A device batch size of 8 does not fit in memory." in out


def test_runs_add_up_in_one_file() -> None:
    earlier = StepTiming(8, 1, devices=4, nodes=2, seconds=0.5)
    write_timings("all.csv", [earlier])

    code, _, _ = profile(
        *("own_model:both", "--device-batch-sizes", "2", "--accumulation", "1"),
        *("--output", "all.csv"),
    )

    assert code == 0
    first, second = read_timings("all.csv")
    assert first == earlier
    assert (second.device_batch_size, second.devices) == (2, 1)


def logged_run(folder: Path, size: int = 4, seconds: float = 0.01) -> Path:
    """1,000 steps on one device."""
    names = "step examples batch_size simple lower_bound simple_high seconds_per_step devices"
    lines = [",".join(f"noise_scale/{name}" for name in names.split())]
    lines += [f"{k},{size * k},{size},50,40,60,{seconds},1" for k in range(10, 1001, 10)]
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_times_for_a_run_are_found_by_predict(folder: Path) -> None:
    run = logged_run(folder / "logs/version_0")

    code, out, err = ended("profile", "own_model:both", "--run", run, "--accelerator", "cpu")

    assert code == 0, err
    times = json.loads((run / "step_times.json").read_text())
    plans = [(t["device_batch_size"], t["accumulation"]) for t in times["timings"]]
    assert plans == [(2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (4, 2)]
    assert times["device"].startswith("CPU")
    assert times["torch"] == torch.__version__
    assert f"Predict this run: noisescale predict {run}\n" in out
    assert not list(folder.glob("*.csv"))
    code, out, err = ended("predict", run, "--json", "--batch-sizes", "4,32", "--devices", "1")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [(row["device_batch_size"], row["basis"]) for row in rows] == [
        (4, "timed"),
        (32, "timed"),
    ]


def test_a_loader_that_bounds_the_training_is_told_and_kept(folder: Path) -> None:
    run = logged_run(folder / "version_0", size=8, seconds=0.042)

    code, out, err = ended("profile", "own_model:starved", "--run", run, "--accelerator", "cpu")

    assert code == 0, err
    assert (
        "Data loader bounds this training: it takes 32.0 ms for a batch of 8, the step 10.0 ms. A"
        " larger batch does not help until the loader is faster: it has 0 processes"
        " (`num_workers`). More devices help as far as each has a loader with processors of its own"
    ) in " ".join(out.split())
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
    assert "Assumptions" not in short
    assert "Predict a run: noisescale predict RUN --step-times step_times.csv" in short
    assert "How long devices synchronise was not timed" in " ".join(long.split())
    page = (folder / "page.html").read_text()
    assert "How long devices synchronise was not timed" in page
    assert "Data loader" in page


def test_times_of_another_device_are_not_mixed_with_these(folder: Path) -> None:
    run = logged_run(folder / "version_0")
    DeviceTimes((StepTiming(4, 1, 1, 1, 0.1),), "NVIDIA H100", "2.9").write(run / "step_times.json")

    code, _, err = ended("profile", "own_model:both", "--run", run, "--accelerator", "cpu")

    assert code == 2
    assert "must have times of this device, CPU" in err
    assert "got times of NVIDIA H100. Remove the file, or give another one as `--output`." in err
    assert DeviceTimes.read(run / "step_times.json").device == "NVIDIA H100"


def test_two_devices_are_timed_by_the_command_that_lightning_starts_again(folder: Path) -> None:
    (folder / "command.py").write_text("from noisescale.cli.app import main\nmain()\n")
    options = (
        "--device-batch-sizes 2 --accumulation 1 --devices 2 --strategy ddp --steps 5"
        " --accelerator cpu"
    )

    finished = subprocess.run(
        [sys.executable, "command.py", "profile", "own_model:both", *options.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,  # five seconds where nothing else runs
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    (timing,) = read_timings("step_times.csv")
    assert (timing.device_batch_size, timing.devices) == (2, 2)
    assert finished.stdout.count("Step times: step_times.csv") == 1


def test_a_mistake_in_the_model_shows_where_it_is() -> None:
    code, _, err = profile("own_model:Wrong", "--data", "own_model:examples")

    assert code == 1
    assert 'own_model.py", line' in err
    assert err.endswith("ValueError: mistake of the user's\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "own_model",
            "`own_model` must be written as package.module:name or file.py:name, got no name after"
            " a colon. Add the name of a function, class or object.",
        ),
        ("none.py:x", "`none.py` must be a Python file, got a path without a file. Check it."),
        (
            "no_such:x",
            "`no_such:x` must be importable, got ModuleNotFoundError: No module named 'no_such'."
            " Check the name, and whether its imports are installed.",
        ),
        (
            "own_model:x",
            "`own_model:x` must name an object that exists, got no 'x' in own_model."
            " Check the part after the colon.",
        ),
        (
            "own_model:Needy",
            "`own_model:Needy` must be callable without arguments, got one for which this"
            " is so: missing a required argument: 'width'. Name a function that calls it with its"
            " arguments.",
        ),
        (
            "own_model:examples",
            "`own_model:examples` must be a LightningModule, or a function that returns a"
            " LightningModule and its data, got TensorDataset. Name such a function.",
        ),
        (
            "own_model:Model",
            "`own_model:Model` must come with data, got only a LightningModule without"
            " `train_dataloader`. Give the `--data`.",
        ),
        (
            "own_model:both --device-batch-sizes few",
            "`--device-batch-sizes` must be numbers, got 'few'. Write, for example, 1,2,4.",
        ),
        (
            "own_model:small --device-batch-sizes 8",
            "`--device-batch-sizes` must begin with a size that fits in memory, got no such"
            " size. Give smaller sizes.",
        ),
        ("own_model:both --precision 7", "Precision '7' is invalid."),
        ("own_model:both --devices 0", "`Trainer(devices=0)` value is not a valid input"),
        (
            "own_model:both --output no/such.csv",
            "`--output` must be in a folder that exists, got no/such.csv. Create the folder first.",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line_and_nothing_is_written(
    arguments: str, message: str, folder: Path
) -> None:
    code, _, err = profile(*arguments.split())

    assert code == 2
    assert f"noisescale: {message}" in err
    assert "Traceback" not in err
    assert not list(folder.glob("*.csv"))


def test_another_file_is_not_overwritten(folder: Path) -> None:
    other = folder / "results.csv"
    other.write_text("epoch,loss\n1,0.5\n")

    code, _, err = profile(  # it would fail in training, if it came to that
        "own_model:Wrong", "--data", "own_model:Data", "--output", "results.csv"
    )

    assert code == 2
    assert "`results.csv` must have the columns device_batch_size" in err
    assert other.read_text() == "epoch,loss\n1,0.5\n"


def test_help_is_light() -> None:
    code = (
        "import sys; from noisescale.cli.app import app\n"
        "try: app(['profile', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'numpy', 'pytorch_lightning'} & sys.modules.keys())"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.endswith("set()\n")
