# SPDX-License-Identifier: Apache-2.0
"""Models that are moved to another device after the meter was made."""

import pytest
from ways_of_capture import Net

from fake_device.expectations import ROWS, steps_expected, train
from noisescale import NoiseScaleMeter
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import StepRows
from noisescale.collectors.rows.window_layout import UNKNOWN


@pytest.mark.parametrize("way", ROWS)
def test_a_model_is_measured_wherever_it_is(way: str, recorded: list[StepNorms]) -> None:
    """What was measured on one device is read with what was measured on the other."""
    model = Net().to("fake:0")
    meter = NoiseScaleMeter(model, small_batch=way, every_n_steps=1)  # type: ignore[arg-type]  # a name

    for step in range(8):
        if step % 3 == 2:
            model.to(f"fake:{step // 3 % 2 ^ 1}")
        train(model, meter, way, step)

    assert len(steps_expected(meter, way, recorded, rel=1e-5)) == 8


def test_parameters_that_were_replaced_are_not_measured_and_named() -> None:
    """Between a CPU and this device `to` cannot move the numbers of a parameter."""
    model = Net()
    meter = NoiseScaleMeter(model, small_batch="micro_batch", every_n_steps=1)
    model.to("fake:0")

    with pytest.warns(UserWarning, match=r"others in place of 'first\.weight' and 6 more\. "):
        train(model, meter, "micro_batch", 0)

    assert "'first.weight'" in str(meter.not_measured)


def test_a_step_of_which_nothing_is_known_is_told_from_where_the_model_is() -> None:
    """The row of it goes to a process group of that device."""
    model = Net().to("fake:0")
    rows = StepRows(GradientNorms(list(model.named_parameters())), None)
    model.to("fake:1")

    rows.add(None, None, UNKNOWN, examples=3, unmeasured_examples=0, unmeasured_steps=0)

    assert str(rows._waiting[0].row.device) == "fake:1"
