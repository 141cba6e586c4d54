# SPDX-License-Identifier: Apache-2.0
"""What the commands that train share: texts of the module and its data, and a panel of options."""

from __future__ import annotations

TRAINER = {
    "Settings of the Trainer": "max_device_batch_size gradient_clip_val gradient_clip_algorithm"
    " devices nodes accelerator strategy precision"
}

TRAINED = {
    "target": "A function that returns a LightningModule and its data, or a LightningModule."
    " Written as package.module:name or file.py:name.",
    "data": "A Dataset, DataLoader or LightningDataModule, or a function that returns one of these."
    " Written as package.module:name or file.py:name. Default: what TARGET returns, else the"
    " loaders that the module makes.",
    "nodes": "Number of nodes. Start the command on each node, as in training.",
}
