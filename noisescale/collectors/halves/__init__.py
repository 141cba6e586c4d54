# SPDX-License-Identifier: Apache-2.0
"""What `collectors/halves.py` is made of."""
