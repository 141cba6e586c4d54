# SPDX-License-Identifier: Apache-2.0
"""`noisescale compare RUNS... --goal METRIC<=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.showing import check_html, show
from noisescale.cli.values import flags_of
from noisescale.refusal import Refusal, rename_arguments

EXAMPLE = 'noisescale compare runs/sgd runs/adam --goal "val_loss<=0.15"'


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
    from noisescale.lab.compare.compare import compare

    check_html(html)
    names = {"runs": "RUNS", "goal": "--goal", "variants": "--variant"}
    with rename_arguments(flags_of(compare_runs) | names):
        found = compare(
            runs,
            _goals(goal),
            by=by,
            budget=_budget(budget or ()),
            reference=reference,
            variants=dict(_pair("variant", text) for text in variant or ()),
            confidence=confidence,
        )
    show(found, details=details, as_json=as_json, html=html)
    if not found.reached:
        raise typer.Exit(1)


def _goals(texts: Sequence[str]) -> dict[str, str]:
    """Return the text of each workload's goal; of a goal for all workloads under ""."""
    goals: dict[str, str] = {}
    for text in texts:
        workload, _, goal = text.rpartition(":")
        workload = workload.strip()
        if workload in goals:
            raise Refusal(
                "goal",
                "be given once for each workload",
                f"two {f'for {workload}' if workload else 'without a workload'}",
                'Write each as "workload: metric<=value".',
            )
        goals[workload] = goal
    return goals


def _budget(texts: Sequence[str]) -> dict[str, float]:
    """Return the limit of each unit."""
    budget: dict[str, float] = {}
    for name, value in (_pair("budget", text) for text in texts):
        if name in budget:
            raise Refusal(
                "budget", "be given once for each unit", f"two limits of {name}", "Leave one out."
            )
        try:
            budget[name] = float(value)
        except ValueError:
            raise Refusal(
                "budget",
                "be a number of steps, examples, epochs or hours",
                repr(value),
                "Write, for example, steps=1000.",
            ) from None
    return budget


def _pair(option: str, text: str) -> tuple[str, str]:
    """Return the name and the value of "name=value"."""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        example = {"budget": "epochs=10", "variant": "wmt_glu_tanh=wmt"}[option]
        raise Refusal(
            option, "be written as name=value", repr(text), f"Write, for example, {example}."
        )
    return name.strip(), value.strip()
