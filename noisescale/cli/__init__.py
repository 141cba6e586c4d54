# SPDX-License-Identifier: Apache-2.0
"""The command line: `noisescale predict`, `fit`, `profile`.

A bad argument or file ends with one line that names it and its remedy, and exit code 2.
"""

from __future__ import annotations

import sys

import typer

from noisescale.cli import fit, predict, profile

app = typer.Typer(
    name="noisescale",
    help="What batch size to use, how sure that is, and what more devices would buy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("predict")(predict.predict_run)
app.command("fit")(fit.fit_sweep)
app.command("profile")(profile.profile_steps)


def main() -> None:
    """Run the command line; errors about values and files become one line and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"noisescale: {error}", file=sys.stderr)
        sys.exit(2)
