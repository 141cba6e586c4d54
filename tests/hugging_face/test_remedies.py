# SPDX-License-Identifier: Apache-2.0
"""What NoiseScaleCallback says helps does help: each remedy is followed, and is measured then."""

from typing import Any

import pytest
from fits import CLASSES, FEATURES, heard
from refused import refused
from torch import nn

from noisescale import predict

BATCHED = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


@pytest.mark.parametrize(
    ("remedy", "net", "small_batch", "batch_sizes"),
    [
        ("`gradient_accumulation_steps=2`), or use", BATCHED, "auto", (10, 10)),
        ("use half of `per_device_train_batch_size`", BATCHED, "auto", (60, 30)),
        ("use half of `per_device_train_batch_size`", None, "micro_batch", (60, 30)),
    ],
)
def test_what_the_callback_says_helps_does(
    remedy: str, net: Any, small_batch: str, batch_sizes: tuple[int, int], hf: Any
) -> None:
    def measured(batch_size: int, accumulation: int) -> Any:
        callback = hf.NoiseScaleCallback(every_n_steps=1, small_batch=small_batch)
        with heard():
            hf.fit(
                callback,
                model=lambda: hf.Classifier(net),
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                max_steps=3,
            )
        return callback

    with refused("run", remedy=remedy):
        predict(measured(batch_sizes[0], 2 if batch_sizes[0] == 60 else 1))
    assert measured(batch_sizes[1], 2).history["measured_steps"][-1] == 3
