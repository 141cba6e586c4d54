# SPDX-License-Identifier: Apache-2.0
"""Steps of squared norms -> the noise scale with its interval."""
