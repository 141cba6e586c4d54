# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine, on CPU or CUDA, for tests. Import it before deepspeed.

What is lifted here is that its operators are compiled, which takes a minute, and that it trains in
float16 on GPUs alone.
"""

import os
from typing import Any

import devices
import pytest

os.environ["DS_ACCELERATOR"] = devices.name
deepspeed = pytest.importorskip("deepspeed", reason="pip install deepspeed")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from torch import nn  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.disabled = True
get_accelerator().is_fp16_supported = lambda: True

QUIET = [
    # torch 2.13 on DeepSpeed 0.19.
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]


def engine_of(
    net: nn.Module, stage: int, passes: int = 1, lr: float = 0.0, only: str = "", **config: Any
) -> Any:
    """An engine, in a fork that `as_torchrun` has set up."""
    torch.set_num_threads(1)
    deepspeed.init_distributed(devices.backend(dist.get_rank()))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": passes,
        "zero_optimization": {"stage": stage, **config.pop("zero", {})},
        "zero_allow_untested_optimizer": True,
        **config,
    }
    stepped = [p for n, p in net.named_parameters() if p.requires_grad and n.startswith(only)]
    optimizer = torch.optim.SGD(stepped, lr=lr)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    assert engine.zero_optimization_stage() == stage
    assert engine.dp_world_size == dist.get_world_size()
    return engine
