# SPDX-License-Identifier: Apache-2.0
"""A prediction, and a fit of a sweep, as figures, text, records and a page."""
