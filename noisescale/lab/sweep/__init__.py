# SPDX-License-Identifier: Apache-2.0
"""Trainings of a sweep: a module trained at another batch size, with other hyperparameters."""
