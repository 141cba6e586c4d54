# SPDX-License-Identifier: Apache-2.0
"""Steps as rows of numbers, on their way over ranks and to the host."""
