# SPDX-License-Identifier: Apache-2.0
"""`noisescale tune TARGET --search learning_rate=0.001..1 --metric val_loss --budget 1h`."""

from __future__ import annotations

import typer

from noisescale.checks import require_folder_of
from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Html, Json, show
from noisescale.cli.training import TRAINED, TRAINER
from noisescale.extras import need
from noisescale.lab.jobs.live import BY_WORKERS, WORKERS, in_sight
from noisescale.refusal import rename_arguments

EXAMPLE = (
    "noisescale tune train.py:make --search learning_rate=0.001..1 --search batch_size=16..1024"
    " --metric val_loss --budget 1h"
)


@command_from(
    "tune",
    {
        **TRAINED,
        **BY_WORKERS,
        "search": Given(
            list[str],
            "A parameter to search, and its values, for example learning_rate=0.001..1,"
            " batch_size=16..1024, dropout=0..0.5:linear or act=relu,tanh. learning_rate,"
            " batch_size, weight_decay, momentum, epochs and steps are those of the training. All"
            " others are arguments of TARGET. Kinds: log, linear, logit, momentum, int, pow2."
            " May be repeated.",
            metavar="VALUES",
            read=lambda texts: texts or (),
        ),
        "output": "Folder of the results.",
        "storage": Given(str, metavar="PLACE"),
    },
    positional="target",
    panels={
        "How long a training is": "epochs steps",
        "What a noise scale knows of it": "noise_scale run",
        **TRAINER,
        **WORKERS,
    },
)
def tune_parameters(values: Values, as_json: Json = False, html: Html = None) -> None:
    """Search parameters for the best result at each cost, by CARBS.

    The same command goes on where it was stopped, also with a larger budget.
    """
    for package in ("optuna", "sklearn"):
        need(package, "`noisescale tune`", extra="tune")
    if html is not None:
        require_folder_of("--html", html)
    from noisescale.lab.tune.tune import JOURNAL, tune

    values["storage"] = values["storage"] or str(values["output"] / JOURNAL)
    with rename_arguments({"goal": "--metric"}), in_sight(values["storage"]) as progress:
        found = tune(**values, progress=progress)
    show(found, as_json=as_json, html=html)
    if found.front.best is None:
        raise typer.Exit(1)
