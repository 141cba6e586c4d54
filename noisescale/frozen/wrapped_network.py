# SPDX-License-Identifier: Apache-2.0
"""A network that is no LightningModule, as one."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch

from noisescale.history.optimizers import OptimizerMix


class WrappedNetwork(pl.LightningModule):
    """A network for a fit that steps no weight. A subclass computes its loss.

    Args:
        network: A module of torch.
    """

    own_kind: OptimizerMix | None = None
    """What the optimizer is that trains the network elsewhere; None if it is not known."""
    own_precision: str | None = None
    """The precision in which it is trained elsewhere, as Lightning names it."""
    own_unit = "examples"
    """What examples of it are called elsewhere."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def on_train_start(self) -> None:
        """Put the network in training mode: it may come in the other one."""
        self.network.train()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one that is not used: it says which parameters are trained."""
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.0)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        """Load weights of the network, or of this module. Tied ones need one of their names."""
        if all(name.startswith("network.") for name in state_dict):
            return super().load_state_dict(state_dict, *args, **options)
        own = self.network.state_dict(keep_vars=True)
        given = {id(own[name]): x for name, x in state_dict.items() if name in own}
        tied = {name: given[id(x)] for name, x in own.items() if id(x) in given}
        return self.network.load_state_dict({**tied, **state_dict}, *args, **options)
