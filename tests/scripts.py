# SPDX-License-Identifier: Apache-2.0
"""Examples and benchmarks, run as their readers run them."""

import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
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


def helps(scripts: Sequence[Path]) -> list[str]:
    """What each script prints for `--help`, one after another in one fork: imports are shared."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.txt") for number in range(len(scripts))]
        process = SERVER.Process(target=print_helps, args=(scripts, files))
        process.start()
        process.join(280)
        process.kill()
        process.join()
        said = [file.read_text() if file.exists() else "" for file in files]
    assert process.exitcode == 0, next(filter(None, reversed(said)), "nothing was printed")
    return said


def print_helps(scripts: Sequence[Path], files: Sequence[Path]) -> None:
    path = list(sys.path)
    for script, file in zip(scripts, files, strict=True):
        sys.stdout = sys.stderr = file.open("w", buffering=1)
        sys.argv, sys.path[:] = [str(script), "--help"], [str(script.parent), *path]
        with suppress(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
        for name in [each for each in sys.modules if each.split(".")[0] == "benchmarks"]:
            del sys.modules[name]  # the next script has to find it by itself


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
