# SPDX-License-Identifier: Apache-2.0
"""Make from `inputs/` all that the package makes of a run, and keep it in `outputs/`.

    python -m goldens.make [--exact FOLDER]      # in the folder `tests`

`test_goldens.py` makes it again and compares. A change that is meant to change no answer leaves
every file of `outputs/` alone; one that changes an answer shows in the commit what it changed.
Numbers are kept with seven digits, and files that differ in the first four are written: of what
is fitted, other processors find other last digits. With `--exact` all digits go to another
folder: compare two of them from before and after a change.
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
from collections.abc import Callable, Iterator
from contextlib import chdir
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from program import ended
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import (
    EventMultiplexer,
)
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from noisescale import predict
from noisescale.history.reading import read_run
from noisescale.report.page import drawing_script, packed_plotly
from noisescale.tensorboard_plugin.plugin import NoiseScalePlugin

HERE = Path(__file__).parent
INPUTS, OUTPUTS = HERE / "inputs", HERE / "outputs"

NOT_RUNS = ("states", "sweep", "tune", "branch", "profile", "trials")
RUNS = sorted(each.name for each in INPUTS.iterdir() if each.name not in NOT_RUNS)

Made = Iterator[tuple[str, str]]
"""Names of files, without the input's, and their contents."""


def command(*words: str) -> str:
    """Exit code, output and errors of a command."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code, output, errors = ended(*words)
    said = "".join(f"warning: {each.message}\n" for each in caught)
    return f"$ noisescale {' '.join(words)}\n{output}--- errors\n{errors}{said}--- {code}\n"


def of_run(run: str) -> Made:
    """What is made of one run. The current folder has the inputs."""
    options = ("--monitor", "other") if run == "two_monitors" else ()
    options = (*options, "--allow-truncated") if run == "under_way" else options
    yield "history.csv", columns(run, *options)
    yield "predict.txt", command("predict", run, *options)
    yield "details.txt", command("predict", run, *options, "--details", "--hour-worth", "30",
                                 "--price-per-device-hour", "2")  # fmt: skip
    yield "predict.json", command("predict", run, *options, "--json", "--devices", "1,2,16")
    watched = tuple(word for word in options if word != "--allow-truncated")
    # When a file was written and what time it is now are not the run's.
    with mock.patch("time.time", return_value=written(run)):
        yield "watch.txt", command("watch", run, "--once", *watched)
    yield "tab.json", tab(run)
    yield "page.html", page("predict", run, *options)
    try:
        yield "notebook.html", predict(read_run(run, allow_truncated=True))._repr_html_()
    except ValueError as error:
        yield "notebook.html", f"{type(error).__name__}: {error}"


def written(run: str) -> float:
    """One hour after the last write, which is also set: copies are made now."""
    for file in Path(run).iterdir():
        os.utime(file, (1.8e9, 1.8e9))
    return 1.8e9 + 3600


def columns(run: str, *options: str) -> str:
    """The history, one row a line."""
    monitor = "other" if "other" in options else None
    try:
        history = read_run(run, monitor=monitor, allow_truncated="--allow-truncated" in options)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}\n"
    mix = history.optimizer
    about = {"unit": history.unit, "confidence": history.confidence, "kind": mix and mix.kind}
    lines = [f"# {about}", ",".join(history)]
    lines += [
        ",".join(map(repr, row))
        for row in zip(*(v.tolist() for v in history.values()), strict=True)
    ]
    return "\n".join(lines) + "\n"


def tab(run: str) -> str:
    """What the page in TensorBoard is sent."""
    multiplexer = EventMultiplexer(size_guidance={"tensors": 1000, "scalars": 1000})
    multiplexer.AddRun(run, run)
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, ".")
    plugin = NoiseScalePlugin(TBContext(data_provider=provider, logdir="."))
    apps = plugin.get_plugin_apps()
    runs = Client(apps["/runs"]).get("/runs").json or []
    asked = {"runs": runs}
    for each in runs:
        one = Client(apps["/prediction"]).get("/p?" + each["id"]).json
        compared = Client(apps["/comparison"]).get("/c", query_string={"of": each["id"]}).json
        for name, found in {each["id"]: one, f"{each['id']} compared": compared}.items():
            drawn = [figure["id"] for figure in found.pop("figures", [])]  # as in page.html
            asked[name] = {**found, "settings": None, "dark": None, "figures": drawn}
    return json.dumps(asked, indent=1, ensure_ascii=False)


def page(*words: str) -> str:
    """What a command prints that writes a report, and the report without plotly's script."""
    made = command(*words, "--html", "report.html")
    report = Path("report.html")
    if report.exists():
        made += (
            report.read_text()
            .replace(packed_plotly(), "PLOTLY")
            .replace(drawing_script(), "DRAWING")
            .replace("</", "\n</")
        )
        made = re.sub(r"<style>.*?</style>", "STYLE", made, flags=re.DOTALL)
        report.unlink()
    return re.sub(r"noisescale [\w.]+, plotly [\w.]+", "VERSIONS", made)


def of_sweep(name: str) -> Made:
    """A finished sweep, shown again; its files, written again; and what others make of these."""
    words = ["--goal", "val_loss<=0.35", "--batch-sizes", "8,32,128,512", "--trials", "4"]
    words += ["--repeats", "2", "--epochs", "20", "--accelerator", "cpu"]
    words += ["--search", "learning_rate=0.05..2"]
    with chdir(name):
        for written in ("sweep.csv", "trials.csv"):
            Path("sweep", written).unlink()
        yield "sweep.txt", command("sweep", "targets.py:make", *words)
        yield "sweep.json", command("sweep", "targets.py:make", *words, "--json")
        for written in ("sweep.csv", "trials.csv"):
            yield written, Path("sweep", written).read_text()
        yield "status.txt", command("status", "--storage", "sweep/sweep.journal")
        yield "status.json", command("status", "--storage", "sweep/sweep.journal", "--json")
        yield "tasks.json", tasks("sweep/sweep.journal")
        yield "fit.txt", command("fit", "sweep/sweep.csv")
        yield "fit.json", command("fit", "sweep/sweep.csv", "--json")
        swept = ("compare", "sweep/trials.csv", "--goal", "val_loss<=0.4")
        yield "compare.txt", command(*swept, "--details", "--by", "steps")
        yield "compare.json", command(*swept, "--json")
        yield "compare.html", page(*swept)
        resolved = str(INPUTS / "each_step")
        said = command("predict", resolved, "--sweep", "sweep/sweep.csv", "--details")
        yield "calibrated.txt", said.replace(resolved, "RESOLVED")


def tasks(journal: str) -> str:
    """What the search wanted at each number of results: its tasks, as workers get them."""
    from noisescale.lab.jobs.known_jobs import job_from
    from noisescale.lab.jobs.ledger import Ledger

    ledger = Ledger.open(journal, None)
    job = job_from(ledger.job)
    found, known = [], {}
    for entry in (each for each in ledger.entries().values() if each.result):
        tasks = [(t.key, t.spec) for t in job.next_tasks(known)]
        found.append({"known": len(known), "wanted": tasks}
                     if ledger.job["kind"] == "sweep" else {"known": len(known)})  # fmt: skip
        known[entry.key] = entry
    return json.dumps({"job": ledger.job, "tasks": found}, indent=1)


def of_tune(name: str) -> Made:
    """A finished search, shown again, and its files, written again."""
    words = ["--metric", "val_loss", "--trials", "12", "--epochs", "3", "--accelerator", "cpu"]
    words += ["--search", "learning_rate=0.02..2", "--search", "batch_size=16..256"]
    words += ["--search", "width=8..64"]
    with chdir(name):
        kept = [each.name for each in Path("tune").glob("*.csv")]
        for written in kept:
            Path("tune", written).unlink()
        yield "tune.txt", command("tune", "targets.py:make", *words)
        yield "tune.json", command("tune", "targets.py:make", *words, "--json")
        yield "tune.html", page("tune", "targets.py:make", *words)
        for written in kept:
            yield written, Path("tune", written).read_text()
        yield "status.txt", command("status", "--storage", "tune/tune.journal")
        yield "status.json", command("status", "--storage", "tune/tune.journal", "--json")
        yield "tasks.json", tasks("tune/tune.journal")


def of_branch(name: str) -> Made:
    """What a prediction makes of finished branches."""
    with chdir(name):
        words = ("predict", "run", "--branches", "branches.json")
        yield "predict.txt", command(*words, "--details")
        yield "predict.json", command(*words, "--json")
        yield "page.html", page(*words)
        again = ("branch", "run", "saved", "targets.py:make", "--batch-sizes", "1x,4x,16x")
        again = (*again, "--orders", "2", "--loss-examples", "1400", "--accelerator", "cpu")
        yield "branch.txt", command(*again)
        yield "branch.json", command(*again, "--json")


def of_profile(name: str) -> Made:
    """Step times of a file in a prediction."""
    with chdir(name):
        shutil.copytree("../plain", "run")
        words = ("predict", "run", "--step-times", "step_times.csv")
        yield "predict.txt", command(*words, "--details")
        yield "predict.json", command(*words, "--json")


def of_trials(name: str) -> Made:
    """A comparison of two optimizers from folders of runs, and a second run."""
    goal = ("--goal", "accuracy>=0.85", "--by", "steps")
    with chdir(name):
        yield "compare.txt", command("compare", "sgd", "adamw", *goal, "--details")
        yield "compare.json", command("compare", "sgd", "adamw", *goal, "--json")
        yield "compare.html", page("compare", "sgd", "adamw", *goal)
        yield "runs.txt", command("predict", "sgd")
        yield "runs.json", command("predict", "sgd", "--json")
        words = ("predict", "sgd/64-0.2", "--second-run", "sgd/256-0.8", "--goal", "accuracy=0.85")
        yield "second_run.txt", command(*words, "--details")
        yield "second_run.json", command(*words, "--json")


def of_states(name: str) -> Made:
    """States of checkpoints; and what a fit that goes on from them leaves, as far as it is sure."""
    from goldens.targets import Classifier, digits
    from lightning.pytorch import Trainer

    from noisescale import BatchSizeScheduler, NoiseScaleMonitor

    monitor = NoiseScaleMonitor(groups={"first": ["net.0.*"]})
    scheduler = BatchSizeScheduler(policy="tradeoff", max_batch_size=512)
    saved = torch.load(Path(name, "callbacks.pt"), weights_only=True)
    for each in (monitor, scheduler):
        state = next(state for key, state in saved.items() if key.startswith(type(each).__name__))
        yield f"{type(each).__name__}.saved.json", as_json(state)
        each.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator="cpu", max_steps=4, callbacks=[monitor, scheduler], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0,
        ).fit(Classifier(), *digits(8))  # fmt: skip
    for each in (monitor, scheduler):
        yield f"{type(each).__name__}.shape.json", as_json(shape_of(each.state_dict()))
    yield "estimate.txt", f"{monitor.noise_scale.value:.2g}, {len(monitor.history['step'])} rows\n"


def shape_of(state: Any) -> Any:
    """Types in place of values."""
    if isinstance(state, dict):
        return {str(name): shape_of(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [type(state).__name__, *({json.dumps(shape_of(each)): 0 for each in state})]
    return f"{state.dtype}" if isinstance(state, torch.Tensor) else type(state).__name__


def as_json(state: Any) -> str:
    """Tensors as lists, with what they are."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor | np.ndarray):
            return {"of": str(value.dtype), "shape": list(value.shape), "is": value.tolist()}
        return repr(value)

    return json.dumps(state, indent=1, default=plain, sort_keys=True)


OTHERS: dict[str, Callable[[str], Made]] = {
    "sweep": of_sweep,
    "tune": of_tune,
    "branch": of_branch,
    "profile": of_profile,
    "trials": of_trials,
    "states": of_states,
}
NAMES = [*RUNS, *OTHERS]


def made_of(name: str) -> dict[str, str]:
    """All that is made of one input, in a copy of it."""
    sys.modules.pop("targets", None)  # each folder has its own
    with tempfile.TemporaryDirectory() as folder:
        for needed in {name, "plain"}:  # `profile` needs it
            shutil.copytree(INPUTS / needed, Path(folder, needed))
        shutil.copy(HERE / "targets.py", Path(folder, name))
        for second, file in enumerate(sorted(Path(folder).rglob("*"))):
            os.utime(file, (1.8e9 + second,) * 2)  # runs are sorted by time
        with chdir(folder), mock.patch.dict(os.environ, {"COLUMNS": "100", "TERM": "dumb"}):
            return dict(OTHERS.get(name, of_run)(name))


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
