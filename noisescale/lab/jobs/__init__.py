# SPDX-License-Identifier: Apache-2.0
"""Many trainings as one job: who trains what, on any number of machines."""
