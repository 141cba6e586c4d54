# SPDX-License-Identifier: Apache-2.0
"""The command line: a file a command, and `app.py`, which names them all."""
