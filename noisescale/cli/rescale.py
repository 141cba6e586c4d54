# SPDX-License-Identifier: Apache-2.0
"""`noisescale rescale RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Details, Json, show
from noisescale.refusal import Refusal, rename_arguments

EXAMPLE = "noisescale rescale lightning_logs/version_0 --batch-size 4096"

_OLD = "Settings at the old batch size"


@command_from(
    "rescale",
    {
        "run": Given(
            Path,
            "Run with a monitor: its batch size, learning rate, noise scale and optimizer are"
            " read. Without one they are given.",
            default=None,
        ),
        "optimizer": "sgd, momentum, adam or muon. Default: that of the run.",
        "learning_rate": "Default: the run's largest one.",
        "momentum": "Momentum of SGD or Muon.",
        "eps": "Of Adam.",
        "weight_decay": "Weight decay.",
    },
    positional="run",
    panels={_OLD: "learning_rate momentum eps weight_decay ema_decay warm_up_steps steps"},
    without="betas",
)
def show_rescale(
    values: Values,
    beta1: Annotated[float | None, typer.Option(help="Of Adam.", rich_help_panel=_OLD)] = None,
    beta2: Annotated[float | None, typer.Option(help="Of Adam.", rich_help_panel=_OLD)] = None,
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Say which learning rate to set at another batch size, by named rules."""
    from noisescale.rules.rescale import rescale

    if (beta1 is None) != (beta2 is None):
        raise Refusal(("beta1", "beta2"), "be given together", "one of both", "Give both.")
    betas = None if beta1 is None or beta2 is None else (beta1, beta2)
    with rename_arguments({"betas": "--beta1 --beta2"}):
        show(rescale(**values, betas=betas), details=details, as_json=as_json)
