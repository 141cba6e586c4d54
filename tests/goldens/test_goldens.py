# SPDX-License-Identifier: Apache-2.0
"""What the package makes of stored runs, sweeps, searches, branches and checkpoints.

A change of an answer is shown by `python -m goldens.make` and the commit's diff.
"""

from pathlib import Path

import pytest
from goldens import make
from tiers import slow


@pytest.mark.parametrize(
    ("name", "files"), [*make.TEXTS.items(), *(slow(name, ()) for name in make.NAMES)]
)
def test_the_package_makes_of_an_input_what_it_made_before(
    name: str, files: tuple[str, ...]
) -> None:
    pytest.importorskip("plotly")
    folder: Path = make.OUTPUTS / name

    found = make.made_of(name, files)

    assert found.keys() == {*files} or found.keys() == {file.name for file in folder.iterdir()}
    differences = {
        file: make.difference(make.rounded(text), (folder / file).read_text())
        for file, text in found.items()
    }
    assert {file: found for file, found in differences.items() if found} == {}


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ("a 2.294258 and 19200.01, 0.0", ""),
        ("a 2.294256 and 19200, 3e-17", ""),
        ("a 2.29 and 19200, 0.0", "line 1: '2.294256' became '2.29'"),
        ("a 2.294256 and 19201, 0.0", "line 1: '19200' became '19201'"),
        ("a 2.294256 or\n 19200, 0.0", "line 1: ' and ' became ' or\\n '"),
        ("a 2.294256 and 19200", "line 1: ', ' became ''"),
        ("a 2.294256 and 19200, nan", "line 1: ', ' became ', nan'"),
    ],
)
def test_numbers_may_differ_in_digits_that_no_reader_sees(found: str, difference: str) -> None:
    assert make.difference(found, "a 2.294256 and 19200, 0.0") == difference
