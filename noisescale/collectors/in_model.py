# SPDX-License-Identifier: Apache-2.0
"""Whether the parameters that are measured are still those of the model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn import Parameter

from noisescale.guard import RefusalError


class InModel:
    """The places of parameters in a model.

    `module.to` moves the numbers of a parameter where it can. Between some types of devices it
    cannot, and puts another parameter in the place. No gradient comes to the measured one then.

    Args:
        model: The model.
        parameters: The measured ones.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Parameter]) -> None:
        measured = {id(p) for p in parameters}
        self._places = [
            (module._parameters, key, p, f"{name}.{key}".lstrip("."))
            for name, module in model.named_modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in measured
        ]

    def check(self) -> None:
        """Raise a RefusalError if another parameter is in the place of a measured one."""
        for parameters, key, p, name in self._places:
            if parameters.get(key) is not p:
                raise RefusalError(
                    f"`model` must keep the parameters that are measured, got another {name!r} in"
                    " place of the measured one. `module.to(device)` may replace parameters. Make"
                    " the optimizer and the meter once the model is where it is trained."
                )
