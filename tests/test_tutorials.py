# SPDX-License-Identifier: Apache-2.0
"""The tutorials: what they hold, and their code with smaller numbers, without Jupyter."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT, printed

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))

SMALLER: dict[str, dict[str, float]] = {
    "convnet": {"EPOCHS": 1, "SEEDS": 1, "GOAL": 2.2},
    "hugging_face_gpt2": {"WIDTH": 16, "LAYERS": 1, "STEPS": 40, "SECOND_STEPS": 20}
    | {"GOAL": 5.0, "MODULES": 10},
    "lightning_transformer": {"BATCH_SIZE": 16, "STEPS": 20, "WIDTH": 16, "MODULES": 20},
}


def code(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def with_values(constants: str, values: dict[str, float]) -> str:
    for name, value in values.items():
        constants, found = re.subn(rf"^{name} = .*$", f"{name} = {value}", constants, flags=re.M)
        assert found == 1, name
    return constants


def as_python(text: str) -> str:
    """A cell without what IPython alone reads: `!noisescale ...` is called in the process."""

    def called(line: re.Match[str]) -> str:
        return f"from program import run\nprint(run(*{shlex.split(line[1])!r}))"

    return re.sub(r"^!noisescale (.*)$", called, text, flags=re.M)


every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_a_tutorials_code_runs(notebook: Path, tmp_path: Path) -> None:
    texts = {cell["id"]: source(cell) for cell in code(notebook)}
    texts["constants"] = with_values(texts["constants"], SMALLER[notebook.stem])
    script = tmp_path / f"{notebook.stem}.py"
    script.write_text("\n\n".join(map(as_python, texts.values())))

    said = printed(str(script), cwd=tmp_path)

    assert "Critical batch size" in said


@every_notebook
def test_a_tutorial_is_saved_as_it_ran_with_stable_ids_and_no_metadata(notebook: Path) -> None:
    saved = json.loads(notebook.read_text())
    every, found = saved["cells"], code(notebook)

    outputs = [output for cell in found for output in cell["outputs"]]

    assert (saved["nbformat"], saved["nbformat_minor"]) == (4, 5)
    assert saved["metadata"].keys() == {"kernelspec", "language_info"}
    assert all(re.fullmatch(r"[a-z-]+", cell["id"]) and cell["metadata"] == {} for cell in every)
    assert 10 <= len(every) <= 24
    assert len(notebook.read_text()) < 200_000
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    kinds = {output["output_type"] for output in outputs}
    assert kinds <= {"display_data", "execute_result", "stream"}
    assert "stderr" not in {output.get("name") for output in outputs}
    for cell in found:
        last = source(cell).splitlines()[-1]
        if re.match(r"print\(|!|figure$|\w+\.figure\(\)$", last):
            assert cell["outputs"], cell["id"]
