# SPDX-License-Identifier: Apache-2.0
"""From one run to the compute and the time of every other batch size: `noisescale.predict`."""

from noisescale._moved import former_names
from noisescale.prediction.calibration import Calibration as Calibration
from noisescale.prediction.costing import PredictedRow as PredictedRow

__getattr__ = former_names(
    __name__, {"Prediction": "noisescale.Prediction", "predict": "noisescale.predict"}
)
