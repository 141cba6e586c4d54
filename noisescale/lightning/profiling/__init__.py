# SPDX-License-Identifier: Apache-2.0
"""Measure the seconds a step takes, by running a Trainer."""

from noisescale.lightning.profiling.profiling import profile_step_times as profile_step_times
