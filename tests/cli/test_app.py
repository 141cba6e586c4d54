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

app.PATIENCE = 1.0
app.app = mock.Mock(side_effect=command)
app.main()
"""


@pytest.mark.parametrize(
    ("thread", "printed"),
    [
        ("threading.Thread(target=threading.Event().wait).start()", ["the answer"]),
        (
            "threading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()",
            ["the answer", "done"],
        ),
        (
            "global kept; kept = ThreadPoolExecutor(1); kept.submit(print, 'worked').result()",
            ["the answer", "worked"],
        ),
    ],
    ids=["one that never ends", "one that ends soon", "an executor"],
)
def test_a_command_ends_with_its_code_whatever_threads_a_script_has_started(
    thread: str, printed: list[str]
) -> None:
    """Python waits for threads for ever, and a sweep imports the user's script."""
    words = [sys.executable, "-c", COMMAND.replace("THREAD", thread)]

    done = subprocess.run(words, capture_output=True, text=True, timeout=100)

    assert done.stderr == ""
    assert done.stdout.splitlines() == printed
    assert done.returncode == 3
