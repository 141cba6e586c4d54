# SPDX-License-Identifier: Apache-2.0
"""Looks at a run: the noise scale that `measure` found at the weights of its checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noisescale.bounded import Bounded
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    from noisescale.history.document import Part


@dataclass(frozen=True)
class Look:
    """The resolved noise scale at the weights of a checkpoint."""

    step: float
    noise_scale: float
    low: float
    high: float
    confidence: float
    unit: str
    batches: float
    checkpoint: str
    parameters: int
    """The number of trained numbers in the model."""
    seconds: float
    """How long measuring took."""

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Look:
        """Return a look from its fields in a document.

        Raises:
            ValueError, TypeError: If it is none.
        """
        found = cls(**saved)
        numbers = found.step, found.noise_scale, found.low, found.high
        if not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise ValueError("a look that is not resolved")
        return found

    @property
    def bounds(self) -> Bounded:
        """The noise scale with its bounds."""
        return Bounded(self.noise_scale, self.low, self.high)


def is_of(header: dict[str, Any], unit: str, parameters: int) -> bool:
    """Return whether a run is of a model and counts in a unit, by the header of the run."""
    return header["unit"] == unit and header["parameters"] in (None, parameters)


def record_beside(checkpoint: Path, name: str) -> Path | None:
    """Return the record in a checkpoint's folder, or in one of the two folders above it."""
    places = [folder / name for folder in (checkpoint.absolute() / name).parents[:3]]
    return next(filter(Path.is_file, places), None)


def runs_of(parts: dict[str, Part], unit: str, parameters: int, file: Path) -> list[Part]:
    """Return the newest runs in a document of a model and a unit, one of each monitor.

    Raises:
        Refusal: If there are none.
    """
    found = [part for part in parts.values() if is_of(part.header, unit, parameters)]
    if not found:
        headers = [part.header for part in parts.values()]
        got = ", ".join(f"{x['parameters']} parameters in {x['unit']}" for x in headers)
        raise Refusal(
            "run",
            f"be of the measured model, with {parameters} trained parameters in {unit}",
            f"{file} of {got or 'no run'}",
            "Give the folder of the checkpoint's run as `run`, and measure in its unit.",
        )
    return found


def line_of(part: Part, look: Look) -> str:
    """Return the line of a look in a document."""
    who = {name: part.header[name] for name in ("of", "run")}
    return json.dumps(who | {"look": vars(look)}, separators=(",", ":")) + "\n"
