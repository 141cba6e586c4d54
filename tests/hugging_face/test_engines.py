# SPDX-License-Identifier: Apache-2.0
"""The engines of accelerate that shard, against DDP on the same batches.

On the CPU accelerate trains by DDP, whatever engine is asked for: what is lifted here is that
choice alone, and each test asserts the engine that ran.
"""

from functools import partial
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers_fits import check_growing_batch, fits_by

pytestmark = pytest.mark.slow

ENGINES = {"FullyShardedDataParallel": 1, "FSDPModule": 2}
DDP = "DistributedDataParallel"


def sharded(version: int, layer: str = "Linear") -> dict[str, Any]:
    """Options of TrainingArguments for a rank, which it lets shard on the CPU."""
    original = AcceleratorState.__init__

    def init(self: AcceleratorState, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if (plugin := options.get("fsdp_plugin")) is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = plugin
            self.device = torch.device("cpu")  # and not "cpu:0", which FSDP1 does not take
            known = {"distributed_type": self.distributed_type, "device": self.device}
            PartialState._shared_state.update(known)

    AcceleratorState.__init__ = init  # type: ignore[method-assign]
    config = {
        "version": version,
        "transformer_layer_cls_to_wrap": [layer],
        "sync_module_states": False,
        "cpu_ram_efficient_loading": False,
    }
    return {"fsdp": True, "fsdp_config": config}


@pytest.mark.parametrize("wrapper", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1},
        {"gradient_accumulation_steps": 2},
        {"language": True, "gradient_accumulation_steps": 2},
    ],
    ids=["clipped", "accumulation", "by labels, accumulation"],
)
def test_norms_are_those_under_ddp(wrapper: str, options: dict[str, Any]) -> None:
    layer = "LlamaDecoderLayer" if "language" in options else "Linear"
    plain, _ = fits_by(DDP, **options)[0]

    for run, warned in fits_by(wrapper, partial(sharded, ENGINES[wrapper], layer), **options):
        assert warned == []
        assert run.moments == pytest.approx(tuple(plain.moments), rel=1e-4)
        assert run.noise_scale.value == pytest.approx(plain.noise_scale.value, rel=1e-4)


@pytest.mark.parametrize("version", ENGINES.values())
def test_a_batch_size_that_grows_trains_as_under_ddp(version: int) -> None:
    check_growing_batch(partial(sharded, version))


# Of accelerate 1.15 on torch 2.13.
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim from root mesh")
def test_shards_and_their_replicas_are_measured_and_scheduled() -> None:
    """Two replicas of two shards, by accelerate's configuration of parallelism."""
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "ranks": 4}
    both = {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}
    plain, _ = fits_by(DDP, language=True, **options)[0]
    fsdp2 = partial(sharded, 2, "LlamaDecoderLayer")

    for run, warned in fits_by("FSDPModule", fsdp2, language=True, **options, **both):
        assert warned == []
        assert run.moments == pytest.approx(tuple(plain.moments), rel=1e-4)

    check_growing_batch(partial(sharded, 2), **options, **both)
