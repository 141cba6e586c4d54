# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from noisescale.user_code.targets import train_and_val

TRAIN, VAL = TensorDataset(torch.zeros(4)), TensorDataset(torch.ones(2))
TWO_EXAMPLES = [(torch.zeros(1), 0), (torch.ones(1), 1)]


@pytest.mark.parametrize("data", [TRAIN, DataLoader(TRAIN), [torch.zeros(1)] * 3, TWO_EXAMPLES])
def test_data_alone_are_trained_on(data: Any) -> None:
    train, val = train_and_val(data)

    assert train is data
    assert val is None


def test_a_data_module_has_its_own_data_to_validate_on() -> None:
    from pytorch_lightning import LightningDataModule

    test_data_alone_are_trained_on(LightningDataModule.from_datasets(TRAIN, VAL))


@pytest.mark.parametrize("pair", [(TRAIN, VAL), (DataLoader(TRAIN), DataLoader(VAL)), [TRAIN, VAL]])
def test_a_pair_is_to_train_and_to_validate_on(pair: Any) -> None:
    train, val = train_and_val(pair)

    assert train is pair[0]
    assert val is pair[1]
