# SPDX-License-Identifier: Apache-2.0
"""Make from `inputs/` what the package makes of a run, and keep it in `outputs/`.

    python -m goldens.make [--exact FOLDER]      # in the folder `tests`

`test_goldens.py` makes it again and compares. A change that is meant to change no answer leaves
every file of `outputs/` alone; one that changes an answer shows in the commit what it changed.
`TEXTS` are kept as a reader sees them. Of the others' sentences the numbers are kept, so that a
sentence is written once. All numbers have seven digits, and files that differ in the first
four are written: of what is fitted, other processors find other last digits. With `--exact` all
digits go to another folder: compare two of them from before and after a change.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import chdir
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

from program import ended

HERE = Path(__file__).parent
INPUTS, OUTPUTS = HERE / "inputs", HERE / "outputs"

TEXTS = {
    "plain": ("predict.txt", "predict.json", "tab.json"),
    "resumed": ("predict.txt",),
    "transformers": ("predict.txt",),
    "sweep": ("sweep.txt",),
    "trials": ("compare.txt",),
}
"""What is kept with its sentences."""
DRAWN = ("plain", "each_step", "grown")
"""Runs whose figures are kept."""

Made = Iterator[tuple[str, Callable[[], str]]]
"""Names of files, without the input's, and what makes their contents."""


def command(*words: str) -> str:
    """Exit code, output and errors of a command."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code, output, errors = ended(*words)
    said = "".join(f"warning: {each.message}\n" for each in caught)
    return f"$ noisescale {' '.join(words)}\n{output}--- errors\n{errors}{said}--- {code}\n"


def answer(*words: str) -> Callable[[], str]:
    return partial(command, *words, "--json")


def of_run(run: str) -> Made:
    """What is made of one run. The current folder has the inputs."""
    words = ("predict", run, *(("--monitor", "other") if run == "two_monitors" else ()))
    yield "history.csv", partial(columns, run)
    if run in TEXTS:
        yield "predict.txt", partial(command, *words)
    yield "predict.json", partial(command, *words, "--json", "--devices", "1,2,16")
    if run == "plain":
        yield "tab.json", partial(tab, run)
    if run in DRAWN:
        yield "figures.json", partial(figures, *words)


def columns(run: str) -> str:
    """The history, one row a line."""
    from noisescale.history.reading import read_run

    monitor = "other" if run == "two_monitors" else None
    history = read_run(run, monitor=monitor)
    mix = history.optimizer
    about = {"unit": history.unit, "confidence": history.confidence, "kind": mix and mix.kind}
    rows = zip(*(values.tolist() for values in history.values()), strict=True)
    lines = [f"# {about}", ",".join(history), *(",".join(map(repr, row)) for row in rows)]
    return "\n".join(lines) + "\n"


def tab(run: str) -> str:
    """What the page in TensorBoard is sent."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.base_plugin import TBContext
    from werkzeug.test import Client

    from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin

    multiplexer = EventMultiplexer(size_guidance={"tensors": 1000, "scalars": 1000})
    multiplexer.AddRun(run, run)
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, ".")
    apps = NoiseScalePlugin(TBContext(data_provider=provider, logdir=".")).get_plugin_apps()
    runs = Client(apps["/runs"]).get("/runs").json or []
    asked = {"runs": runs}
    for each in runs:
        one = Client(apps["/prediction"]).get("/p?" + each["id"]).json
        compared = Client(apps["/comparison"]).get("/c", query_string={"of": each["id"]}).json
        for name, found in {each["id"]: one, f"{each['id']} compared": compared}.items():
            drawn = [figure["id"] for figure in found.pop("figures", [])]
            asked[name] = {**found, "settings": None, "dark": None, "figures": drawn}
    return json.dumps(asked, indent=1, ensure_ascii=False)


def figures(*words: str) -> str:
    """What the report of a command draws."""
    command(*words, "--html", "report.html")
    report = Path("report.html")
    (drawn,) = re.findall(r"^const figures = (.*);$", report.read_text(), re.MULTILINE)
    report.unlink()
    return json.dumps(json.loads(drawn), indent=1, ensure_ascii=False)


def written_again(folder: str, *names: str) -> Made:
    """Tables that a command has just written."""
    for name in names:
        yield name, Path(folder, name).read_text


def of_job(kind: str, *words: str) -> Made:
    """A finished sweep or search, shown again, and its tables, written again."""
    again = (kind, "targets.py:make", *words)
    tables = sorted(each.name for each in Path(kind).glob("*.csv"))
    for name in tables:
        Path(kind, name).unlink()
    if kind in TEXTS:
        yield f"{kind}.txt", partial(command, *again)
    yield f"{kind}.json", answer(*again)
    yield from written_again(kind, *tables)
    journal = f"{kind}/{kind}.journal"
    yield "status.json", answer("status", "--storage", journal)
    yield "tasks.json", partial(tasks, journal)


SWEEP = (
    *("--goal", "val_loss<=0.35", "--batch-sizes", "8,32,128,512", "--trials", "4"),
    *("--repeats", "2", "--epochs", "20", "--accelerator", "cpu"),
    *("--search", "learning_rate=0.05..2"),
)
TUNE = (
    *("--metric", "val_loss", "--trials", "12", "--epochs", "3", "--accelerator", "cpu"),
    *("--search", "learning_rate=0.02..2", "--search", "batch_size=16..256"),
    *("--search", "width=8..64"),
)
BRANCH = (
    *("--batch-sizes", "1x,4x,16x", "--orders", "2", "--loss-examples", "1400"),
    *("--accelerator", "cpu"),
)


def of_sweep() -> Made:
    yield from of_job("sweep", *SWEEP)
    yield "fit.json", answer("fit", "sweep/sweep.csv")
    swept = ("compare", "sweep/trials.csv", "--goal", "val_loss<=0.4")
    yield "compare.json", answer(*swept)
    yield "figures.json", partial(figures, *swept)
    shutil.copytree(INPUTS / "each_step", "run")
    yield "calibrated.json", answer("predict", "run", "--sweep", "sweep/sweep.csv")


def tasks(journal: str) -> str:
    """What the search wanted at each number of results: its tasks, as workers get them."""
    from noisescale.lab.jobs.ledger import Ledger
    from noisescale.lab.jobs.status import job_from

    ledger = Ledger.open(journal, None)
    job = job_from(ledger.job)
    found: list[dict[str, Any]] = []
    known: dict[str, Any] = {}
    for entry in (each for each in ledger.entries().values() if each.result):
        wanted = [(task.key, task.spec) for task in job.next_tasks(known)]
        drawn = {"wanted": wanted} if ledger.job["kind"] == "sweep" else {}
        found.append({"known": len(known), **drawn})
        known[entry.key] = entry
    return json.dumps({"job": ledger.job, "tasks": found}, indent=1)


def of_tune() -> Made:
    yield from of_job("tune", *TUNE)
    yield "figures.json", partial(figures, "tune", "targets.py:make", *TUNE)


def of_branch() -> Made:
    """What a prediction makes of finished branches."""
    words = ("predict", "run", "--branches", "branches.json")
    yield "predict.json", answer(*words)
    yield "figures.json", partial(figures, *words)
    yield "branch.json", answer("branch", "run", "saved", "targets.py:make", *BRANCH)


def of_profile() -> Made:
    """Step times of a file in a prediction."""
    shutil.copytree(INPUTS / "plain", "run")
    yield "predict.json", answer("predict", "run", "--step-times", "step_times.json")


def of_trials() -> Made:
    """A comparison of two optimizers from folders of runs, and a second run."""
    compared = ("compare", "sgd", "adamw", "--goal", "accuracy>=0.85", "--by", "steps")
    yield "compare.txt", partial(command, *compared, "--details")
    yield "compare.json", answer(*compared)
    yield "figures.json", partial(figures, *compared)
    yield "runs.json", answer("predict", "sgd")
    words = ("predict", "sgd/64-0.2", "--second-run", "sgd/256-0.8", "--goal", "accuracy=0.85")
    yield "second_run.json", answer(*words)


def of_states() -> Made:
    """States of checkpoints; and what a fit that goes on from them leaves, as far as it is sure."""
    import torch
    from goldens.targets import Classifier, digits
    from lightning.pytorch import Trainer

    from noisescale import BatchSizeScheduler, NoiseScaleMonitor

    monitor = NoiseScaleMonitor(groups={"first": ["net.0.*"]})
    scheduler = BatchSizeScheduler(policy="tradeoff", max_batch_size=512)
    saved = torch.load("callbacks.pt", weights_only=True)
    for each in (monitor, scheduler):
        state = next(state for key, state in saved.items() if key.startswith(type(each).__name__))
        yield f"{type(each).__name__}.saved.json", partial(as_json, state)
        each.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator="cpu", max_steps=4, callbacks=[monitor, scheduler], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0,
        ).fit(Classifier(), *digits(8))  # fmt: skip
    for each in (monitor, scheduler):
        yield f"{type(each).__name__}.shape.json", partial(as_json, shape_of(each.state_dict()))
    estimate = f"{monitor.noise_scale.value:.2g}, {len(monitor.history['step'])} rows\n"
    yield "estimate.txt", lambda: estimate


def shape_of(state: Any) -> Any:
    """Types in place of values."""
    if isinstance(state, dict):
        return {str(name): shape_of(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [type(state).__name__, *({json.dumps(shape_of(each)): 0 for each in state})]
    return f"{state.dtype}" if hasattr(state, "dtype") else type(state).__name__


def as_json(state: Any) -> str:
    """Tensors as lists, with what they are."""

    def plain(value: Any) -> Any:
        if hasattr(value, "dtype"):
            return {"of": f"{value.dtype}", "shape": list(value.shape), "is": value.tolist()}
        return repr(value)

    return json.dumps(state, indent=1, default=plain, sort_keys=True)


OTHERS: dict[str, Callable[[], Made]] = {
    "sweep": of_sweep,
    "tune": of_tune,
    "branch": of_branch,
    "profile": of_profile,
    "trials": of_trials,
    "states": of_states,
}
NAMES = [*sorted({each.name for each in INPUTS.iterdir()} - OTHERS.keys()), *OTHERS]


def made_of(name: str, files: Collection[str] = ()) -> dict[str, str]:
    """What is made of one input, in a copy of it: all, or these files alone."""
    sys.modules.pop("targets", None)  # each folder has its own
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, name)
        shutil.copytree(INPUTS / name, copy)
        shutil.copy(HERE / "targets.py", copy)
        for second, file in enumerate(sorted(Path(folder).rglob("*"))):
            os.utime(file, (1.8e9 + second,) * 2)  # runs are sorted by time
        with (
            chdir(copy if name in OTHERS else folder),
            mock.patch.dict(os.environ, {"COLUMNS": "100", "TERM": "dumb"}),
        ):
            made = OTHERS[name]() if name in OTHERS else of_run(name)
            found = {file: make() for file, make in made if not files or file in files}
    kept = found.keys() if name == "states" else TEXTS.get(name, ())
    return {file: text if file in kept else wordless(text) for file, text in found.items()}


def wordless(text: str) -> str:
    """Of strings of JSON of three words and more the numbers alone."""

    def shortened(string: re.Match[str]) -> str:
        if string[0].count(" ") < 2:
            return string[0]
        return f'"{" ".join(re.findall(r"[0-9][0-9,.]*", string[0]))}"'

    return re.sub(r'"(?:[^"\\\n]|\\.)*"', shortened, text)


def rounded(text: str) -> str:
    """Numbers of more than seven digits with seven."""
    return re.sub(
        r"-?\d+\.\d+(e[-+]?\d+)?",
        lambda found: found[0] if len(found[0]) < 9 else f"{float(found[0]):.7g}",
        text,
    )


def difference(found: str, stored: str) -> str:
    """What differs first, with its line; "" if nothing but last digits of numbers does."""
    new, old = (re.split(r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)", text) for text in (found, stored))
    line = 1
    for position, (one, other) in enumerate(zip_longest(new, old, fillvalue="")):
        is_number = position % 2 == 1
        if one != other and not (is_number and differ_in_last_digits(one, other)):
            return f"line {line}: {other[:200]!r} became {one[:200]!r}"
        line += one.count("\n")
    return ""


def differ_in_last_digits(one: str, other: str) -> bool:
    """Whether numbers, of which not both are whole, differ by less than what a reader is shown."""
    whole = one.lstrip("-").isdigit() and other.lstrip("-").isdigit()
    return (
        not whole
        and "" not in (one, other)
        and math.isclose(float(one), float(other), rel_tol=1e-4, abs_tol=1e-9)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, []])
    parser.add_argument("--exact", type=Path, help="a folder for all digits")
    arguments = parser.parse_args()
    for name in arguments.names or NAMES:
        folder = (arguments.exact or OUTPUTS) / name
        folder.mkdir(parents=True, exist_ok=True)
        made = made_of(name)
        for file in {each.name for each in folder.iterdir()} - made.keys():
            (folder / file).unlink()
        for file, exact in made.items():
            text, path = exact if arguments.exact else rounded(exact), folder / file
            if arguments.exact or not path.exists() or difference(text, path.read_text()):
                path.write_text(text)
        print(name, flush=True)


if __name__ == "__main__":
    main()
