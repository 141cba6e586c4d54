# SPDX-License-Identifier: Apache-2.0
"""The command line, called in this process as its script calls it."""

import functools
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

import pytest
import typer.main

from noisescale.cli.app import main

command_of = functools.cache(typer.main.get_command)
"""The commands are read from their functions once, not at each call: that takes half of it."""


def ended(*arguments: Any) -> tuple[int, str, str]:
    """The program's exit code, output and errors."""
    words = ["noisescale", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(typer.main, "get_command", command_of),
        redirect_stdout(io.StringIO()) as output,
        redirect_stderr(io.StringIO()) as errors,
        pytest.raises(SystemExit) as exited,
    ):
        main()
    assert isinstance(exited.value.code, int)
    return exited.value.code, output.getvalue(), errors.getvalue()


def run(*arguments: Any) -> str:
    """The output of a command that succeeds and says nothing else."""
    code, output, errors = ended(*arguments)
    assert (code, errors) == (0, "")
    return output


def refused(*arguments: Any) -> str:
    """The one line that a refusal ends with."""
    code, output, errors = ended(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("noisescale: ")
    assert errors.endswith("\n")
    assert errors[:-1].isprintable()
    return errors.removeprefix("noisescale: ")[:-1]
