# SPDX-License-Identifier: Apache-2.0
"""The inner-product and orthogonality tests of Bollapragada et al. (2018)."""

from noisescale.methods.inner_product.along_gradient import (
    NoiseAlongGradient as NoiseAlongGradient,
)
from noisescale.methods.inner_product.policy import WIDEST as WIDEST
from noisescale.methods.inner_product.policy import InnerProductTest as InnerProductTest
