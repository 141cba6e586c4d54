# SPDX-License-Identifier: Apache-2.0
"""What a user's `make()` returns: a module and its data, alike for all that trains it."""
