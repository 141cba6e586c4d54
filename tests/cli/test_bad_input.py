# SPDX-License-Identifier: Apache-2.0
"""What is wrong is one line that a terminal can show, in the words of who typed it."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import program
import pytest
from logged_runs import log_run

from noisescale.cli.fit import fit_sweep
from noisescale.cli.predict import predict_run
from noisescale.cli.profile import profile_steps
from noisescale.cli.watch import watch_run

HOSTILE = "\x1b[31m\x1b]0;title\x07\x9b\r\u202e[red][/]"
"""Colours, a window's title, a line that begins anew, text backwards; and rich's own markup."""

SWEEP = "batch_size,steps\n8,1350\n32,412\n128,178\n"
TIMES = "device_batch_size,accumulation,devices,nodes,seconds\n8,1,1,1,0.1\n16,1,1,1,0.2\n"
MODEL = """
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset

def both():
    return BoringModel(), RandomDataset(32, 64)
"""
FILES = {
    "one.csv": "batch_size,steps\n8,1350\n",
    "not_whole.csv": "batch_size,steps\n8,1350\n32,\n",
    "no_number.csv": "batch_size,steps\n8,1350\n32,\x1b[31m4\n",
    "negative.csv": "batch_size,steps\n8,-1350\n32,412\n",
    "infinite.csv": "batch_size,steps\ninf,1350\n32,412\n",
    "flat.csv": "batch_size,steps\n8,1000\n32,1000\n128,1000\n",
    "huge.csv": "batch_size,steps\n8e200,1350\n32e200,412\n128e200,178\n",
    "twice.csv": "batch_size,steps,steps\n8,1350,1\n32,412,2\n",
    "sizes_twice.csv": "batch_size,batch_size,steps\n8,9,1350\n32,33,412\n",
    "by_twice.csv": "model,model,batch_size,steps\na,b,8,1350\na,b,32,412\n",
    "names.csv": f'"{HOSTILE}",steps\n8,1350\n32,412\n',
    "cells.csv": f'batch_size,steps\n8,"{HOSTILE}"\n32,412\n',
    "curves.csv": f'"{HOSTILE}",batch_size,steps\na,8,1350\nb,32,412\n',
    "empty.csv": "",
    "binary.csv": "\x00\x01\x02",
    "ragged.csv": "batch_size,steps\n8,1,350\n",
    "no_loss.csv": SWEEP,
    "losses.csv": "batch_size,loss\n64,2.5\n128,2.49\n256,2.6\n",
    "equal_losses.csv": "batch_size,loss\n64,2.5\n128,2.5\n256,2.5\n",
    "nan_losses.csv": "batch_size,loss\n64,2.5\n128,nan\n256,2.5\n",
    "times.csv": TIMES,
    "times_twice.csv": TIMES.replace("seconds", "seconds,seconds").replace("0.", "1,0."),
    "times_zero.csv": TIMES.replace("0.2", "0"),
    "times_none.csv": TIMES.splitlines()[0] + "\n",
    "times_cell.csv": TIMES.replace("0.2", '"\x1b[31m"'),
    f"{HOSTILE.replace('/', '')}.csv": "\x1b",
}
RUN_ROW = "noise_scale/step,noise_scale/examples,noise_scale/batch_size,noise_scale/lower_bound"
RUNS = {
    "twice": f"{RUN_ROW},noise_scale/step\n10,640,64,100,10\n20,1280,64,100,20\n",
    "hosts": f"{RUN_ROW},train/noise_scale/step\n10,640,64,100,10\n20,1280,64,100,20\n",
    "cell": f"{RUN_ROW}\n10,640,64,\x1b[31m\n",
    "others": f'"{HOSTILE}",loss\n1,2\n',
    "[red]": "loss\n1\n",
    "[x[/]": "loss\n1\n",
    "no_rows": f"{RUN_ROW}\n",
    "backwards": f"{RUN_ROW}\n10,640,64,100\n20,320,64,100\n",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    log_run(folder)
    return folder


@pytest.fixture
def refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The one line that a refusal ends with, in a folder where nothing changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("files").mkdir()
    for name, content in FILES.items():
        Path("files", name).write_text(content, encoding="utf-8")
    for name, content in RUNS.items():
        folder = Path("runs", *name.split("/"))
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(content, encoding="utf-8")
    Path("own_model.py").write_text(MODEL)

    def refuse(*arguments: str) -> str:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        said = program.refused(*(run if word == "RUN" else word for word in arguments))
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        changed = {path for path, _ in before.items() ^ after.items()}
        assert {path for path in changed if "__pycache__" not in path.parts} == set()
        return said

    return refuse


COMMANDS: dict[str, Callable[..., None]] = {
    "predict": predict_run,
    "watch": watch_run,
    "fit": fit_sweep,
    "profile": profile_steps,
}
HUNDREDS = ",".join(map(str, range(1, 1001)))
CASES: list[tuple[list[str], str]] = [
    *(
        (["predict", "RUN", *words], message)
        for words, message in [
            (["--batch-sizes", ""], "`--batch-sizes` must be numbers, got ''."),
            (["--batch-sizes", "64,"], "`--batch-sizes` must be numbers, got '64,'."),
            (["--batch-sizes", "few"], "`--batch-sizes` must be numbers, got 'few'."),
            (["--batch-sizes", "64 128"], "`--batch-sizes` must be numbers"),
            (["--batch-sizes", "²"], "`--batch-sizes` must be numbers, got '²'."),
            (["--batch-sizes", "\x1b[31m"], r"`--batch-sizes` must be numbers, got '\x1b[31m'."),
            (["--batch-sizes", "0"], "`--batch-sizes` must be positive and finite, got 0."),
            (["--batch-sizes", "-64"], "`--batch-sizes` must be positive and finite, got -64."),
            (["--batch-sizes", "nan"], "`--batch-sizes` must be positive and finite, got nan."),
            (["--batch-sizes", "inf"], "`--batch-sizes` must be positive and finite, got inf."),
            (["--batch-sizes", "1e300"], "`--batch-sizes` must be from 1e-12 to 1e+12, got"),
            (["--batch-sizes", HUNDREDS], "`--batch-sizes` must be at most 256 values"),
            (["--batch-sizes", "0.5"], "`--batch-sizes` must reach the number of devices"),
            (["--devices", "two"], "`--devices` must be numbers, got 'two'."),
            (["--devices", "0"], "`--devices` must be whole numbers from 1 to 1,000,000, got [0]."),
            (["--devices", "-2"], "`--devices` must be whole numbers from 1 to 1,000,000"),
            (["--devices", "1.5"], "`--devices` must be whole numbers from 1 to 1,000,000"),
            (["--devices", "1e18"], "`--devices` must be whole numbers from 1 to 1,000,000"),
            (["--devices", "nan"], "`--devices` must be whole numbers from 1 to 1,000,000"),
            (["--devices", HUNDREDS], "`--devices` must be at most 64 values"),
            (["--price-per-device-hour", "0"], "`--price-per-device-hour` must be positive"),
            (["--price-per-device-hour", "-1"], "`--price-per-device-hour` must be positive"),
            (["--price-per-device-hour", "nan"], "`--price-per-device-hour` must be positive"),
            (["--price-per-device-hour", "1e300"], "`--price-per-device-hour` must be from 1e-12"),
            (["--price-per-device-hour", "two"], "Invalid value for '--price-per-device-hour'"),
            (["--hour-worth", "30"], "`--hour-worth` must come with `--price-per-device-hour`"),
            (
                ["--price-per-device-hour", "1", "--hour-worth", "1e300"],
                "`--hour-worth` must be from 1e-12 to 1e+12, got 1e+300.",
            ),
            (["--calibration", "1e300"], "`--calibration` must be from 1e-06 to 1e+06, got 1e+300"),
            (["--calibration", "1e-300"], "`--calibration` must be from 1e-06 to 1e+06"),
            (["--calibration", "0"], "`--calibration` must be from 1e-06 to 1e+06, got 0.0."),
            (["--calibration", "-1"], "`--calibration` must be from 1e-06 to 1e+06, got -1.0."),
            (["--calibration", "nan"], "`--calibration` must be from 1e-06 to 1e+06, got nan."),
            (["--max-device-batch-size", "1e-300"], "`--max-device-batch-size` must be from 1e-12"),
            (["--max-device-batch-size", "0"], "`--max-device-batch-size` must be positive and"),
            (["--max-device-batch-size", "nan"], "`--max-device-batch-size` must be positive and"),
            (["--devices-per-node", "1" + 18 * "0"], "`--devices-per-node` must be a whole number"),
            (["--devices-per-node", "0"], "`--devices-per-node` must be a whole number from 1 to"),
            (["--devices-per-node", "-8"], "`--devices-per-node` must be a whole number from 1 to"),
            (["--devices-per-node", "two"], "Invalid value for '--devices-per-node'"),
            (["--monitor", "wide"], "`--monitor` must be the name of a monitor in"),
            (["--optimizer", "3"], "`--optimizer` must be the number of an optimizer"),
            (["--optimizer", "-1"], "`--optimizer` must be the number of an optimizer"),
            (["--html", "gone/r.html"], "`--html` must be in a folder that exists"),
            (["--html", "files"], "`--html` must name a file, got the folder 'files'."),
            (["--html", f"{HOSTILE}/r.html"], "`--html` must be in a folder that exists"),
            (["--step-times", "files/one.csv"], "`files/one.csv` must have the columns"),
            (["--step-times", "files/times_twice.csv"], "`files/times_twice.csv` must name each"),
            (["--step-times", "files/times_zero.csv"], "`files/times_zero.csv` must have positive"),
            (["--step-times", "files/times_none.csv"], "`files/times_none.csv` must have timings"),
            (["--step-times", "files/times_cell.csv"], "`files/times_cell.csv` must have positive"),
            (
                ["--step-times", "files/gone.csv"],
                "`files/gone.csv` must be a CSV file, got a path that does not exist",
            ),
            (["--sweep", "files/one.csv"], "`batch_size` must have two values at least, got 1."),
            (["--sweep", "files/flat.csv"], "`steps` must show both ends of the law"),
            (["--sweep", "files/huge.csv"], "`--sweep` must be from 1e-06 to 1e+06"),
            (["--sweep", "files/twice.csv"], "`files/twice.csv` must name each column once"),
            (
                ["--branches", "files/losses.csv"],
                "`--branches` must be used with `--branch-step`",
            ),
            (
                ["--branches", "files/losses.csv", "--branch-step", "1001"],
                "`--branch-step` must be a step of the run, got 1001.",
            ),
            (
                ["--branches", "files/no_loss.csv", "--branch-step", "500"],
                "`files/no_loss.csv` must have one column that begins with 'loss'",
            ),
            (
                ["--branches", "files/equal_losses.csv", "--branch-step", "500"],
                "`loss` must show up to which batch size branches keep up",
            ),
            (
                ["--branches", "files/nan_losses.csv", "--branch-step", "500"],
                "`loss` and `batch_size` must be finite",
            ),
            (["--calibration", "1", "--sweep", "x"], "`--calibration`, `--sweep` and `--branches`"),
            (["--no-such-\x1b[31m", "1"], "No such option: --no-such-"),
            (["more"], "Got unexpected extra argument"),
        ]
    ),
    (["predict"], "Missing argument 'RUN'. See `noisescale predict --help`."),
    (["predict", "gone"], "`run` must be a folder or a file, got gone, which does not exist"),
    (["predict", HOSTILE], r"`run` must be a folder or a file, got \x1b[31m\x1b]0;title\x07"),
    (["predict", "[red]"], "`run` must be a folder or a file, got [red], which does not exist"),
    (["predict", "files"], "`files` must contain a run"),
    (["predict", "runs", "--html", "r.html"], "`--html` must be used with one run, got 8 runs"),
    (["predict", "runs", "--details"], "`--details` must be used with one run, got 8 runs in"),
    (["predict", "runs/twice"], "`runs/twice/metrics.csv` must name each column once"),
    (["predict", "runs/hosts"], "`runs/hosts/metrics.csv` must have one column for each metric"),
    (["predict", "runs/cell"], "`noise_scale/lower_bound` must be a number, got '\\x1b[31m'"),
    (["predict", "runs/others"], "`runs/others` must be a run with NoiseScaleMonitor"),
    (["predict", "runs/[red]"], "`runs/[red]` must be a run with NoiseScaleMonitor"),
    (["predict", "runs/[x[/]"], "`runs/[x[/]` must be a run with NoiseScaleMonitor"),
    (["predict", "runs/no_rows"], "`runs/no_rows` must have a whole row"),
    (["predict", "runs/backwards"], "`run` must have `examples` that rise with the steps"),
    (["predict", "files/one.csv"], "`files/one.csv` must be a run with NoiseScaleMonitor"),
    *(
        (["fit", *words], message)
        for words, message in [
            ([], "Missing argument 'SWEEP'. See `noisescale fit --help`."),
            (["files/gone.csv"], "`files/gone.csv` must be a CSV file, got a path that does not"),
            (["files"], "`files` must be a CSV file, got a folder."),
            (["files/one.csv"], "`batch_size` must have two values at least, got 1."),
            (["files/not_whole.csv"], "`steps` must be a number, got '' in line 3"),
            (["files/no_number.csv"], "`steps` must be a number, got '\\x1b[31m4' in line 3"),
            (["files/negative.csv"], "`steps` must be positive and finite, got -1350.0"),
            (["files/infinite.csv"], "`batch_size` must be positive and finite, got inf"),
            (["files/flat.csv"], "`steps` must show both ends of the law"),
            (["files/twice.csv"], "`files/twice.csv` must name each column once, got 'steps' in"),
            (["files/sizes_twice.csv"], "`files/sizes_twice.csv` must name each column once"),
            (["files/by_twice.csv", "--by", "model"], "`files/by_twice.csv` must name each column"),
            (["files/names.csv"], "`files/names.csv` must have one column that begins with"),
            (["files/cells.csv"], "`steps` must be a number, got '\\x1b[31m\\x1b]0;title\\x07"),
            (
                ["files/curves.csv"],
                "`--by` must name the column that separates the curves of files/curves.csv",
            ),
            (["files/empty.csv"], "`files/empty.csv` must have a line of column names"),
            (["files/binary.csv"], "`files/binary.csv` must have"),
            (["files/ragged.csv"], "`files/ragged.csv` must have 2 cells in each line"),
            (
                [f"files/{HOSTILE.replace('/', '')}.csv"],
                r"`files/\x1b[31m\x1b]0;title\x07\x9b\r\u202e[red][].csv` must have",
            ),
            (["files/losses.csv"], "`files/losses.csv` must have one column that begins with"),
            (["files/times.csv", "--by", "x\x1b"], r"`files/times.csv` must have one column"),
            (["files/no_loss.csv", "--by", "x\x1b"], r"`--by` must be a column of files/no_loss"),
            (["files/no_loss.csv", "--confidence", "2"], "`--confidence` must lie between 0 and 1"),
            (["files/no_loss.csv", "--confidence", "nan"], "`--confidence` must lie between 0 and"),
            (
                ["files/no_loss.csv", "--confidence", "2", "--json"],
                "`--confidence` must lie between 0 and 1, got 2.0.",
            ),
            (["files/no_loss.csv", "--optimal-batch-size", "0"], "`--optimal-batch-size` must be"),
            (["files/no_loss.csv", "--optimal-batch-size", "inf"], "`--optimal-batch-size` must"),
            (["files/no_loss.csv", "--steps-column", "x"], "`files/no_loss.csv` must have one"),
        ]
    ),
    *(
        (["profile", *words], message)
        for words, message in [
            ([], "Missing argument 'TARGET'. See `noisescale profile --help`."),
            (["own_model"], "`own_model` must be written as package.module:name or file.py:"),
            ([f"{HOSTILE}.py:x"], r"`\x1b[31m\x1b]0;title\x07\x9b\r\u202e[red][/].py` must be a"),
            ([f"own_model:{HOSTILE}"], r"`own_model:\x1b[31m\x1b]0;title\x07\x9b\r\u202e[red][/]`"),
            (["[red]:[/]"], "`[red]:[/]` must be importable, got ModuleNotFoundError"),
            ([":x"], "`:x` must be written as package.module:name or file.py:name"),
            (["..x:y"], "`..x:y` must be written as package.module:name or file.py:name, got a"),
            (["own_model:both", "--device-batch-sizes", "x"], "`--device-batch-sizes` must be num"),
            (["own_model:both", "--device-batch-sizes", "0"], "`--device-batch-sizes` must be who"),
            (["own_model:both", "--device-batch-sizes", "1.5"], "`--device-batch-sizes` must be w"),
            (["own_model:both", "--device-batch-sizes", "nan"], "`--device-batch-sizes` must be w"),
            (["own_model:both", "--device-batch-sizes", "inf"], "`--device-batch-sizes` must be w"),
            (["own_model:both", "--accumulation", "0"], "`--accumulation` must be whole and at l"),
            (["own_model:both", "--accumulation", "-1"], "`--accumulation` must be whole and at"),
            (["own_model:both", "--steps", "0"], "`--steps` must be whole and at least 5, got 0."),
            (["own_model:both", "--steps", "x"], "Invalid value for '--steps'"),
            (["own_model:both", "--output", "gone/x.csv"], "`--output` must be in a folder that"),
            (["own_model:both", "--output", "files/one.csv"], "`files/one.csv` must have the col"),
            (["own_model:both", "--output", "files/times_twice.csv"], "`files/times_twice.csv` mu"),
            (["own_model:both", "--output", "files"], "`files` must be a CSV file, got a folder."),
            (["own_model:both", "--accelerator", "\x1b[31m"], ""),
            (["own_model:both", "--precision", "7"], "Precision '7' is invalid."),
        ]
    ),
    *(
        (["watch", *words], message)
        for words, message in [
            ([], "Missing argument 'RUN'. See `noisescale watch --help`."),
            (["gone"], "`run` must be a folder or a file, got gone, which does not exist"),
            (["RUN", "--monitor", "wide"], "`--monitor` must be the name of a monitor in"),
            (["RUN", "--optimizer", "3"], "`--optimizer` must be the number of an optimizer"),
            (["RUN", "--every", "0"], "`--every` must be positive and finite, got 0.0."),
            (["RUN", "--every", "nan"], "`--every` must be positive and finite, got nan."),
            (["RUN", "--every", "soon"], "Invalid value for '--every'"),
        ]
    ),
    (["no-such-\x1b[31m"], "No such command 'no-such-"),
]


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=lambda value: ascii(value)[:60])
def test_bad_input_is_one_line_in_the_words_of_who_typed_it(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    said = refused(*arguments)

    # Older versions of typer name arguments in capitals.
    assert said.lower().startswith(message.lower())
    if (command := COMMANDS.get(arguments[0])) is not None:
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
    page = tmp_path / f"{HOSTILE.replace('/', '')}.html"

    fitted = program.run("fit", curves, "--by", "model", "--unit", HOSTILE, *as_json)
    predicted = program.run("predict", run, "--unit", HOSTILE, "--html", page, *as_json)

    for said in (fitted, predicted):
        assert all(line.isprintable() for line in said.splitlines())
        assert said.splitlines() == said.removesuffix("\n").split("\n")
        assert "[red][/]" in said
    if as_json:
        assert HOSTILE in json.loads(fitted)["curves"]
    assert page.exists()


def test_a_unit_is_text_on_the_page(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    program.run("predict", run, "--unit", "<script>alert(1)", "--html", page)

    text = page.read_text()
    assert "<script>alert(1)" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--devices", "4,1,4,4"],
        ["--batch-sizes", "64,64,64.0"],
        [
            "--batch-sizes",
            "\N{FULLWIDTH DIGIT SIX}\N{FULLWIDTH DIGIT FOUR}",
        ],  # digits of another script have one meaning
        ["--devices", ",".join(map(str, range(1, 65)))],
        ["--calibration", "1e6"],
        ["--calibration", "1e-6"],
        ["--price-per-device-hour", "1e12", "--hour-worth", "1e12"],
        ["--max-device-batch-size", "1e-12"],
        ["--devices-per-node", "1000000"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_the_most_that_is_allowed_is_predicted(words: list[str], run: Path) -> None:
    found = json.loads(program.run("predict", run, *words, "--json"))

    assert 0 < len(found["rows"]) <= 64 * 64
