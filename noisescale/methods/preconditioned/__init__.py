# SPDX-License-Identifier: Apache-2.0
"""The noise scale of the gradient as Adam scales it."""

from noisescale.methods.preconditioned.noise_scale import (
    PreconditionedNoiseScale as PreconditionedNoiseScale,
)
