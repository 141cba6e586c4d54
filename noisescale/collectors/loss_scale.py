# SPDX-License-Identifier: Apache-2.0
"""Take the scale of a GradScaler out of squared norms, on the device.

Private attributes read here, as of torch 2.13: `GradScaler._get_scale_async`, the scale without a
host synchronisation, and `GradScaler._per_optimizer_states`, where it is kept whose gradients are
unscaled already. (Fused optimizers unscale within their step: theirs never are.)
"""

from __future__ import annotations

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState


class LossScale:
    """The loss scale of a step. Read it before the scaler's `step` and `update`.

    Args:
        scaler: None, or a disabled one: losses are not scaled.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler

    def without(self, sq_norms: Tensor, *, unscaled_with_gradients: bool = False) -> Tensor:
        """Return squared norms as they would be without the scale.

        Args:
            sq_norms: Squared norms of scaled gradients.
            unscaled_with_gradients: Whether they are the norms of the current `p.grad`, which the
                scaler may have unscaled already (`unscale_`, for clipping).
        """
        if self._scaler is None or not self._scaler.is_enabled():
            return sq_norms
        scale = self._scaler._get_scale_async()
        if scale is None:  # nothing has been scaled yet
            return sq_norms
        if unscaled_with_gradients and _has_unscaled(self._scaler):
            return sq_norms
        return sq_norms / scale.to(sq_norms.dtype).square()


def _has_unscaled(scaler: GradScaler) -> bool:
    stages = [state["stage"] for state in scaler._per_optimizer_states.values()]
    return OptState.UNSCALED in stages
