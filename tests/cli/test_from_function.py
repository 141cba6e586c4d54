# SPDX-License-Identifier: Apache-2.0
"""Commands that are made from functions, and the functions themselves."""

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
import typer.main

import noisescale
from noisescale.cli.app import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined] # a group
MADE = sorted(COMMANDS.keys() & set(noisescale.__all__))


@pytest.mark.parametrize("name", MADE)
def test_an_option_has_the_default_of_its_argument(name: str) -> None:
    """A default that is an expression cannot be read: a command has none then, or repeats it."""
    options = {each.name: each for each in COMMANDS[name].params}
    shared = [
        (options[argument.name], argument.default)
        for argument in inspect.signature(getattr(noisescale, name)).parameters.values()
        if argument.name in options and argument.default is not argument.empty
    ]

    assert len(shared) >= 3
    for option, default in shared:
        assert not option.required
        assert (option.default or None) == (default or None), option.name


def test_texts_name_commands_and_options_that_exist() -> None:
    flags = {flag for command in COMMANDS.values() for each in command.params for flag in each.opts}
    texts = " ".join(each.help for command in COMMANDS.values() for each in command.params)

    named = {*re.findall(r"`noisescale (\w+)", texts)}
    assert {"fit", "profile", "work"} <= named <= COMMANDS.keys()
    assert {"--run", "--output", "--batches"} <= {*re.findall(r"--[\w-]+", texts)} <= flags
    assert {*re.findall(r"`(\w+)", texts)} == {"noisescale"}


def test_help_has_four_groups_of_commands_and_imports_nothing_large() -> None:
    words = ["-X", "importtime", "-m", "noisescale", "--help"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)

    groups = re.findall(r"^╭─ (.*?) ─*╮$", done.stdout, re.M)
    assert groups == ["Options", "Measure while training", "Predict", "Try many", "About runs"]
    imported = re.findall(r"\| +(\w+)$", done.stderr, re.M)
    assert "noisescale" in imported
    assert not {"numpy", "torch", "pytorch_lightning", "optuna"} & {*imported}
