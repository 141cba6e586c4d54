# SPDX-License-Identifier: Apache-2.0
"""Models that are moved to another device after the meter was made."""

from typing import Any

import pytest
from torch import nn
from ways_of_capture import Net, batch, half_squares

from fake_device.expectations import ROWS, expectations
from noisescale import NoiseScaleMeter
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import StepRows
from noisescale.collectors.rows.window_layout import UNKNOWN


def train(model: nn.Module, meter: NoiseScaleMeter, way: str, step: int) -> None:
    model.zero_grad()
    device = next(model.parameters()).device
    for micro, n in enumerate(ROWS[way]):
        x, y = (part.to(device) for part in batch(step, 0, micro, n))
        meter.backward(half_squares(model(x), y) / len(ROWS[way]), n)
    meter.step()


@pytest.mark.parametrize("way", ROWS)
def test_a_model_is_measured_wherever_it_is(way: str, recorded: list[StepNorms]) -> None:
    """What was measured on one device is read with what was measured on the other."""
    model = Net().to("fake:0")
    groups = {"groups": {"first": "^first"}} if way == "example" else {}
    meter = NoiseScaleMeter(model, small_batch=way, every_n_steps=1, **groups)  # type: ignore[arg-type]

    for step in range(8):
        if step % 3 == 2:
            model.to(f"fake:{step // 3 % 2 ^ 1}")
        train(model, meter, way, step)

    probes = way == "example"
    assert (meter.measured_steps, meter.skipped_steps) == (8 - probes, probes)
    for step, got in enumerate(recorded):
        if step >= probes:
            wanted = expectations(Net(), way, step)
            assert any(got[:4] == pytest.approx(tuple(want), rel=1e-5) for want in wanted)


@pytest.mark.filterwarnings("ignore:.*1.weight")
def test_coverage_goes_on_on_another_device() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 3)).to("fake:0")
    meter = NoiseScaleMeter(model, small_batch="example", every_n_steps=1)
    found = []

    for step in range(6):
        model.to(f"fake:{step // 3}")
        train(model, meter, "example", step)
        found.append(meter.coverage)

    assert all(0.5 < coverage < 1 for coverage in found[1:])
    assert meter.measured_steps == 5


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
