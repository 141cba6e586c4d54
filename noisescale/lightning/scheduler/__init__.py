# SPDX-License-Identifier: Apache-2.0
"""BatchSizeScheduler, and how it changes batches and schedules of a fit."""
