# SPDX-License-Identifier: Apache-2.0
"""Whether the parameters that are measured are still those of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter

from noisescale.collectors.tensor_parallel import is_local_part
from noisescale.guard import NotMeasured


class InModel:
    """Finds out when other parameters are put in place of measured ones.

    `module.to` moves the numbers of a parameter where it can. Between some types of devices it
    cannot, and makes another parameter. Then no gradient comes to the measured one.

    Args:
        model: The model.
        names: Names of the measured parameters.
        parameters: The measured parameters.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], parameters: Sequence[Parameter]
    ) -> None:
        self._model = model
        named = zip(names, parameters, strict=True)
        # Local parts leave the model at its first forward pass, and DDP goes on to train them.
        self._named = [(name, p) for name, p in named if not is_local_part(p)]
        self._places = self._places_now()

    def check(self) -> None:
        """Raise a NotMeasured unless all measured parameters are in the model."""
        if all(holder.get(key) is one for holder, key, one in self._places):
            return
        present = {id(p) for p in self._model.parameters()}
        if missing := [name for name, p in self._named if id(p) not in present]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise NotMeasured(
                "`model` must keep the parameters that are measured, got others in place of"
                f" {missing[0]!r}{more}. `module.to(device)` replaces parameters between some types"
                " of devices. Make the optimizer and the meter when the model is where it is"
                " trained."
            )
        self._places = self._places_now()

    def _places_now(self) -> list[tuple[dict[str, Any], str, object]]:
        """Return where parameters and their modules are, TorchScript modules aside."""
        measured = {id(p) for _, p in self._named}
        return [
            (holder, key, one)
            for module in self._model.modules()
            for holder in (module._parameters, module._modules)
            if isinstance(holder, dict)
            for key, one in holder.items()
            if (isinstance(one, nn.Module) and not measured.isdisjoint(map(id, one.parameters())))
            or id(one) in measured
        ]
