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

from noisescale.hugging_face import NoiseScaleCallback

STEPS = 150


def spared(module: str, name: str) -> bool:
    callback, _, hook = name.partition(".")
    return (
        (callback == "NoiseScaleCallback" and hook.startswith("on_"))
        or hook in {"_forward_hook.<locals>.on_forward", "state"}
        or name in {"trains", "differentiable", "BackwardStart.__init__", "BackwardStart.add"}
        or name in {"_on_gradient", "BackwardStart.on_gradient"}
        or name in {"tensors_in", "MeasuringCallback._leaving_step_out"}
        or name.startswith("_show_calls.<locals>.")
        or module in {"guard.py", "_moved.py"}
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
def test_a_fault_in_each_function_leaves_every_parameter_as_it_is(accumulation: int) -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 3}
    options["gradient_accumulation_steps"] = accumulation
    plain = fit(**options)
    done: set[str] = set()
    for _ in itertools.count():
        faults = Faults("NoiseScaleCallback.on_step_begin", spared, set(done))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                faulty = fit(Faulty(faults), NoiseScaleCallback(every_n_steps=1), **options)
            finally:
                faults.stop()
        found, done = faults.done - done, faults.done
        for ours, theirs in zip(faulty.parameters, plain.parameters, strict=True):
            assert torch.equal(ours, theirs), found
        assert faulty.noise_scale is not None
        assert faulty.noise_scale.steps > 0, found
        if not found:
            break
    assert len(done) > 70
