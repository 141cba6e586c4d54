# SPDX-License-Identifier: Apache-2.0
"""Lightning's accelerator of the fake device, and its DDP there."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy

from fake_device.module import DEVICES


class FakeAccelerator(Accelerator):
    """Ranks beyond the devices that there are share them."""

    def setup_device(self, device: torch.device) -> None:
        torch.fake.set_device(device)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("fake", rank % DEVICES) for rank in devices]

    @staticmethod
    def auto_device_count() -> int:
        return DEVICES

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "fake"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


class FakeDDP(DDPStrategy):
    """Where DDP is given device ids, Lightning wraps the model on a stream of CUDA's."""

    def determine_ddp_device_ids(self) -> None:
        return None
