# SPDX-License-Identifier: Apache-2.0
"""Write the page of all commands and options from the command line itself.

python docs/commands.py
"""

import html
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "api/commands.md"


def page() -> str:
    """Return what typer documents, with examples as code."""
    words = ["-m", "typer", "noisescale.cli.app", "utils", "docs", "--name", "noisescale"]
    done = subprocess.run(
        [sys.executable, *words, "--title", "Commands"], capture_output=True, text=True, check=True
    )
    text = html.unescape(done.stdout)
    text = re.sub(r"\*\*Commands\*\*:\n\n.*?(?=\n## )", "", text, flags=re.DOTALL)  # cut short
    text = re.sub(r"^Example: (.*)$", r"**Example**:\n\n```console\n$ \1\n```", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
