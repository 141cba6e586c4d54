# SPDX-License-Identifier: Apache-2.0
"""Seconds a step at plans that a Trainer is run with."""

from noisescale.lightning.profiling.profiling import profile_step_times as profile_step_times
