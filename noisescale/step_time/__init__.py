# SPDX-License-Identifier: Apache-2.0
"""Seconds an optimizer step takes: measured, fitted, or assumed."""

from noisescale.step_time.device_times import FILE as FILE
from noisescale.step_time.device_times import DeviceTimes as DeviceTimes
from noisescale.step_time.device_times import LoaderTiming as LoaderTiming
from noisescale.step_time.device_times import StepTiming as StepTiming
from noisescale.step_time.fitting import fit_step_time as fit_step_time
from noisescale.step_time.model import FittedStepTime as FittedStepTime
