# SPDX-License-Identifier: Apache-2.0
"""The record of the fits to one file of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from noisescale.tradeoff.fit import TradeoffFit
from noisescale.tradeoff.regimes import Regimes


@dataclass(frozen=True)
class SweepFits:
    """The law of steps against batch size, fitted to each curve of a file."""

    curves: Mapping[str, TradeoffFit]
    """The fit of each curve, by its name. A file with one curve has it under the name ""."""
    regimes: Mapping[str, Regimes]
    """The law of each curve with its bounds, by the same names."""
    unit: str = "examples"
    optimal_batch_size: float | None = None
    """B_opt of Zhang et al. 2024: up to this batch size scaling counts as perfect."""
    confidence: float = 0.95
    source: Path | None = None
    """The file of the sweep."""
