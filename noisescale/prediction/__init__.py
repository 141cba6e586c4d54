# SPDX-License-Identifier: Apache-2.0
"""The compute and the time of every other batch size, from one run: `noisescale.predict`."""

from noisescale.prediction.calibration import Calibration as Calibration
from noisescale.prediction.costing import PredictedRow as PredictedRow
