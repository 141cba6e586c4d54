# SPDX-License-Identifier: Apache-2.0
"""A change of the batch size, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass

from noisescale.plan import Plan


@dataclass(frozen=True)
class Move:
    """One change of the batch size.

    Example:
        >>> print(Move(64, 2048.0, 100.0, Plan(8, 4), Plan(8, 12), 1.732, "asked for"))
        step 64: batch size 32 -> 96 = 8 x 12 micro-batches x 1 device, lr x 1.73: asked for
    """

    step: int
    """Optimizer steps taken before it."""
    examples: float
    """Examples of all devices before it."""
    wanted: float
    """The batch size that the policy asked for."""
    before: Plan
    after: Plan
    lr_factor: float
    """The factor on the learning rate from here on."""
    reason: str

    @property
    def changes_batch_size(self) -> bool:
        """Whether it does: the same batch size may be made up in another way."""
        return self.before.batch_size != self.after.batch_size

    def __str__(self) -> str:
        return (
            f"step {self.step}: batch size {self.before.batch_size:g} -> {self.after},"
            f" lr x {self.lr_factor:.3g}: {self.reason}"
        )
