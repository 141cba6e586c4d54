# SPDX-License-Identifier: Apache-2.0
"""What backs the figures of the docs. README.md says what each folder is for."""
