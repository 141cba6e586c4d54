# SPDX-License-Identifier: Apache-2.0
"""Steps, examples and learning rates at other batch sizes: the law, its fits to sweeps, rules."""

from noisescale.tradeoff.fit import TradeoffFit as TradeoffFit
from noisescale.tradeoff.fit import fit_tradeoff as fit_tradeoff
from noisescale.tradeoff.tradeoff import Floats as Floats
from noisescale.tradeoff.tradeoff import Tradeoff as Tradeoff
