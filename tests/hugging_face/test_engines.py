# SPDX-License-Identifier: Apache-2.0
"""The engines of accelerate that shard, against DDP on the same batches.

On the CPU accelerate trains by DDP, whatever engine is asked for: what is lifted here is that
choice alone, and each test asserts the engine that ran.
"""

from typing import Any, NamedTuple

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from ranks import as_torchrun, on_ranks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import Trainer
from transformers_fits import Fit, fit, language_model, sentences

from noisescale.estimation.moments import GradientMoments
from noisescale.hugging_face import BatchSizeCallback, NoiseScaleCallback
from noisescale.meter.estimates import MomentSums

ENGINES: dict[str, tuple[int, type]] = {
    "FSDP1": (1, FullyShardedDataParallel),
    "FSDP2": (2, FSDPModule),
}


def sharded(version: int, layers: list[str]) -> dict[str, Any]:
    """Options of TrainingArguments; call it on a rank, which it lets shard on the CPU."""
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
        "transformer_layer_cls_to_wrap": layers,
        "sync_module_states": False,
        "cpu_ram_efficient_loading": False,
    }
    return {"fsdp": True, "fsdp_config": config}


class Run(NamedTuple):
    of: Fit
    warned: list[str]


def runs(engine: str | None, ranks: int = 2, **options: Any) -> list[Run]:
    """On some ranks."""

    def one() -> Run:
        kind = None
        told: list[str] = []

        class Checked(Trainer):
            def training_step(self, *arguments: Any, **keywords: Any) -> Any:
                nonlocal kind
                kind = kind or type(self.model_wrapped)
                return super().training_step(*arguments, **keywords)

        class Told(NoiseScaleCallback):
            def _tell(self, message: str) -> None:
                told.append(message)

        more: dict[str, Any] = {}
        if engine is not None:
            version, expected = ENGINES[engine]
            layers = ["LlamaDecoderLayer"] if "model" in options else ["Linear"]
            more = sharded(version, layers)
        run = fit(Told(window=50), kind=Checked, **options, **more)
        assert engine is None or issubclass(kind, expected), kind
        return Run(run._replace(parameters=[]), told)

    return on_ranks(ranks, as_torchrun(one))


def moments(run: Fit) -> GradientMoments:
    return MomentSums(**run.state["meter"]["estimates"]["sums"]).mean


LANGUAGE = {"model": language_model, "examples": sentences}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1},
        {"gradient_accumulation_steps": 2},
        {**LANGUAGE, "gradient_accumulation_steps": 2},
    ],
    ids=["clipped", "accumulation", "by labels, accumulation"],
)
def test_norms_are_those_under_ddp(engine: str, options: dict[str, Any]) -> None:
    plain, _ = runs(None, **options)
    found = runs(engine, **options)

    for run in found:
        assert run.warned == []
        assert moments(run.of) == pytest.approx(tuple(moments(plain.of)), rel=1e-4)
        assert run.of.noise_scale.value == pytest.approx(plain.of.noise_scale.value, rel=1e-4)


def losses_of_a_growing_batch(
    engine: str | None, ranks: int = 2, **options: Any
) -> list[list[float]]:
    def one() -> list[float]:
        more = {} if engine is None else sharded(ENGINES[engine][0], ["Linear"])
        callbacks = BatchSizeCallback({0: 8, 3: 24}, lr_scaling="none", max_batch_size=24)
        run = fit(callbacks, max_steps=12, **more, **options)
        return [row["loss"] for row in run.log_history if "loss" in row]

    return on_ranks(ranks, as_torchrun(one))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_size_that_grows_trains_as_under_ddp(engine: str) -> None:
    plain, found = losses_of_a_growing_batch(None), losses_of_a_growing_batch(engine)

    assert len(plain[0]) < 12
    assert found[0] == pytest.approx(plain[0], rel=1e-4)


# Of accelerate 1.15 on torch 2.13.
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim from root mesh")
def test_shards_and_their_replicas_are_measured_and_scheduled() -> None:
    """Two replicas of two shards, by accelerate's configuration of parallelism."""
    options = {**LANGUAGE, "per_device_train_batch_size": 2}
    both = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    plain = runs(None, ranks=4, **options)[0]
    found = runs("FSDP2", ranks=4, parallelism_config=both, **options)

    for run in found:
        assert run.warned == []
        assert moments(run.of) == pytest.approx(tuple(moments(plain.of)), rel=1e-4)

    options = {"per_device_train_batch_size": 2}
    expected = losses_of_a_growing_batch(None, ranks=4, **options)
    grown = losses_of_a_growing_batch("FSDP2", ranks=4, parallelism_config=both, **options)
    assert len(expected[0]) < 12
    assert grown[0] == pytest.approx(expected[0], rel=1e-4)
