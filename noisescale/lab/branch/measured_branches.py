# SPDX-License-Identifier: Apache-2.0
"""The record of the branches of a run: what they took, and what the noise scale says beside."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from noisescale.bounded import Bounded
from noisescale.prediction.branches import BranchedRun


@dataclass(frozen=True)
class BranchesRecord:
    """The branches of a run, and the critical batch size that they and the noise scale give."""

    branched: BranchedRun
    """The run and its branches, as the file has them."""
    by_noise_scale: Bounded
    """B_crit from the noise scale that the run measured over the same steps."""
    output: str
    """The file of the branches."""
    run: str | None = None
    """The folder of the run, if it was read from one."""

    @property
    def critical_batch_size(self) -> Bounded | None:
        """B_crit from the branches to their end; None if no branch reached the loss."""
        return self._critical_until(None)

    @property
    def critical_batch_size_half_way(self) -> Bounded | None:
        """B_crit from the branches up to their middle, as a check; None if it is not known."""
        half = self.branched.half_way
        return None if half is None else self._critical_until(half)

    def _critical_until(self, until: tuple[float, float] | None) -> Bounded | None:
        with suppress(ValueError):
            return self.branched.critical_batch_size(until)
        return None
