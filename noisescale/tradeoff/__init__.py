# SPDX-License-Identifier: Apache-2.0
"""Steps and examples to a result at other batch sizes: the law, and fits of it to sweeps."""

from noisescale.tradeoff.fit import TradeoffFit as TradeoffFit
from noisescale.tradeoff.fit import fit_tradeoff as fit_tradeoff
from noisescale.tradeoff.tradeoff import Floats as Floats
from noisescale.tradeoff.tradeoff import Tradeoff as Tradeoff
