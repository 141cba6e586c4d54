# SPDX-License-Identifier: Apache-2.0
"""Take the scale of a GradScaler out of squared norms, on the device.

Private attributes read here, as of torch 2.13: `GradScaler._get_scale_async`, the scale without a
host synchronisation, and `GradScaler._per_optimizer_states`, where it is kept whose gradients are
unscaled already, by the id of the optimizer. (Fused optimizers unscale within their step: theirs
never are.)
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn import Parameter
from torch.optim import Optimizer

from noisescale.batches.to_device import to_device


class LossScale:
    """The loss scale of a step. Read it before the scaler's `step` and `update`.

    Args:
        scaler: None, or a disabled one: losses are not scaled.
        parameters: Those whose gradients are normed. The optimizer that steps them is asked for.
    """

    def __init__(self, scaler: GradScaler | None, parameters: Sequence[Parameter] = ()) -> None:
        self._scaler = scaler
        self._measured = {id(p) for p in parameters}
        self._owns: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def unscale(self, sq_norms: Tensor, *, unscaled_with_gradients: bool = False) -> Tensor:
        """Return squared norms as they would be without the scale.

        Args:
            sq_norms: Squared norms of scaled gradients.
            unscaled_with_gradients: Whether they are the norms of the current `p.grad`, which the
                scaler may have unscaled already (`unscale_`, for clipping).
        """
        scale = self._scale
        if scale is None:
            return sq_norms
        if unscaled_with_gradients and self._scaler and self._has_unscaled(self._scaler):
            return sq_norms
        return sq_norms / to_device(scale, sq_norms.device, sq_norms.dtype).square()

    def unscale_loss(self, loss: Tensor) -> Tensor:
        """Return a scaled loss as it was before."""
        scale = self._scale
        return loss if scale is None else loss / to_device(scale, loss.device, loss.dtype)

    @property
    def _scale(self) -> Tensor | None:
        """The scale on its device; None if losses are not scaled, or nothing has been yet."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        return self._scaler._get_scale_async()

    def _has_unscaled(self, scaler: GradScaler) -> bool:
        """Return whether the gradients of an optimizer that steps measured parameters are unscaled.

        Only a step whose norms were not captured at the end of its last pass gets here.
        """
        unscaled = {
            of
            for of, state in scaler._per_optimizer_states.items()
            if state["stage"] is OptState.UNSCALED
        }
        if not unscaled:
            return False
        if not unscaled <= {id(optimizer) for optimizer in self._owns}:
            # The scaler keeps no more than ids. All objects are searched, once an optimizer.
            for one in gc.get_objects():
                if issubclass(type(one), Optimizer):
                    self._owns[one] = not self._measured.isdisjoint(
                        id(p) for group in one.param_groups for p in group["params"]
                    )
        return any(owns and id(optimizer) in unscaled for optimizer, owns in self._owns.items())
