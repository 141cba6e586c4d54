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
    changed = [file for file, text in found.items() if text != stored[file]]
    assert changed == [], json.dumps({"of": name, "changed": changed})
