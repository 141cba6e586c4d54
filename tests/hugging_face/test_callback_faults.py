# SPDX-License-Identifier: Apache-2.0
"""A fault in whatever is not training ends no training of the Trainer of transformers."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from faults import Faults
from transformers import TrainerCallback
from transformers_fits import fit

from noisescale.hugging_face import NoiseScaleCallback, noise_scale_callback

pytestmark = pytest.mark.slow

STEPS, FEW, FEWEST = 150, 30, 8
"""Most functions are called at every step, which has one fault; the rest once or twice a fit."""


def spared(module: str, name: str) -> bool:
    callback, _, hook = name.partition(".")
    return (
        (callback == "NoiseScaleCallback" and hook.startswith("on_"))
        or hook in {"_forward_hook.<locals>.on_forward", "state"}
        or name in {"trains", "differentiable", "BackwardStart.__init__", "BackwardStart.add"}
        or name in {"_on_gradient", "BackwardStart.on_gradient", "_register_hook"}
        or name in {"tensors_in", "MeasuringCallback._leaving_step_out"}
        or name.startswith("_show_calls.<locals>.")
        or module == "guard.py"
    )


class Faulty(TrainerCallback):
    """Raises in one function a step, from the second on."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.faults.stop()
        if state.global_step:
            self.faults.next_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.faults.stop()


@pytest.mark.parametrize("accumulation", [1, 2], ids=["half", "micro_batch"])
def test_a_fault_in_each_function_leaves_every_parameter_as_it_is(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"logging_steps": 3, "gradient_accumulation_steps": accumulation}
    # What is said at the end is guarded as a whole, and has functions of another room.
    monkeypatch.setattr(noise_scale_callback, "closing_lines", lambda *_: "")
    plains = {n: fit(max_steps=n, **options) for n in (STEPS, FEW, FEWEST)}
    done: set[str] = set()
    steps = STEPS
    for _ in itertools.count():
        faults = Faults("NoiseScaleCallback.on_step_begin", spared, set(done))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                callbacks = Faulty(faults), NoiseScaleCallback(every_n_steps=1)
                faulty = fit(*callbacks, max_steps=steps, **options)
            finally:
                faults.stop()
        plain, found, done = plains[steps], faults.done - done, faults.done
        for ours, theirs in zip(faulty.parameters, plain.parameters, strict=True):
            assert torch.equal(ours, theirs), found
        assert faulty.noise_scale is not None
        # In a short fit each time that steps are taken in may have a fault of its own.
        assert faulty.noise_scale.steps > 0 or steps < STEPS, found
        if steps == STEPS and not found:
            break
        steps = STEPS if not found else FEW if len(found) > 3 else FEWEST
    assert len(done) > 70
