# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from refused import refused

from noisescale.csv_lines import csv_lines, write_csv


def test_lines_have_the_numbers_an_editor_shows_whatever_the_file_begins_with(
    tmp_path: Path,
) -> None:
    """A mark as of spreadsheets, a blank line, a cell of two lines."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfbatch_size,name\r\n\r\n8,"of two\nlines"\r\n16,x\r\n')

    lines = list(csv_lines(path))

    assert lines == [(1, ["batch_size", "name"]), (4, ["8", "of two\nlines"]), (5, ["16", "x"])]


@pytest.mark.parametrize(
    ("content", "requirement", "got"),
    [
        (b"batch_size,steps\n8,1,350\n", "have 2 cells in each line", "3 in line 2"),
        (b"batch_size,steps\n8,1350\n16\n", "have 2 cells in each line", "1 in line 3"),
        (b"\x89PNG\r\n", "be a CSV file in UTF-8", "after line 0"),
        (b"batch_size,steps\n8," + 200_000 * b"9", "be a CSV file in UTF-8", "after line 2"),
        (b"a,b,a,a\n1,8,2,3\n", "name each column once", "'a' in columns 1, 3 and 4"),
    ],
    ids=["more cells", "fewer cells", "no text", "one endless cell", "one name for three columns"],
)
def test_files_that_are_no_table_are_refused(
    tmp_path: Path, content: bytes, requirement: str, got: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)

    with refused(str(path), requirement=requirement) as error:
        list(csv_lines(path))

    assert got in str(error.value)


def test_columns_without_a_name_may_repeat(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("batch_size,,\n8,,\n")

    assert list(csv_lines(path)) == [(1, ["batch_size", "", ""]), (2, ["8", "", ""])]


def test_a_path_cannot_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31m.csv"
    path.write_text("a,a\n")

    with pytest.raises(ValueError, match=r"\\x1b\[31m.csv` must name each column once"):
        list(csv_lines(path))


def test_two_writers_of_one_file_do_not_stop_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one writes just before the first one puts its file in place."""
    path, replace = tmp_path / "trials.csv", Path.replace

    def late(written: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_csv(path, [["a"], [2]])
        return replace(written, target)

    monkeypatch.setattr(Path, "replace", late)
    write_csv(path, [["a"], [1]])

    assert path.read_text() == "a\n1\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "found"),
    [("step;loss\n1;0,5\n", "semicolons in 'step;loss'"), ("step\tloss\n", "tabs in")],
)
def test_other_separators_are_named(tmp_path: Path, content: str, found: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)

    with pytest.raises(ValueError, match="must have commas between its cells, got ") as error:
        list(csv_lines(path))

    assert found in str(error.value).replace("\\t", "\t")
