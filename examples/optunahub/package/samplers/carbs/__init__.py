# SPDX-License-Identifier: Apache-2.0
"""CARBS as a package of OptunaHub: the sampler of noisescale."""

from noisescale import CarbsSampler
from noisescale.lab.tune.carbs.pareto import pareto_front
from noisescale.lab.tune.carbs.spaces import LinearSpace, LogitSpace, LogSpace, PowerOfTwoSpace

__all__ = [
    "CarbsSampler",
    "LinearSpace",
    "LogSpace",
    "LogitSpace",
    "PowerOfTwoSpace",
    "pareto_front",
]
