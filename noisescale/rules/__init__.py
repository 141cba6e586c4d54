# SPDX-License-Identifier: Apache-2.0
"""Published rules: which batch size for a horizon, and what to set at another batch size."""
