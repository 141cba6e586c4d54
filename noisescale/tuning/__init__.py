# SPDX-License-Identifier: Apache-2.0
"""Many trainings as one job: which to do next, by whom, and what came of them."""
