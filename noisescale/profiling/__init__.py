# SPDX-License-Identifier: Apache-2.0
"""Measure the seconds a step takes, by running a Trainer."""
