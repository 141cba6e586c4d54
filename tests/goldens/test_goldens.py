# SPDX-License-Identifier: Apache-2.0
"""What the package makes of stored runs, sweeps, searches, branches and checkpoints.

A change of an answer is shown by `python -m goldens.make` and the commit's diff.
"""

import json

import pytest
from goldens import make

pytest.importorskip("plotly")


@pytest.mark.parametrize("name", make.NAMES)
def test_the_package_makes_of_an_input_what_it_made_before(name: str) -> None:
    stored = {file.name: file.read_text() for file in (make.OUTPUTS / name).iterdir()}

    found = {file: make.rounded(text) for file, text in make.made_of(name).items()}

    assert found.keys() == stored.keys()
    differences = {file: make.difference(text, stored[file]) for file, text in found.items()}
    changed = {file: difference for file, difference in differences.items() if difference}
    assert changed == {}, json.dumps({"of": name, "changed": changed}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ("a 2.294258 and 19200.01, 0.0", ""),
        ("a 2.294256 and 19200, 0.0", ""),
        ("a 2.294256 and 19200, 3e-17", ""),
        ("a 2.29 and 19200, 0.0", "line 1: '2.294256' became '2.29'"),
        ("a 2.294256 and 19201, 0.0", "line 1: '19200' became '19201'"),
        ("a 2.294256 or\n 19200, 0.0", "line 1: ' and ' became ' or\\n '"),
        ("a 2.294256\n and 19200, 0.0", "line 1: ' and ' became '\\n and '"),
        ("a 2.294256 and 19200", "line 1: ', ' became ''"),
        ("a 2.294256 and 19200, 0.0, 1", "line 1: '' became ', '"),
        ("a 2.294256 and 19200, nan", "line 1: ', ' became ', nan'"),
    ],
)
def test_numbers_may_differ_in_digits_that_no_reader_sees(found: str, difference: str) -> None:
    assert make.difference(found, "a 2.294256 and 19200, 0.0") == difference
