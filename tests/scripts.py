# SPDX-License-Identifier: Apache-2.0
"""Examples and benchmarks, run as their readers run them."""

import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent


def printed(script: str | Path, *options: object, cwd: Path = ROOT) -> str:
    """What a script prints, in a fork: what it imports is there already."""
    words = [str(ROOT / script), *map(str, options)]
    with tempfile.TemporaryFile("w+") as output:
        process = get_context("fork").Process(target=as_main, args=(output, words, cwd))
        process.start()
        process.join(280)
        process.kill()
        process.join()
        output.seek(0)
        said = output.read()
    assert process.exitcode == 0, said
    return said


def as_main(output: IO[str], words: list[str], cwd: Path) -> None:
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = output, output
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    os.chdir(cwd)
    warnings.simplefilter("default")
    runpy.run_path(words[0], run_name="__main__")


def run(*arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,  # some forty seconds where nothing else runs
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout
