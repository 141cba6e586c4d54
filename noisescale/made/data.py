# SPDX-License-Identifier: Apache-2.0
"""The data that a user's `make()` returns beside the module."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset


def train_and_val(data: Any) -> tuple[Any, Any]:
    """Return the data to train on, and the data to validate on or None.

    Args:
        data: A Dataset, a DataLoader or a LightningDataModule, or a pair of these: to train and to
            validate on. A list of two examples is a data set.

    Examples:
        >>> train_and_val([[1.0], [2.0]])
        ([[1.0], [2.0]], None)
        >>> train_and_val((DataLoader([1.0]), DataLoader([2.0])))[1].dataset
        [2.0]
    """
    pair = isinstance(data, tuple | list) and len(data) == 2 and any(map(_is_source, data))
    train, val = data if pair else (data, None)
    return train, val


def _is_source(data: Any) -> bool:
    return isinstance(data, Dataset | DataLoader) or hasattr(data, "train_dataloader")
