# SPDX-License-Identifier: Apache-2.0
"""Which batch size to train at now, how to make it up, and which learning rate goes with it."""

from noisescale.plan import Plan as Plan
from noisescale.scheduling.find import Find as Find
from noisescale.scheduling.gate import Gate as Gate
from noisescale.scheduling.policies import DoublingRule as DoublingRule
from noisescale.scheduling.policies import Given as Given
from noisescale.scheduling.policies import InsteadOfDecay as InsteadOfDecay
from noisescale.scheduling.policies import NormTestRule as NormTestRule
from noisescale.scheduling.policies import RatioRule as RatioRule
from noisescale.scheduling.policies import TradeoffRule as TradeoffRule
from noisescale.scheduling.policy import Policy as Policy
from noisescale.scheduling.policy import Progress as Progress
