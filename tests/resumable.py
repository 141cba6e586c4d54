# SPDX-License-Identifier: Apache-2.0
"""Data, a module and a policy of runs that are broken off and resumed."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fits import classifier, data
from torch.optim import lr_scheduler

EXAMPLES = 320
EPOCHS = 4


class Resumable:
    """Batches of eight, of every second one on two ranks, that go on where a checkpoint was."""

    def __init__(self) -> None:
        self._position = 0
        self._data = data(EXAMPLES)

    def _mine(self) -> range:
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        return range(rank * 8, EXAMPLES // ranks // 8 * ranks * 8, 8 * ranks)

    def __len__(self) -> int:
        return len(self._mine())

    def __iter__(self) -> Iterator[Any]:
        mine = self._mine()
        for begin in mine[self._position :]:
            self._position = (self._position + 1) % len(mine)
            yield list(self._data[begin : begin + 8])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


def model(kind: str) -> Any:
    made = classifier()

    class Scheduled(type(made)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
            schedule: Any
            if kind == "cosine":
                # Not `estimated_stepping_batches`: once asked for it, Lightning 2.6.6 never loads
                # the state of a loader.
                total = EPOCHS * EXAMPLES // 8 // self.trainer.world_size // 2
                schedule = lr_scheduler.CosineAnnealingLR(optimizer, total)
            else:
                schedule = lr_scheduler.ExponentialLR(optimizer, 0.98)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Scheduled()


class Restless:
    """Wants three to seven batches of every device, always other ones, by the last bits it gets."""

    needs_noise_scale = True

    def __init__(self) -> None:
        self._asked = 0

    def __call__(self, noise_scale: Any, plan: Any, progress: Any) -> float:
        self._asked += 1
        chance = int(noise_scale.low * 2**30) + int(progress.learning_rate * 2**30)
        return float(16 * (3 + (2 * self._asked + chance % 2) % 5))

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._asked = state["asked"]
