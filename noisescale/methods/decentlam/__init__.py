# SPDX-License-Identifier: Apache-2.0
"""DecentLaM (Yuan et al. 2021): momentum SGD in which each rank averages with neighbours alone."""
