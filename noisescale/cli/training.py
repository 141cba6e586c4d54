# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that train: the module, its data, and settings of the Trainer."""

from __future__ import annotations

from typing import Annotated

import typer

TRAINER = "Settings of the Trainer"

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A function that returns a LightningModule and its data, or a LightningModule."
        " Written as package.module:name or file.py:name.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="A Dataset, DataLoader or LightningDataModule, or a function that returns one of"
        " these. Written as package.module:name or file.py:name. Default: what TARGET returns, else"
        " the loaders that the module makes."
    ),
]
Devices = Annotated[int, typer.Option(help="Devices on each node.", rich_help_panel=TRAINER)]
Nodes = Annotated[
    int,
    typer.Option(
        help="Number of nodes. Start the command on each node, as in training.",
        rich_help_panel=TRAINER,
    ),
]
DevicesHere = Annotated[
    int, typer.Option(help="Devices of each training, on one machine.", rich_help_panel=TRAINER)
]
MaxDeviceBatchSize = Annotated[
    int | None,
    typer.Option(
        help="Most examples that fit on a device. Larger batches are accumulated.",
        rich_help_panel=TRAINER,
    ),
]
GradientClipVal = Annotated[
    float | None, typer.Option(help="As in training.", rich_help_panel=TRAINER)
]
GradientClipAlgorithm = Annotated[
    str | None, typer.Option(help="As in training.", rich_help_panel=TRAINER)
]
Accelerator = Annotated[str, typer.Option(help="As in training.", rich_help_panel=TRAINER)]
Strategy = Annotated[str, typer.Option(help="As in training.", rich_help_panel=TRAINER)]
Precision = Annotated[str | None, typer.Option(help="As in training.", rich_help_panel=TRAINER)]
