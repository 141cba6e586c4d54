# SPDX-License-Identifier: Apache-2.0
"""Examples and benchmarks, run as their readers run them."""

import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from multiprocessing import get_context, set_start_method
from pathlib import Path

ROOT = Path(__file__).parent.parent

# A fork of this process could die: gRPC has threads here once a search was stored through it.
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "pytorch_lightning", "noisescale"])


def printed(script: str | Path, *options: object, cwd: Path = ROOT) -> str:
    """What a script prints, in a fork of a server that has imported torch and Lightning."""
    words = [str(ROOT / script), *map(str, options)]
    with tempfile.NamedTemporaryFile("r") as output:
        process = SERVER.Process(target=as_main, args=(output.name, words, cwd))
        process.start()
        process.join(280)
        process.kill()
        process.join()
        said = output.read()
    assert process.exitcode == 0, said
    return said


def as_main(file: str, words: list[str], cwd: Path) -> None:
    output = open(file, "w", buffering=1)  # noqa: SIM115 - as long as the process
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = output, output
    set_start_method(None, force=True)
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
