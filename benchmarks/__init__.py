# SPDX-License-Identifier: Apache-2.0
"""What backs the figures of the docs. CONTRIBUTING.md says what each folder is for."""
