# SPDX-License-Identifier: Apache-2.0
"""Numbers of all parameters, brought to the host at once."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(scalars: list[Tensor]) -> list[float]:
    """Return numbers as floats: with one transfer, unless they are on several devices."""
    if len({x.device for x in scalars}) == 1:
        return list(map(float, torch.stack(scalars).tolist()))
    return [float(x) for x in scalars]
