# SPDX-License-Identifier: Apache-2.0
"""What a meter counts along a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

_NOT_SAVED_EARLIER = ("measured_steps", "lone_since")


@dataclass
class Counts:
    """The counts of a meter, which its `state_dict` has under these names."""

    steps: int = 0
    """Optimizer steps, measured or not."""
    last_measured_step: int = 0
    """Steps up to the last one that was to be measured."""
    measured_steps: int = 0
    """Steps in the averages."""
    skipped_steps: int = 0
    """Steps that were to be measured and were left out."""
    examples: float = 0.0
    """Of all ranks, up to the last step that was to be measured."""
    unmeasured_examples: float = 0.0
    """This rank's since that step."""
    batch_size: float = math.nan
    """Global, of that step."""
    accumulation: int = 1
    """Micro-batches of this rank in that step."""
    lone_since: int | None = None
    """The step since which those to be measured had too few micro-batches to compare."""

    def close_measured(self, micro_batches: int, *, least: int) -> None:
        """Count the step that was just taken, and that is measured from `least` micro-batches."""
        self.unmeasured_examples = 0.0
        self.last_measured_step = self.steps
        self.accumulation = micro_batches or self.accumulation
        if micro_batches >= least:
            self.lone_since = None
        elif self.lone_since is None:
            self.lone_since = self.steps

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs, in builtins."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from a `state_dict`, from all that it has.

        Raises:
            KeyError: If something is missing in it.
        """
        for name in asdict(self):
            if name in state:
                setattr(self, name, state[name])
            elif name not in _NOT_SAVED_EARLIER:
                raise KeyError(name)
