# SPDX-License-Identifier: Apache-2.0
"""`noisescale compare RUNS... --goal METRIC<=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Details, Html, Json, show
from noisescale.refusal import Refusal

EXAMPLE = 'noisescale compare runs/sgd runs/adam --goal "val_loss<=0.15"'


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


def _budget(texts: Sequence[str] | None) -> dict[str, float]:
    """Return the limit of each unit."""
    budget: dict[str, float] = {}
    for name, value in (_pair("budget", text) for text in texts or ()):
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
            f"--{option}", "be written as name=value", repr(text), f"Write, for example, {example}."
        )
    return name.strip(), value.strip()


@command_from(
    "compare",
    {
        "runs": Given(
            list[Path],
            "Folders of TensorBoard or CSVLogger runs, W&B's or other CSV files, or sweeps. Each is"
            " a submission, and the runs below it are its trials. Of one folder alone each folder"
            " in it, or each run, is a submission.",
        ),
        "goal": Given(
            list[str],
            "The result to reach, for example val_loss<=0.15, or val_acc>0.9: < and > leave the"
            ' value itself out. For several workloads once for each: "mnist: val_loss<=0.15".',
            metavar="GOAL",
            read=_goals,
        ),
        "by": "What counts: steps, examples, epochs or hours. Default: hours if they are known,"
        " else steps.",
        "budget": Given(
            list[str],
            "What a run may take at most, for example epochs=10 or hours=2.",
            metavar="LIMIT",
            read=_budget,
        ),
        "variants": Given(
            list[str],
            "Held-out variant of a workload, which checks it: wmt_glu_tanh=wmt.",
            flag="--variant",
            metavar="PAIR",
            read=lambda texts: dict(_pair("variant", text) for text in texts or ()),
        ),
    },
    positional="runs",
)
def compare_runs(
    values: Values, details: Details = False, as_json: Json = False, html: Html = None
) -> None:
    """Compare when runs reached a result: in steps, examples and hours."""
    from noisescale.lab.compare.compare import compare

    found = compare(**values)
    show(found, details=details, as_json=as_json, html=html)
    if not found.reached:
        raise typer.Exit(1)
