# SPDX-License-Identifier: Apache-2.0
"""Examples, benchmarks and commands, run as their users run them."""

import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context, set_start_method
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# A fork of this process could die: gRPC has threads here once a search was stored through it.
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "pytorch_lightning", "lightning.pytorch", "sklearn.datasets", "noisescale"]
)


def printed(*words: object, cwd: Path = ROOT) -> str:
    """What a program prints that ends with code 0; its words are a script's, or `-m` and others.

    The program is a fork of a server that has imported torch and Lightning, and so are the Python
    programs that it starts.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        with started(*words, cwd=cwd, output=output.name) as process:
            process.join(280)
        said = output.read()
    assert process.exitcode == 0, said
    return said


@contextmanager
def started(*words: object, cwd: Path, output: str | Path) -> Iterator[ForkServerProcess]:
    """Let such a program print into a file; it is killed at the end."""
    process = SERVER.Process(target=as_main, args=(output, list(map(str, words)), cwd))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def as_main(file: str | Path, words: list[str], cwd: Path) -> None:
    output = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    set_start_method(None, force=True)
    os.chdir(cwd)
    run_main(words)


def run_main(words: list[str]) -> None:
    """Run a script, or `-m` and a module, as the program of this process."""
    # As long as the process.
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    subprocess.Popen = Forked  # type: ignore[assignment,misc]  # for the program that runs here
    warnings.simplefilter("default")
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


class Forked(subprocess.Popen):  # type: ignore[type-arg]  # of texts or of bytes, as it is asked
    """A process; a Python program is a fork of this process, which has imported most of it.

    What exec would leave is left: files, handlers of signals, and the modules of the folder.
    """

    def __init__(self, args: str | Sequence[str], **options: Any) -> None:
        interpreter, *program = [args] if isinstance(args, str) else map(str, args)
        program = [word for word in program if word != "-u"]
        if interpreter == sys.executable and program and program[0] != "-c":
            run = partial(_after_fork, program, options.get("env"))
            options["preexec_fn"] = run
        super().__init__(args, **options)


def _after_fork(words: list[str], environment: dict[str, str] | None) -> None:
    code = 1
    try:
        _close_what_exec_closes()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()  # subprocess has disabled it
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").parent == Path.cwd():
                del sys.modules[name]
        run_main(words)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _close_what_exec_closes() -> None:
    """Objects of this process close these files again, so that their numbers stay taken."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the listing's own
            if number > 2 and number != null and not os.get_inheritable(number):
                os.dup2(null, number, inheritable=False)


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
