# SPDX-License-Identifier: Apache-2.0
"""`noisescale sweep TARGET --goal METRIC<=VALUE --batch-sizes 16..2048`."""

from __future__ import annotations

import typer

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Json, show
from noisescale.cli.training import TRAINED, TRAINER
from noisescale.extras import need
from noisescale.lab.jobs.live import BY_WORKERS, WORKERS, in_sight

EXAMPLE = 'noisescale sweep train.py:make --goal "val_loss<=0.15" --batch-sizes 16..2048'


@command_from(
    "sweep",
    {
        **TRAINED,
        **BY_WORKERS,
        "goal": Given(metavar="GOAL"),
        "batch_sizes": "Global batch sizes: 16..2048 for powers of two, or a list such as"
        " 16,64,256.",
        "search": Given(
            list[str],
            "Hyperparameter to search, and its range, for example momentum=0.5..0.99:"
            " learning_rate, momentum (for Adam its first beta) or weight_decay. May be repeated."
            " The learning rate is always searched, by default from 1/8 to 8 times the module's"
            " own.",
            metavar="RANGE",
            read=lambda texts: texts or (),
        ),
        "output": "Folder of the results.",
        "storage": Given(str, metavar="PLACE"),
    },
    positional="target",
    panels={
        "The search at each batch size": "search trials repeats epochs seed",
        **TRAINER,
        **WORKERS,
    },
)
def sweep_batch_sizes(values: Values, as_json: Json = False) -> None:
    """Measure the steps to a result at several batch sizes, each with its best learning rate.

    The same command with the same storage goes on where it was stopped.
    """
    need("optuna", "`noisescale sweep`")
    from noisescale.lab.sweep.sweep import JOURNAL, sweep

    values["storage"] = values["storage"] or str(values["output"] / JOURNAL)
    with in_sight(values["storage"]) as progress:
        found = sweep(**values, progress=progress)
    show(found, as_json=as_json)
    if not found.reached:
        raise typer.Exit(1)
