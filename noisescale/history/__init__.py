# SPDX-License-Identifier: Apache-2.0
"""The history of a run: kept in columns, read back from logs, averaged in segments."""

from noisescale.history.history import COLUMNS as COLUMNS
from noisescale.history.history import History as History
