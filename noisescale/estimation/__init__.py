# SPDX-License-Identifier: Apache-2.0
"""From the squared norms of steps to the noise scale with its interval."""
