# SPDX-License-Identifier: Apache-2.0
"""`noisescale compare RUNS... --goal METRIC<=VALUE`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisescale.cli.values import flags_of
from noisescale.extras import need
from noisescale.printable import printable, printable_json
from noisescale.refusal import Refusal, renamed

if TYPE_CHECKING:
    from noisescale.history.metrics import Goal
    from noisescale.lab.compare.measurements import Trial

EXAMPLE = 'noisescale compare runs/sgd runs/adam --goal "val_loss<=0.15"'

_CLOCKS = {"hours": "seconds"}


def compare_runs(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS",
            help="Folders of TensorBoard or CSVLogger runs, W&B's or other CSV files, or sweeps."
            " Each is a submission, and the runs below it are its trials. Of one folder alone each"
            " folder in it, or each run, is a submission.",
        ),
    ],
    goal: Annotated[
        list[str],
        typer.Option(
            metavar="GOAL",
            help="The result to reach, for example val_loss<=0.15, or val_acc>0.9: < and > leave"
            ' the value itself out. For several workloads once for each: "mnist: val_loss<=0.15".',
        ),
    ],
    by: Annotated[
        str | None,
        typer.Option(
            help="What counts: steps, examples, epochs or hours. Default: hours if they are known,"
            " else steps."
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="What a run may take at most, for example epochs=10 or hours=2.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Submission that the others are compared with. Default: the first."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PAIR",
            help="Held-out variant of a workload, which checks it: wmt_glu_tanh=wmt.",
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Coverage of the bounds.")] = 0.95,
    details: Annotated[
        bool, typer.Option("--details", help="Also print the batch sizes and every run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with figures to this file.")
    ] = None,
) -> None:
    """Compare when runs reached a result: in steps, examples and hours."""
    from rich.console import Console

    from noisescale.lab.compare.comparison import compare
    from noisescale.lab.compare.comparison_records import comparison_as_dict
    from noisescale.lab.compare.document import document_of
    from noisescale.report.text import text_of

    if html is not None:
        need("plotly", "`--html`")
    goals = _goals(goal)
    clock = _clock(by)
    flags = flags_of(compare_runs) | {"clock": "--by", "variants": "--variant", "goals": "--goal"}
    with renamed(flags):
        found = compare(
            _trials(runs, goals),
            goals.get("", goals),
            clock=clock,
            budget=_budget(budget or ()),
            reference=reference,
            variants=dict(_pair("variant", text) for text in variant or ()),
            confidence=confidence,
        )
    if html is not None:
        from noisescale.report.page import write_page

        with renamed({"path": "--html"}):
            write_page(document_of(found), html)
    if as_json:
        record = comparison_as_dict(found)
        print(printable_json(json.dumps(record, indent=2, ensure_ascii=False)))
    else:
        shown = text_of(document_of(found), details=details, more="add --details")
        Console(highlight=False).print(shown)
        if html is not None:
            print(f"Report: {printable(html)}")
    if not found.reached:
        raise typer.Exit(1)


def _clock(by: str | None) -> str | None:
    """Return the clock of an option. What is measured in seconds is called hours there.

    Raises:
        ValueError: If there is no such clock.
    """
    if by not in (None, "steps", "examples", "epochs", "seconds", *_CLOCKS):
        raise Refusal(
            "--by", "be steps, examples, epochs or hours", repr(by), "Choose one of these."
        )
    return _CLOCKS.get(by or "", by)


def _goals(texts: Sequence[str]) -> dict[str, Goal]:
    """Return the goal of each workload; of all workloads under ""."""
    from noisescale.history.metrics import Goal

    goals: dict[str, Goal] = {}
    with renamed({"goal": "--goal"}):
        for text in texts:
            workload, _, rest = text.rpartition(":")
            workload = workload.strip()
            if workload in goals:
                named = f"for {printable(workload)}" if workload else "without a workload"
                raise Refusal(
                    "--goal",
                    "be given once for each workload",
                    f"two {named}",
                    'Write each as "workload: metric<=value".',
                )
            goals[workload] = Goal.read(rest)
    if "" in goals and len(goals) > 1:
        raise Refusal(
            "--goal",
            f"name a workload in each of {len(goals)} goals",
            f"one without, for {printable(goals[''])}",
            'Write it as "workload: metric<=value".',
        )
    return goals


def _budget(texts: Sequence[str]) -> dict[str, float]:
    budget: dict[str, float] = {}
    for name, value in (_pair("budget", text) for text in texts):
        try:
            most = float(value)
        except ValueError:
            raise Refusal(
                "--budget",
                "be a number of steps, examples, epochs or hours",
                repr(value),
                "Write, for example, steps=1000.",
            ) from None
        clock = _CLOCKS.get(name, name)
        if clock in budget:
            raise Refusal(
                "--budget",
                "be given once for each unit",
                f"two limits of {clock}",
                "Leave one out.",
            )
        budget[clock] = most * 3600 if name == "hours" else most
    return budget


def _pair(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        example = {"budget": "epochs=10", "variant": "wmt_glu_tanh=wmt"}[option]
        raise Refusal(
            f"--{option}", "be written as name=value", repr(text), f"Write, for example, {example}."
        )
    return name.strip(), value.strip()


def _trials(runs: Sequence[Path], goals: Mapping[str, Goal]) -> list[Trial]:
    """Return the trials of all runs, each with its submission and its workload."""
    from noisescale.lab.compare.reading import read_trials

    _refuse_repeated(runs)
    names = _names(runs)
    trials: list[Trial] = []
    for metric in dict.fromkeys(goal.metric for goal in goals.values()):
        with renamed({"goal": "--goal"}):
            found = [
                trial
                for run, name in zip(runs, names, strict=True)
                for trial in read_trials(run, metric, submission=name)
            ]
        if len(runs) == 1:
            found = _apart(found, names[0], runs[0], metric, goals)
        of = goals.get("")
        placed = [replace(trial, workload=_workload(trial, goals)) for trial in found]
        if len(runs) > 1:  # names are unique within one of them
            placed = [replace(t, name=f"{t.submission}/{t.name}") for t in placed]
        trials += [t for t in placed if (of or goals[t.workload]).metric == metric]
    return trials


def _refuse_repeated(runs: Sequence[Path]) -> None:
    """A run that is given twice would count as a repetition, or as two submissions."""
    seen: dict[Path, Path] = {}
    for run in runs:
        before = seen.setdefault(run.resolve(), run)
        if before is not run:
            raise Refusal(
                "RUNS",
                "be different folders or files",
                f"{printable(before)} and {printable(run)}, which are the same",
                "Leave one of them out.",
            )


def _names(runs: Sequence[Path]) -> list[str]:
    """Return a name for each path: its last part, or all of it where that is not unique."""
    last = [run.resolve().name for run in runs]
    return [
        name if last.count(name) == 1 else str(run) for run, name in zip(runs, last, strict=True)
    ]


def _apart(
    trials: Sequence[Trial], name: str, path: Path, metric: str, workloads: Collection[str]
) -> list[Trial]:
    """Return the trials of one folder or file: its folders are submissions, or its runs are.

    Runs that lie beside each other at several batch sizes are one sweep, or one of each optimizer:
    runs of two optimizers are no repetitions.
    """
    from noisescale.lab.compare.reading import read_trials

    if any(trial.submission != name for trial in trials):
        return list(trials)  # the file says them
    parts = [Path(trial.name).parts for trial in trials]
    apart = [tuple(part for part in each if part not in workloads) for each in parts]
    if path.is_dir() and apart != parts and all(apart):  # folders of workloads come first
        return [replace(t, submission=each[0]) for t, each in zip(trials, apart, strict=True)]
    if path.is_dir() and len({part[0] for part in parts}) > 1 and min(map(len, parts)) > 1:
        return [replace(t, submission=part[0]) for t, part in zip(trials, parts, strict=True)]
    sizes = {trial.batch_size for trial in trials}
    if len(sizes) > 1 and not any(map(math.isnan, sizes)):
        optimizers = [trial.submission for trial in read_trials(path, metric)]
        if len(set(optimizers)) < 2 or not all(optimizers):
            return list(trials)
        return [replace(t, submission=o) for t, o in zip(trials, optimizers, strict=True)]
    return [replace(trial, submission=trial.name) for trial in trials]


def _workload(trial: Trial, goals: Mapping[str, Goal]) -> str:
    """Return the workload that a trial's file, or its path, names."""
    if "" in goals or trial.workload in goals:
        return trial.workload
    if trial.workload:
        raise Refusal(
            "--goal",
            f"have one for the workload {trial.workload!r} of {printable(trial.name)}",
            f"goals for {', '.join(map(printable, goals))}",
            "Give its goal too.",
        )
    path = {trial.submission, *Path(trial.name).parts}
    found = [workload for workload in goals if workload in path]
    if len(found) == 1:
        return found[0]
    raise Refusal(
        "--goal",
        "name the workload of each run",
        f"{', '.join(map(printable, goals))} for {printable(trial.name)}",
        "Put its runs in a folder with the name of a workload, or give one goal for all.",
    )
