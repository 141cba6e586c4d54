# SPDX-License-Identifier: Apache-2.0
"""The version of the package, for the build, the commands and the files that they write."""

__version__ = "0.2.0.dev0"
