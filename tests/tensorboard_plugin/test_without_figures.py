# SPDX-License-Identifier: Apache-2.0
"""TensorBoard where plotly is not installed: it starts, and the tab says what is missing."""

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from logged_runs import log_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WITHOUT_PLOTLY = (
    "import sys; sys.modules['plotly'] = None; from tensorboard.main import run_main; run_main()"
)


def test_the_tab_says_how_to_install_plotly(browser: "Browser", tmp_path: Path) -> None:
    log_run(tmp_path / "one")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-c", WITHOUT_PLOTLY, "--logdir", tmp_path, "--port", port]
    options = ["--load_fast", "false"]
    with subprocess.Popen(list(map(str, [*program, *options])), stderr=subprocess.PIPE) as server:
        try:
            wait_for_runs(f"http://localhost:{port}/data/plugins_listing")
            page = browser.new_page()
            page.goto(f"http://localhost:{port}/#noise_scale")
            line = page.frame_locator("iframe").locator("p")
            line.wait_for(timeout=20_000)
            said = line.inner_text()
            page.close()
        finally:
            server.terminate()

    assert said == (
        "The tab Noise scale needs plotly, which is not installed. Run:"
        ' pip install "noisescale[report]", then start TensorBoard again.'
    )


def wait_for_runs(listing: str) -> None:
    for _ in range(100):
        try:
            if b'"noise_scale": {"disable_reload": false, "enabled": true' in (
                urllib.request.urlopen(listing).read()
            ):
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(urllib.request.urlopen(listing).read())
