# SPDX-License-Identifier: Apache-2.0
"""A search of a module's parameters along the front of cost and result."""
