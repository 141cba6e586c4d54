# SPDX-License-Identifier: Apache-2.0
"""Show only the noise scale and its interval in the console, not all logged keys."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from noisescale.guard import Guard, never_ends_training

SHOWN = ("noise_scale/simple", "noise_scale/simple_low", "noise_scale/simple_high")
"""The keys that the console shows if the noise scale is resolved."""

AT_LEAST = "noise_scale/lower_bound"
"""The key that the console shows if the noise scale is not resolved."""


class Fewer(TrainerCallback):
    """Remove keys from the logs before a callback that prints them."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.left_out: dict[str, Any] = {}

    @never_ends_training
    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """Keep three keys, or the lower bound, and remove the other keys."""
        kept = SHOWN if SHOWN[0] in (logs or {}) else (AT_LEAST,)
        self.left_out = {
            key: value
            for key, value in (logs or {}).items()
            if key.startswith("noise_scale/") and key not in kept
        }
        for key in self.left_out:
            (logs or {}).pop(key)


class All(TrainerCallback):
    """Put the removed keys back, for the callbacks after the one that prints."""

    def __init__(self, fewer: Fewer, guard: Guard) -> None:
        self._guard = guard
        self._fewer = fewer

    @never_ends_training
    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """Put the removed keys back."""
        if logs is not None:
            logs.update(self._fewer.left_out)
        self._fewer.left_out = {}


def print_less(callbacks: list[TrainerCallback], guard: Guard) -> None:
    """Put a pair of callbacks around each callback that prints logs, unless it has a pair.

    Args:
        callbacks: The Trainer's own list of callbacks. No event may be in progress.
        guard: Keeps errors away from the training.
    """
    for printer in [c for c in callbacks if isinstance(c, PrinterCallback | ProgressCallback)]:
        place = callbacks.index(printer)
        if place and isinstance(callbacks[place - 1], Fewer):
            continue
        fewer = Fewer(guard)
        callbacks.insert(place, fewer)
        callbacks.insert(place + 2, All(fewer, guard))


def print_all(callbacks: list[TrainerCallback]) -> None:
    """Remove the pairs that `print_less` added."""
    callbacks[:] = [c for c in callbacks if not isinstance(c, Fewer | All)]
