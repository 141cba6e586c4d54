# SPDX-License-Identifier: Apache-2.0
"""When trainings reached a goal, and which of them reached it first: Shallue et al., AlgoPerf."""

from noisescale.time_to_result.comparison import Comparison as Comparison
from noisescale.time_to_result.comparison import compare as compare
from noisescale.time_to_result.measurements import Measurements as Measurements
from noisescale.time_to_result.measurements import Trial as Trial
from noisescale.time_to_result.reading import read_trials as read_trials
from noisescale.time_to_result.regimes import Regimes as Regimes
from noisescale.time_to_result.regimes import find_regimes as find_regimes
