# SPDX-License-Identifier: Apache-2.0
"""The state of a module that batches change, put back before each of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from noisescale.frozen.gradient_mean import on_host
from noisescale.refusal import Refusal


class KeptState:
    """Weights that are not trained and buffers, as they were before the first batch.

    What a module keeps in attributes of Python is not seen.

    Args:
        module: The module.
        trained: Its trained parameters, by their names. They must stay as they are.
    """

    def __init__(self, module: nn.Module, trained: Mapping[str, Parameter]) -> None:
        self._trained = trained
        self._sums = self._sums_now()
        ids = set(map(id, trained.values()))
        self._kept: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        for one in module.modules():
            for held in (one._parameters, one._buffers):
                for name, x in held.items():
                    if x is not None and id(x) not in ids:
                        self._kept.append((held, name, x, x.detach().clone()))  # type: ignore[arg-type]  # parameters are tensors

    def put_back(self) -> None:
        """Undo what was done to the state, also where another tensor took the place of one."""
        with torch.no_grad():
            for held, name, x, kept in self._kept:
                x.data.copy_(kept)
                held[name] = x

    def check_trained(self) -> None:
        """Raise if a trained weight has changed, in whatever way that was done."""
        now = self._sums_now()
        if now == self._sums:
            return
        pairs = zip(self._trained, now, self._sums, strict=True)
        name = next(name for name, a, b in pairs if a != b)
        raise Refusal(
            "target",
            "leave its weights as they are in a training step",
            f"{name!r} changed",
            "The trainer steps the optimizer: measure a module that does not.",
        )

    def _sums_now(self) -> list[tuple[float, float]]:
        parameters = self._trained.values()
        with torch.no_grad():
            sums, norms = [p.sum() for p in parameters], [p.norm() for p in parameters]
        return list(zip(on_host(sums), on_host(norms), strict=True))
