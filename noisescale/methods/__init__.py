# SPDX-License-Identifier: Apache-2.0
"""Methods of the literature for large batches, one file or folder a paper."""
