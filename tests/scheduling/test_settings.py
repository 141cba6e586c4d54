# SPDX-License-Identifier: Apache-2.0
"""What a user says of a scheduler, and the settings of a run that are made of it."""

from dataclasses import FrozenInstanceError

import pytest

from noisescale.plan import Bounds
from noisescale.scheduling.settings import SchedulerOptions, Settings


def test_settings_stay_as_they_were_checked() -> None:
    settings = Settings.from_options(SchedulerOptions(max_batch_size=64))

    with pytest.raises(FrozenInstanceError):
        settings.bounds = Bounds()

    assert settings.bounds == Bounds(max_batch_size=64)


def test_the_policy_of_each_run_has_a_state_of_its_own() -> None:
    options = SchedulerOptions(policy="seesaw")
    first, second = (Settings.from_options(options).policy for _ in range(2))

    first.load_state_dict({"start": 8.0})

    assert second.state_dict() == {"start": 0.0}
