# SPDX-License-Identifier: Apache-2.0
"""Run the tutorials and save them with what they print.

    python docs/tutorials/execute.py [NAME.ipynb ...]

It needs the package with its extras `examples` and `hugging-face`, `lightning`, the command
`noisescale` on the path, and five packages for notebooks alone:

    pip install nbclient nbformat ipykernel ipywidgets kaleido

kaleido draws figures as SVG and needs an installed Chrome or Chromium. An environment of its own
keeps them out of the package's: make one with `python -m venv`, and write the path of the other's
`site-packages` into a `.pth` file in its `site-packages`.

Each notebook runs in an empty folder, on one thread, and is saved only if it ended without an
error and without a word on stderr. Figures become SVG, so that no page of the site loads
plotly's script. Metadata that changes from run to run is left out.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).resolve().parent
ROOT = TUTORIALS.parents[1]
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PLOTLY_RENDERER": "svg",
    "HF_HUB_OFFLINE": "1",
    "JUPYTER_COLUMNS": "76",  # what the pages show without scrolling
}


def execute(path: Path) -> None:
    """Run one notebook and write it back.

    Raises:
        ValueError: If an output is on stderr or names a folder of this machine.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=600,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        ).execute()
        check(notebook, [folder, str(ROOT), sys.prefix, str(Path.home())])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            output.pop("metadata", None)
            if output.output_type in ("display_data", "execute_result"):
                output.metadata = {}
                if "image/svg+xml" in output.data:
                    output.data = {"image/svg+xml": output.data["image/svg+xml"]}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def check(notebook: nbformat.NotebookNode, folders: list[str]) -> None:
    """Refuse what a reader of the page should not see."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise ValueError(f"Cell {cell.id} must not write to stderr, got {output.text!r}.")
            for folder in folders:
                if folder in str(output):
                    raise ValueError(f"Cell {cell.id} must not name {folder} in its output.")


def main() -> None:
    """Run the notebooks that are named, or all."""
    os.environ |= SETTINGS
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for path in [Path(name) for name in sys.argv[1:]] or sorted(TUTORIALS.glob("*.ipynb")):
        start = time.monotonic()
        execute(path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
