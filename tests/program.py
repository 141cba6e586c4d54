# SPDX-License-Identifier: Apache-2.0
"""The command line in a process of its own."""

import subprocess
import sys
from typing import Any

PROGRAM = "import sys; from noisescale.cli import main; main()"


def run(*arguments: Any, code: int = 0) -> tuple[str, str]:
    """The program's output and errors."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def refused(*arguments: Any) -> str:
    """The one line that a refusal ends with."""
    output, errors = run(*arguments, code=2)
    assert output == ""
    assert errors.count("\n") == 1, errors
    return errors.removeprefix("noisescale: ").rstrip("\n")
