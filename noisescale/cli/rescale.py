# SPDX-License-Identifier: Apache-2.0
"""`noisescale rescale RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.showing import show
from noisescale.cli.values import flags_of
from noisescale.refusal import Refusal, rename_arguments

EXAMPLE = "noisescale rescale lightning_logs/version_0 --batch-size 4096"

_OLD = "Settings at the old batch size"


def show_rescale(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="Run with a monitor: its batch size, learning rate, noise scale and optimizer are"
            " read. Without one they are given.",
        ),
    ] = None,
    *,
    batch_size: Annotated[float, typer.Option(help="New batch size.")],
    from_batch_size: Annotated[
        float | None, typer.Option(help="Old batch size. Default: the run's last one.")
    ] = None,
    noise_scale: Annotated[
        float | None, typer.Option(help="Noise scale. Default: that of the whole run.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd, momentum, adam or muon. Default: that of the run."),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Default: the run's largest one.", rich_help_panel=_OLD),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(help="Momentum of SGD or Muon.", rich_help_panel=_OLD)
    ] = None,
    beta1: Annotated[float | None, typer.Option(help="Of Adam.", rich_help_panel=_OLD)] = None,
    beta2: Annotated[float | None, typer.Option(help="Of Adam.", rich_help_panel=_OLD)] = None,
    eps: Annotated[float | None, typer.Option(help="Of Adam.", rich_help_panel=_OLD)] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Weight decay.", rich_help_panel=_OLD)
    ] = None,
    ema_decay: Annotated[
        float | None,
        typer.Option(help="Decay of an average of the weights.", rich_help_panel=_OLD),
    ] = None,
    warm_up_steps: Annotated[
        float | None, typer.Option(help="Steps of the warm-up.", rich_help_panel=_OLD)
    ] = None,
    steps: Annotated[
        float | None, typer.Option(help="Steps of the training.", rich_help_panel=_OLD)
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Also print the assumptions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show what named rules would set at another batch size, and which one to take."""
    from noisescale.rules.rescale import rescale

    with rename_arguments(flags_of(show_rescale)):
        if (beta1 is None) != (beta2 is None):
            raise Refusal(("beta1", "beta2"), "be given together", "one of both", "Give both.")
        found = rescale(
            run,
            batch_size,
            from_batch_size=from_batch_size,
            noise_scale=noise_scale,
            optimizer=optimizer,  # type: ignore[arg-type]  # it names one that is not known
            learning_rate=learning_rate,
            momentum=momentum,
            betas=None if beta1 is None or beta2 is None else (beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            ema_decay=ema_decay,
            warm_up_steps=warm_up_steps,
            steps=steps,
        )
    show(found, details=details, as_json=as_json)
