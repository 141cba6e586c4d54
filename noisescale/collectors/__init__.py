# SPDX-License-Identifier: Apache-2.0
"""Where squared gradient norms come from: one file for each way of training."""
