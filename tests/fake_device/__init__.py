# SPDX-License-Identifier: Apache-2.0
"""A device "fake" that takes the paths of an accelerator, on a machine without one.

It has two indices, streams, events, pinned memory and random numbers of its own. Kernels are those
of the CPU. `transfers` counts what the host reads and copies, `streams` finds what is not waited
for.
"""

from fake_device.build import CannotBuildError as CannotBuildError
from fake_device.module import register as register
from fake_device.module import without_float64 as without_float64
