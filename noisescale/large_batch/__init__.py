# SPDX-License-Identifier: Apache-2.0
"""Methods of the literature on large batches, one file or folder a paper."""
