# SPDX-License-Identifier: Apache-2.0
"""One training step under DDP: plain, with our meter, and as each public peer measures in it.

A peer is its one file that measures the noise scale, loaded by path out of the installed
distribution: the packages around these files import much else, the files themselves torch and
numpy alone. Each is used as its own documentation has it.

    pip install --no-deps -r benchmarks/peers-requirements.txt
"""

from __future__ import annotations

import importlib.metadata
import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter

# Low enough that a benchmark's steps leave every copy in the same phase of training.
LEARNING_RATE = 1e-3


class PlainDdp:
    """A copy of the model in training; the classes below add their measuring to it.

    Args:
        model: The copy to train, not wrapped.
        batch_size: Examples of this rank in a batch.
        bf16: Whether the forward pass runs under bfloat16 autocast.
    """

    name = "plain DDP"
    package = "torch"

    def __init__(self, model: nn.Module, batch_size: int, *, bf16: bool = False) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        self.batch_size = batch_size
        self.bf16 = bf16
        self.attach()

    def attach(self) -> None:
        """Set up what measures."""

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.bf16):
            loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.backward(loss)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def noise_scale(self) -> float:
        """What a logger would read, in examples; NaN where there is none."""
        return math.nan


class PlainDdpAgain(PlainDdp):
    """A second copy, for the machine's own noise."""

    name = "plain DDP again"


class Ours(PlainDdp):
    """`NoiseScaleMeter`, at every step."""

    name = package = "noisescale"

    def attach(self) -> None:
        self.meter = NoiseScaleMeter(self.model, every_n_steps=1)

    def backward(self, loss: Tensor) -> None:
        self.meter.backward(loss, local_batch_size=self.batch_size)
        self.meter.step()

    def noise_scale(self) -> float:
        return self.meter.noise_scale.value


class OursByGroups(Ours):
    """Biases and the first layer apart."""

    name = "noisescale by groups"

    def attach(self) -> None:
        groups = {"biases": "bias", "first layer": "^0"}
        self.meter = NoiseScaleMeter(self.model, groups=groups, every_n_steps=1)


class KDiffusion(PlainDdp):
    """`DDPGradientStatsHook`, a comm hook, and `GradientNoiseScale`."""

    name = package = "k-diffusion"

    def attach(self) -> None:
        gns = load_file(self.package, "k_diffusion/gns.py")
        self.hook = gns.DDPGradientStatsHook(self.model)
        self.gns = gns.GradientNoiseScale()

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        global_batch_size = self.batch_size * dist.get_world_size()
        self.gns.update(*self.hook.get_stats(), self.batch_size, global_batch_size)

    def noise_scale(self) -> float:
        return float(self.gns.get_gns())


class AdaptDl(PlainDdp):
    """`GradientNoiseScale` of AdaptDL (Pollux): a hook on every parameter."""

    name = package = "adaptdl"

    def attach(self) -> None:
        file = load_file(self.package, "adaptdl/torch/gradient_noise_scale.py")
        ranks = dist.get_world_size()
        self.gns = file.GradientNoiseScale(self.model, self.optimizer, num_replicas=ranks)

    def zero_grad(self) -> None:
        self.gns.reset_accumulation()

    def noise_scale(self) -> float:
        return float(self.batch_size * self.gns.var_avg() / self.gns.sqr_avg())


class FairScale(PlainDdp):
    """`AdaScale`: a hook on every parameter, and its gain on the learning rate."""

    name = package = "fairscale"

    def attach(self) -> None:
        self.optimizer = load_file(self.package, "fairscale/optim/adascale.py").AdaScale(
            self.optimizer
        )

    def noise_scale(self) -> float:
        variance, square = self.optimizer._grad_var_avg(), self.optimizer._grad_sqr_avg()
        return self.batch_size * variance / square if square else math.inf


PEERS = (KDiffusion, AdaptDl, FairScale)


def version(training: type[PlainDdp]) -> str | None:
    """Version of what a row measures with; None where it is not installed."""
    try:
        return importlib.metadata.version(training.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def load_file(package: str, path: str) -> ModuleType:
    """Run one file of an installed distribution, without the package it lies in."""
    location = importlib.metadata.distribution(package).locate_file(path)
    spec = spec_from_file_location(Path(path).stem, str(location))
    if spec is None or spec.loader is None:
        raise ImportError(f"{package} has no Python file {path}.")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
