# SPDX-License-Identifier: Apache-2.0
"""`noisescale branch RUN CHECKPOINT TARGET`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Json, show
from noisescale.cli.training import TRAINED, TRAINER
from noisescale.lab.jobs.live import BY_WORKERS, WORKERS, interruptible
from noisescale.printable import printable

EXAMPLE = (
    "noisescale branch lightning_logs/version_0 lightning_logs/version_0/checkpoints train.py:make"
)


@command_from(
    "branch",
    {
        **TRAINED,
        **BY_WORKERS,
        "run": Given(Path, "Folder of a TensorBoard or CSVLogger run."),
    },
    positional="run checkpoint target",
    panels=TRAINER | WORKERS,
)
def branch_run(
    values: Values,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cost, and train nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the critical batch size by training branches of a run at larger batch sizes."""
    from rich.console import Console

    from noisescale.lab.branch.branch import branch, branch_cost
    from noisescale.user_code.targets import is_first, shorten_errors

    console = Console(stderr=True, highlight=False, quiet=not is_first())
    with shorten_errors():
        if dry_run:
            show(branch_cost(**values), as_json=as_json)
            return
        with console.status("Training branches..."), interruptible(values["output"]):
            found = branch(
                **values,
                progress=lambda line: console.print(printable(line), markup=False),
            )
    if is_first():
        show(found, as_json=as_json)
