# SPDX-License-Identifier: Apache-2.0
import pytest

from noisescale.step_time import fitting


@pytest.fixture(autouse=True)
def few_refits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits of step times are tested in their own room: here their bounds may be less precise."""
    monkeypatch.setattr(fitting, "REFITS", 48)
