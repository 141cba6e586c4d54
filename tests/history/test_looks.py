# SPDX-License-Identifier: Apache-2.0
"""What `measure` adds to the document of a run, and what a reader makes of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from noisescale import History, read_run
from noisescale.history.document import Document, Lines, document_of
from noisescale.history.looks import Look, line_of, record_beside, runs_of

RECORD = "noise_scale.jsonl"
LOOK = Look(20.0, 50.0, 40.0, 60.0, 0.95, "examples", 30, "a.ckpt", 7, 1.5)


def run(*steps: float) -> History:
    history = History(parameters=7.0)
    for step in steps:
        history.append(step=step, examples=32 * step, batch_size=32, low=1.0)
    return history


def written(folder: Path, history: History, *looks: Look) -> Path:
    lines = document_of(history)
    file = folder / RECORD
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (part,) = Document(lines).parts.values()
    with file.open("a") as end:
        end.writelines(line_of(part, look) for look in looks)
    return file


def test_looks_are_read_with_the_run_and_kept_in_its_document(tmp_path: Path) -> None:
    later = replace(LOOK, step=30.0)
    written(tmp_path, run(10, 20, 30), later, LOOK)

    found = read_run(tmp_path)

    assert found.looks == (LOOK, later)
    (part,) = Document(document_of(found)).parts.values()
    assert part.history().looks == found.looks
    assert found.until(25).looks == (LOOK,)
    assert found.between(10, 25).looks == (replace(LOOK, step=10.0),)


def test_looks_at_steps_that_were_undone_stay_out(tmp_path: Path) -> None:
    history = run(10, 20, 30)
    file = written(tmp_path, history, replace(LOOK, step=10.0), replace(LOOK, step=30.0))
    again = run(10, 20)
    again.run, again.attempt = history.run, 2
    lines = Lines(again)
    lines.step = 10.0
    header, row = *lines.header(again), *lines.rows(again)

    file.write_text(f"{file.read_text()}{json.dumps(header)}\n{json.dumps(row)}\n")

    assert row["after"] == 10
    assert [look.step for look in read_run(tmp_path).looks] == [10.0]


@pytest.mark.parametrize("other", [{"parameters": 8}, {"unit": "tokens"}])
def test_a_look_of_another_model_or_unit_is_left_out(tmp_path: Path, other: Any) -> None:
    written(tmp_path, run(10, 20, 30), LOOK, replace(LOOK, **other))

    with pytest.warns(UserWarning, match="of another model, or in another unit, is left out"):
        assert read_run(tmp_path).looks == (LOOK,)


def test_half_a_look_and_one_that_is_not_resolved(tmp_path: Path) -> None:
    file = written(tmp_path, run(10, 20, 30), LOOK, replace(LOOK, step=30.0))
    file.write_text(file.read_text()[:-20])

    with pytest.warns(UserWarning, match="ends within line 6"):
        assert read_run(tmp_path).looks == (LOOK,)
    written(tmp_path, run(10), replace(LOOK, high=float("inf")))
    with refused(str(file)):
        read_run(tmp_path)


def test_a_run_is_found_by_its_model_and_from_its_checkpoint(tmp_path: Path) -> None:
    parts = Document(document_of(run(10))).newest

    assert runs_of(parts, "examples", 7, Path(RECORD)) == [*parts.values()]
    with refused("run", got=f"{RECORD} of 7 parameters in examples"):
        runs_of(parts, "examples", 8, Path(RECORD))
    assert record_beside(tmp_path / "checkpoints" / "a.ckpt", RECORD) is None
    file = written(tmp_path, run(10))
    assert record_beside(tmp_path / "checkpoints" / "a.ckpt", RECORD) == file
    assert record_beside(tmp_path, RECORD) == file  # a Trainer's folder with its last weights
