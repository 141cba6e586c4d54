# SPDX-License-Identifier: Apache-2.0
"""Turn the squared norms of steps into the noise scale with its interval."""
