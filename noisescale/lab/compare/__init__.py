# SPDX-License-Identifier: Apache-2.0
"""When trainings reached a goal, and which of them reached it first: Shallue et al., AlgoPerf."""

from noisescale.lab.compare.comparison import Comparison as Comparison
from noisescale.lab.compare.comparison import compare as compare
from noisescale.lab.compare.measurements import Measurements as Measurements
from noisescale.lab.compare.measurements import Trial as Trial
from noisescale.lab.compare.reading import read_trials as read_trials
from noisescale.tradeoff.regimes import Regimes as Regimes
from noisescale.tradeoff.regimes import find_regimes as find_regimes
