# SPDX-License-Identifier: Apache-2.0
"""What a fork of the server does, see `warm`. To the training it is a process of its own."""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import weakref
from multiprocessing import connection
from pathlib import Path
from typing import Any

from noisescale.lab.jobs.trial_process import PRINTED

LOOK = 2.0
"""Seconds between two looks at whether the server is alive."""


def tell_why_not(told: connection.Connection) -> None:
    """Tell the worker why no training may be forked from the server."""
    from noisescale.lab.jobs.preload import WHY_NOT

    told.send(WHY_NOT)
    if WHY_NOT:  # nothing is ever forked from the server
        os.kill(os.getppid(), signal.SIGTERM)


def train_forked(folder: str) -> None:
    """Train the task in a folder, as `python -m noisescale.lab.jobs.trial` does, and exit."""
    _end_with(multiprocessing.parent_process())
    with (Path(folder) / PRINTED).open("wb") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    multiprocessing.set_start_method(None, force=True)  # not the one that made this process
    multiprocessing.current_process().name = "MainProcess"
    # A script may ask for it, to tell a training from a worker of a loader. Typeshed has it not.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    import numpy as np
    from torch.utils.data import _utils

    # From Python 3.13 on a fork of a fork server has lost what was registered for its exit. What
    # other packages than these register there is lost. To register twice does no harm.
    finalize: Any = weakref.finalize
    for at_exit in (logging.shutdown, finalize._exitfunc, _utils._set_python_exit_flag):
        atexit.register(at_exit)
    np.random.seed()  # else all forks have the server's state; Python does so for its own
    sys.argv[1:] = [folder]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    code: Any = 0
    try:
        runpy.run_module("noisescale.lab.jobs.trial", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    _exit(code)


def _exit(code: Any) -> None:
    """Exit as an interpreter does, and not as a fork: `atexit` runs, and open files are flushed."""
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def _end_with(worker: Any) -> None:
    """End this process if the worker ends, or the server: nobody would hear of the result."""
    server = os.getppid()

    def watch() -> None:
        while not connection.wait([worker.sentinel], LOOK) and os.getppid() == server:
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
