# SPDX-License-Identifier: Apache-2.0
"""Many trainings: compared, swept over batch sizes, searched and branched, with the commands."""
