# SPDX-License-Identifier: Apache-2.0
"""What is wrong is one line that a terminal can show, in the words of who typed it."""

import inspect
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import program
import pytest
from logged_runs import log_run
from tiers import slow

from noisescale.cli.fit import fit_sweep
from noisescale.cli.predict import predict_run
from noisescale.cli.profile import profile_steps
from noisescale.cli.watch import watch_run
from noisescale.history.record import RECORD

HOSTILE = "\x1b[31m\x1b]0;title\x07\x9b\r\u202e[red][/]"
"""Colours, a window's title, a line that begins anew, text backwards; and rich's own markup."""

HOSTILE_FILE = HOSTILE.replace("/", "")
Refuse = Callable[..., str]

WORDS = {
    "RED": "\x1b[31m",
    "HOSTILE": HOSTILE,
    "HOSTILE_FILE": f"files/{HOSTILE_FILE}.csv",
    "HOSTILE_NAME": f"own_model:{HOSTILE}",
    "HUNDREDS": ",".join(map(str, range(1, 1001))),
}

SWEEP = "batch_size,steps\n8,1350\n32,412\n128,178\n"
MODEL = """
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset

class Needy(BoringModel):
    def __init__(self, width):
        super().__init__()

class Bare(BoringModel):
    train_dataloader = LightningModule.train_dataloader

class Large(BoringModel):
    def training_step(self, batch, batch_idx):
        raise torch.OutOfMemoryError("CUDA out of memory.")

def examples():
    return RandomDataset(32, 64)

def both():
    return BoringModel(), examples()
"""
FILES = {
    "one.csv": "batch_size,steps\n8,1350\n",
    "no_number.csv": "batch_size,steps\n8,1350\n32,\x1b[31m4\n",
    "negative.csv": "batch_size,steps\n8,-1350\n32,412\n",
    "huge.csv": "batch_size,steps\n8e200,1350\n32e200,412\n128e200,178\n",
    "twice.csv": "batch_size,steps,steps\n8,1350,1\n32,412,2\n",
    "by_twice.csv": "model,model,batch_size,steps\na,b,8,1350\na,b,32,412\n",
    "names.csv": f'"{HOSTILE}",steps\n8,1350\n32,412\n',
    "several.csv": "batch_size,steps_a,steps_b\n64,1,2\n",
    "curves.csv": f'"{HOSTILE}",batch_size,steps\na,8,1350\nb,32,412\n',
    "empty.csv": "",
    "no_lines.csv": "batch_size,steps\n",
    "binary.csv": "\x00\x01\x02",
    "no_loss.csv": SWEEP,
    "losses.csv": "batch_size,loss\n64,2.5\n128,2.49\n256,2.6\n",
    "equal_losses.csv": "batch_size,loss\n64,2.5\n128,2.5\n256,2.5\n",
    f"{HOSTILE_FILE}.csv": "\x1b",
}
HEADER = (
    '{"of": "noise_scale/", "run": "a.1", "format": 1, "unit": "examples", "confidence": 0.95,'
    ' "loop": "", "way": "", "optimizer": null, "parameters": null, "withheld": "",'
    ' "why_nothing": "", "columns": ["step", "examples", "batch_size"]}\n'
)
RUNS = {
    "cell": f"{HEADER}\x1b[31m\n",
    "[x[/]": "",
    "header": HEADER.replace("0.95", '"\\u001b[31m"'),
    "later": HEADER.replace("1,", "9,"),
    "no_rows": HEADER,
    "no_size": HEADER.replace(', "batch_size"', "")
    + '{"of": "noise_scale/", "run": "a.1", "after": 0, "row": [1, 16]}\n',
    "other": HEADER + '{"of": "noise_scale/", "run": "b.1", "after": 0, "row": [1, 1, 1]}\n',
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    log_run(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files to be refused, which every test finds as they were."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in RUNS.items():
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / RECORD).write_text(content, encoding="utf-8")
    (folder / "files").mkdir()
    for name, content in FILES.items():
        (folder / "files" / name).write_text(content, encoding="utf-8")
    (folder / "own_model.py").write_text(MODEL)
    return folder


@pytest.fixture
def refused(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """The one line that a refusal ends with, in a folder where nothing changes."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def times() -> dict[Path, int]:
        files = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
        return {path: path.stat().st_mtime_ns for path in files if path.is_file()}

    def refuse(*arguments: str) -> str:
        before = times()
        said = program.refused(*(run if word == "RUN" else word for word in arguments))
        assert times() == before
        return said

    return refuse


COMMANDS: dict[str, Callable[..., None]] = {
    "predict": predict_run,
    "watch": watch_run,
    "fit": fit_sweep,
    "profile": profile_steps,
}
# What was typed, and how the line begins; cases of `make test-all` begin with a tilde.
CASES = r"""
no-such-RED                                          => No such command 'no-such-
predict                                              => Missing argument 'RUN'. See `noisescale
predict RUN more                                     => Got unexpected extra argument
predict RUN --no-such-option 1                       => No such option: --no-such-
predict RUN --price-per-device-hour two              => Invalid value for '--price-per-device-hour'
predict RUN --batch-sizes ''                         => `--batch-sizes` must be numbers, got ''
predict RUN --batch-sizes ²                          => `--batch-sizes` must be numbers
predict RUN --batch-sizes 0                          => `--batch-sizes` must be positive
predict RUN --batch-sizes 1e300                      => `--batch-sizes` must be from 1e-12 to 1e+12
predict RUN --batch-sizes HUNDREDS                   => `--batch-sizes` must be at most 256 values
predict RUN --batch-sizes 0.5                        => `--batch-sizes` must reach the number
predict RUN --devices two                            => `--devices` must be numbers
predict RUN --devices 1e18                         => `--devices` must be whole numbers from 1
predict RUN --devices HUNDREDS                       => `--devices` must be at most 64 values
predict RUN --price-per-device-hour 1e300            => `--price-per-device-hour` must be from
predict RUN --calibration 1e300                      => `--calibration` must be from 1e-06 to 1e+06
~ predict RUN --calibration 1e-300                   => `--calibration` must be from 1e-06 to 1e+06
predict RUN --calibration nan                        => `--calibration` must be from 1e-06 to 1e+06
predict RUN --max-device-batch-size 1e-300           => `--max-device-batch-size` must be from
predict RUN --max-device-batch-size 0                => `--max-device-batch-size` must be positive
predict RUN --devices-per-node 1000000000            => `--devices-per-node` must be a whole number
predict RUN --devices-per-node 0                     => `--devices-per-node` must be a whole number
predict RUN --monitor wide                           => `--monitor` must be the name of a monitor
predict RUN --optimizer 3                            => `--optimizer` must be the number
~ predict RUN --optimizer -1                         => `--optimizer` must be the number
predict RUN --html gone/r.html                       => `--html` must be in a folder
predict RUN --html files                             => `--html` must name a file
~ predict RUN --html HOSTILE/r.html                  => `--html` must be in a folder
predict RUN --step-times files/one.csv               => `files/one.csv` must be a file of `noises
predict RUN --step-times files/gone.json             => `files/gone.json` must be a file of
predict RUN --sweep files/one.csv                    => `batch_size` must have two values
predict RUN --sweep files/huge.csv                   => `--sweep` must be from 1e-06 to 1e+06
predict RUN --branches files/losses.csv              => `--branches` must be used with `--branch-
predict RUN --branches files/losses.csv --branch-step 1001 => `--branch-step` must be a step of the
predict RUN --branches files/no_loss.csv --branch-step 500 => `files/no_loss.csv` must have one
predict RUN --branches files/equal_losses.csv --branch-step 500 => `loss` must show up to which
predict RUN --branch-step 500                        => `--branch-step` must be used with
predict RUN --loss-scatter 0.1                       => `--loss-scatter` must be used with
predict RUN --sweep s.csv --branch-examples 100      => `--branch-examples` must be used with
~ predict RUN --branches b.json --branch-examples 100  => `--branch-examples` must be used with
predict RUN --calibration 1 --sweep x --html r.html  => `--calibration` and `--sweep` must not
predict HOSTILE                                      => `RUN` must be a folder or a file, got \x1b[
predict [red]                                        => `RUN` must be a folder or a file, got [red]
predict files                                        => `files` must contain a run
predict runs --html r.html                           => `--html` must be used with one run, got 7
predict runs --details                               => `--details` must be used with one run, got 7
predict runs/cell                                    => `runs/cell/noise_scale.jsonl` must have a ro
predict runs/header                                  => `runs/header` must have a whole header
predict runs/later                                   => `document` must be of format 1, got format 9
predict runs/other                                   => `runs/other/noise_scale.jsonl` must have a r
predict runs/no_rows/noise_scale.jsonl/b             => `RUN` must be the name of a run in runs/no_r
~ predict runs/[x[/]                                 => `runs/[x[/]` must have a row of the history
predict runs/no_rows                                 => `runs/no_rows` must have a row of the histor
predict runs/no_size                                 => `RUN` must have a `batch_size`, got none
predict files/one.csv                                => `files/one.csv` must have the file noise_sca
fit                                                  => Missing argument 'SWEEP'
fit files/gone.csv                                   => `files/gone.csv` must be a CSV file
fit files                                            => `files` must be a CSV file, got a folder
fit files/no_number.csv                              => `steps` must be a number, got '\x1b[31m4' in
fit files/negative.csv                               => `steps` must be positive and finite
fit files/twice.csv                                  => `files/twice.csv` must name each column once
~ fit files/by_twice.csv --by model                  => `files/by_twice.csv` must name each column
fit files/names.csv                                  => `files/names.csv` must have one column that
~ fit files/several.csv                              => `files/several.csv` must have one column
fit files/curves.csv                                 => `--by` must name the column that separates
fit files/empty.csv                                  => `files/empty.csv` must have a line of column
~ fit files/no_lines.csv                             => `files/no_lines.csv` must have a line of
fit files/binary.csv                                 => `files/binary.csv` must have
fit HOSTILE_FILE                                     => `files/\x1b[31m\x1b]0;title\x07\x9b\r\u202e
fit files/no_loss.csv --by RED                       => `--by` must be a column of files/no_loss.csv
fit files/no_loss.csv --confidence nan --json        => `--confidence` must lie between 0 and 1
fit files/no_loss.csv --optimal-batch-size 0         => `--optimal-batch-size` must be positive
fit files/no_loss.csv --steps-column x               => `files/no_loss.csv` must have one column
profile                                              => Missing argument 'TARGET'
profile own_model                                    => `own_model` must be written as package.mod
~ profile ..x:y                                      => `..x:y` must be written as package.module
~ profile :x                                         => `:x` must be written as package.module:name
profile gone.py:x                                    => `gone.py` must be a Python file
profile HOSTILE_NAME                                 => `own_model:\x1b[31m\x1b]0;title\x07\x9b\r
~ profile [red]:[/]                                  => `[red]:[/]` must be importable, got Module
profile own_model:x                                  => `own_model:x` must name an object
profile own_model:Needy                              => `own_model:Needy` must be callable without
profile own_model:examples                           => `own_model:examples` must be a LightningMod
profile own_model:Bare                               => `own_model:Bare` must come with data
profile own_model:Large --device-batch-sizes 8       => `--device-batch-sizes` must begin with
profile own_model:both --device-batch-sizes x        => `--device-batch-sizes` must be numbers
profile own_model:both --device-batch-sizes 1.5      => `--device-batch-sizes` must be whole
profile own_model:both --accumulation 0              => `--accumulation` must be whole
profile own_model:both --steps 4                     => `--steps` must be whole and at least 5
profile own_model:both --output gone/x.json          => `--output` must be in a folder
profile own_model:Large --output files/one.csv       => `files/one.csv` must be a file of
~ profile own_model:both --output files              => `files` must be a file of
~ profile own_model:both --accelerator RED           =>
~ profile own_model:both --precision 7               => Precision '7' is invalid
~ profile own_model:both --devices 0                 => `Trainer(devices=0)`
watch                                                => Missing argument 'RUN'
watch gone                                           => `RUN` must be a folder or a file, got gone
watch RUN --monitor wide                             => `--monitor` must be the name of a monitor
watch RUN --optimizer 3                              => `--optimizer` must be the number
watch RUN --every nan                                => `--every` must be positive and finite
"""


@pytest.mark.parametrize(
    "case",
    [slow(case[2:]) if case[0] == "~" else case for case in CASES.strip().splitlines()],
)
def test_bad_input_is_one_line_in_the_words_of_who_typed_it(case: str, refused: Refuse) -> None:
    typed, _, message = case.partition("=>")
    words = [
        re.sub("[A-Z_]{3,}", lambda one: WORDS.get(one[0], one[0]), word)
        for word in shlex.split(typed)
    ]

    said = refused(*words)

    # Older versions of typer name arguments in capitals.
    assert said.lower().startswith(message.strip().lower())
    if (command := COMMANDS.get(words[0])) is not None:
        parameters = inspect.signature(command).parameters.values()
        options = {p.name for p in parameters if p.default is not inspect.Parameter.empty}
        named = {*re.findall(r"`(\w+)(?:=\w+)?`", said)}
        assert not named & (options | {"kappa", "history", "step_time", "path"})


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_names_that_are_no_plain_text_are_shown_escaped(
    as_json: list[str], run: Path, tmp_path: Path
) -> None:
    curves = tmp_path / "curves.csv"
    rows = "".join(f'"{HOSTILE}",{row}\n' for row in SWEEP.splitlines()[1:])
    curves.write_text(f"model,batch_size,steps\n{rows}", encoding="utf-8")
    page, unit = tmp_path / f"{HOSTILE_FILE}.html", f"{HOSTILE}<script>alert(1)"

    fitted = program.run("fit", curves, "--by", "model", "--unit", unit, *as_json)
    predicted = program.run("predict", run, "--unit", unit, "--html", page, *as_json)

    for said in (fitted, predicted):
        assert all(line.isprintable() for line in said.splitlines())
        assert said.splitlines() == said.removesuffix("\n").split("\n")
        assert "[red][/]" in said
    if as_json:
        assert HOSTILE in json.loads(fitted)["curves"]
    assert "<script>alert(1)" not in page.read_text()
    assert "&lt;script&gt;alert(1)" in page.read_text()


@pytest.mark.parametrize(
    "words",
    [
        "--devices 4,1,4,4 --batch-sizes 64,64,64.0",
        "--batch-sizes \N{FULLWIDTH DIGIT SIX}\N{FULLWIDTH DIGIT FOUR}",  # digits, too
        f"--devices {','.join(map(str, range(1, 65)))}",
        "--calibration 1e6",
        "--calibration 1e-6",
        "--price-per-device-hour 1e12",
        "--max-device-batch-size 1e-12 --devices-per-node 1000000",
    ],
)
def test_the_most_that_is_allowed_is_predicted(words: str, run: Path) -> None:
    found = json.loads(program.run("predict", run, *words.split(), "--json"))

    assert 0 < len(found["rows"]) <= 64 * 64
