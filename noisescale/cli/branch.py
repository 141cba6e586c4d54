# SPDX-License-Identifier: Apache-2.0
"""`noisescale branch RUN CHECKPOINT TARGET`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisescale.cli.targets import is_first, module_and_data, told_in_a_line
from noisescale.cli.values import flags_of
from noisescale.printable import printable, printable_json
from noisescale.renamed import renamed

if TYPE_CHECKING:
    from noisescale.prediction.branches import Branch

OF_THE_RUN = (
    "Branches have the module's own code and the optimizer's state, and the learning rate goes as"
    " it went in the run. Of the run's callbacks and Trainer settings they have those given here."
)

TOO_LARGE = (
    "`--max-device-batch-size` must fit in memory, got batches that do not. Branches that ended are"
    " kept. Give a smaller one: the rest is accumulated."
)


EXAMPLE = (
    "noisescale branch lightning_logs/version_0 lightning_logs/version_0/checkpoints train.py:make"
)

TRAINER = "Settings of the run's Trainer"


def branch_run(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a TensorBoard or CSVLogger run."),
    ],
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint of the run that branches start from. Of a folder of checkpoints, the"
            " one nearest to the middle of the run.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="package.module:name or file.py:name, of a function that returns a LightningModule"
            " and its data, or of a LightningModule (then give --data).",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="package.module:name or file.py:name, of a Dataset, DataLoader or"
            " LightningDataModule, or of a function that returns one."
        ),
    ] = None,
    batch_sizes: Annotated[
        str,
        typer.Option(
            help="Batch sizes of the branches: 4x is four times the run's, 512 is in examples. 1x"
            " checks that branches train as the run did."
        ),
    ] = "1x,4x,16x",
    until: Annotated[
        Path | None,
        typer.Option(
            help="Later checkpoint, whose loss the branches are to reach. Default: the latest."
        ),
    ] = None,
    orders: Annotated[
        int, typer.Option(help="Branches at each batch size, each with its own order of the data.")
    ] = 3,
    learning_rate: Annotated[
        str,
        typer.Option(
            help="How the learning rate follows the batch size: sqrt, linear, adascale, capped_sqrt"
            " or none. auto: sqrt for Adam; for SGD adascale, linear far below the noise scale."
        ),
    ] = "auto",
    loss_examples: Annotated[
        int, typer.Option(help="Examples that a loss is averaged over, the same ones each time.")
    ] = 2048,
    max_device_batch_size: Annotated[
        int | None,
        typer.Option(help="Most examples that fit on a device. Default: as many as in the run."),
    ] = None,
    gradient_clip_val: Annotated[
        float | None,
        typer.Option(help="As in the run, if it clipped.", rich_help_panel=TRAINER),
    ] = None,
    gradient_clip_algorithm: Annotated[
        str | None,
        typer.Option(help="As in the run, if it clipped.", rich_help_panel=TRAINER),
    ] = None,
    devices: Annotated[
        int, typer.Option(help="Devices on each node.", rich_help_panel=TRAINER)
    ] = 1,
    nodes: Annotated[
        int,
        typer.Option(
            help="Start the command on each node, as in training.", rich_help_panel=TRAINER
        ),
    ] = 1,
    accelerator: Annotated[
        str, typer.Option(help="As in the run.", rich_help_panel=TRAINER)
    ] = "auto",
    strategy: Annotated[str, typer.Option(help="As in the run.", rich_help_panel=TRAINER)] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="As in the run.", rich_help_panel=TRAINER)
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            help="File of the results. The same command with the same file goes on from there."
        ),
    ] = Path("branches.json"),
    monitor: Annotated[
        str | None, typer.Option(help="Name of the monitor, if it was given one.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it would cost, and train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the critical batch size by branches of a run at larger batch sizes."""
    from rich.console import Console

    from noisescale.history.reading import read_run
    from noisescale.lightning.branching.branching import train_branches
    from noisescale.lightning.branching.planning import plan_branches
    from noisescale.report.branches import Planned, branches_table, cost_lines, headline
    from noisescale.report.branches import as_json as json_of

    if not output.parent.is_dir():
        raise FileNotFoundError(
            f"`--output` must be in a folder that is there, got {printable(output)}. Make it first."
        )
    if dry_run and as_json:
        raise ValueError(
            "`--json` and `--dry-run` must not be combined: a dry run has no result. Leave one out."
        )
    flags = flags_of(branch_run) | {"rule": "--learning-rate"}
    with renamed(flags):
        history = read_run(run, monitor=monitor)
        branching = plan_branches(
            history,
            checkpoint,
            until=until,
            batch_sizes=batch_sizes.split(","),
            orders=orders,
            rule=learning_rate,
            devices=devices * nodes,
            max_device_batch_size=max_device_batch_size,
        )
    console = Console(stderr=True, highlight=False, quiet=not is_first())
    planned = [
        Planned(size, branching.steps_at(size), branching.factor(size))
        for size in (plan.batch_size for plan in branching.plans)
    ]
    steps = branching.checkpoint.step, branching.end
    for line in cost_lines(*steps, planned, orders, branching.device_hours(loss_examples)):
        console.print(line, markup=False)
    console.print(OF_THE_RUN, markup=False)
    module, examples = module_and_data(target, data)
    if dry_run:
        return
    status = console.status("Taking the losses of the run's checkpoints...")
    with _kept_if_interrupted(output), status, renamed(flags), told_in_a_line(TOO_LARGE):
        branched = train_branches(
            branching,
            module,
            examples,
            output,
            loss_examples=loss_examples,
            on_course=lambda found: console.print(
                f"The loss of the run: {found.course[0][1]:.4g} at step {found.start:,.0f},"
                f" {found.goal:.4g} at step {found.end:,.0f}, which branches are to reach.",
                markup=False,
            ),
            on_start=lambda plan, order: status.update(
                f"Branching at {plan.batch_size:,.4g}, order {order + 1} of {orders}..."
            ),
            on_branch=lambda one: console.print(
                f"{one.batch_size:,.4g}, order {one.order + 1}: loss {one.losses[-1]:.4g} after"
                f" {one.steps[-1]:,.0f} steps, {one.seconds:,.0f} s{_diverged(one)}",
                markup=False,
            ),
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=strategy,
            precision=precision,
        )
    if not is_first():
        return
    if as_json:
        print(printable_json(json_of(branched, history)))
        return
    answers = headline(branched, history)
    from noisescale.report.text import Section, listed, pairs

    out = Console(highlight=False)
    out.print(pairs(answers), Section(branches_table(branched)), sep="\n")
    if branched.doubts:
        out.print(*listed("Warnings", branched.doubts, "! ", "bold"), sep="\n")
    said = f"Next: noisescale predict {printable(run)} --branches {printable(output)}"
    console.print(said, markup=False, soft_wrap=True)


def _diverged(branch: Branch) -> str:
    """At which learning rates it was tried before, if at any."""
    if not branch.diverged_at:
        return ""
    tried = ", ".join(f"{factor:.3g}" for factor in branch.diverged_at)
    return f"; learning rate x {branch.learning_rate_factor:.3g}, as it diverged at x {tried}"


@contextmanager
def _kept_if_interrupted(output: Path) -> Iterator[None]:
    """Say what ctrl-C leaves behind."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stopped:
        interrupted = isinstance(stopped, KeyboardInterrupt) or stopped.code == 1
        if interrupted and output.exists() and is_first():
            print(
                f"noisescale: stopped. Branches that ended are in {printable(output)}: the same"
                " command goes on from there.",
                file=sys.stderr,
            )
        raise
