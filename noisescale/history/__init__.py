# SPDX-License-Identifier: Apache-2.0
"""A run in columns: kept, read back from what was logged, and averaged in segments."""

from noisescale.history.history import COLUMNS as COLUMNS
from noisescale.history.history import History as History
