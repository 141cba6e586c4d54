# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

COMMAND = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock
from noisescale.cli import app

def command(**_):
    print("the answer")
    THREAD
    return 3

app.PATIENCE = SECONDS
app.app = mock.Mock(side_effect=command)
app.main()
"""


@pytest.mark.parametrize(
    ("seconds", "thread", "printed"),
    [
        (1.0, "threading.Thread(target=threading.Event().wait).start()", ["the answer"]),
        (
            300.0,
            "threading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()",
            ["the answer", "done"],
        ),
        (
            300.0,
            "global kept; kept = ThreadPoolExecutor(1); kept.submit(print, 'worked').result()",
            ["the answer", "worked"],
        ),
    ],
    ids=["one that never ends", "one that ends soon", "an executor"],
)
def test_a_command_ends_with_its_code_whatever_threads_a_script_has_started(
    seconds: float, thread: str, printed: list[str]
) -> None:
    """Python waits for threads for ever, and a sweep imports the user's script."""
    command = COMMAND.replace("SECONDS", f"{seconds}").replace("THREAD", thread)

    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=100
    )

    assert done.stderr == ""
    assert done.stdout.splitlines() == printed
    assert done.returncode == 3
