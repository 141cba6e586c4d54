# SPDX-License-Identifier: Apache-2.0
"""What a program prints where linear algebra is done as on other CPUs."""

import os
import subprocess
import sys


def printed_on_each_kind(program: str) -> set[str]:
    """Run a program with the kernels for this CPU and with those for an old one.

    OpenBLAS takes its kernel by name, and rounds as the kernel does.
    """
    return {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for environment in ({}, {"OPENBLAS_CORETYPE": "Prescott"})
    }
