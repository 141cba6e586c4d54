# SPDX-License-Identifier: Apache-2.0
"""Trials from files, one module for each format."""
