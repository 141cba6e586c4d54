# SPDX-License-Identifier: Apache-2.0
"""From one run to the compute and the time of every other batch size: `noisescale.predict`."""

from noisescale.prediction.calibration import Calibration as Calibration
from noisescale.prediction.costing import PredictedRow as PredictedRow
