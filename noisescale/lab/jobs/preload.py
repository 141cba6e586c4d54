# SPDX-License-Identifier: Apache-2.0
"""Imported by the fork server as it begins, see `warm`: it then has the trainings' packages."""

from __future__ import annotations

import os
from pathlib import Path

from noisescale.lab.jobs.trial_imports import import_reported
from noisescale.lab.jobs.trial_process import REPORT

_report = os.environ.pop(REPORT, "")

WHY_NOT = import_reported(Path(_report)) if _report else ""
"""Why no training may be forked from here; "" if trainings may.

A server that was begun anew, as the first one was killed, has no report. Its forks import
everything themselves.
"""
