# SPDX-License-Identifier: Apache-2.0
"""Compile the device once for each version of its source and of torch."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from filelock import FileLock

SOURCE = Path(__file__).with_name("device.cpp")
TORCH = Path(torch.__file__).parent


class CannotBuildError(RuntimeError):
    """There is no compiler, or it failed."""


def library() -> Path:
    """The compiled device, which takes half a minute where it is not there yet.

    Raises:
        CannotBuildError: If there is no C++ compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None:
        raise CannotBuildError("needs a C++ compiler: neither `c++` nor `g++` is on the path")
    command = [compiler, "-std=c++20", "-fPIC", "-shared", str(SOURCE)]
    command += ["-isystem", str(TORCH / "include"), f"-L{TORCH / 'lib'}"]
    command += [f"-Wl,-rpath,{TORCH / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu"]
    made_from = (SOURCE.read_text(), torch.__version__, str(TORCH), compiler)
    key = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:16]
    folder = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
    built = Path(folder).expanduser() / f"noisescale_fake_device_{key}.so"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(built.with_suffix(".lock")):  # among the workers of pytest-xdist
        if not built.exists():
            unfinished = built.with_suffix(".unfinished")
            command += ["-o", str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise CannotBuildError(f"`{' '.join(command)}` failed:\n{done.stderr[-4000:]}")
            unfinished.rename(built)
    return built
