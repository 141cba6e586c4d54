# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from fits import classifier, fit_here, opaque_network, trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceXLAStrategy, XLAStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMonitor
from noisescale.guard import NotMeasured
from noisescale.lightning import trainer_access
from noisescale.lightning.supported import check_supported


def why_not(strategy: Any) -> str:
    """On two ranks."""
    with pytest.raises(NotMeasured) as error:
        check_supported(SimpleNamespace(strategy=strategy, world_size=2))
    return str(error.value)


def ddp(*comm_hooks: Any) -> Any:
    """The outside of DDP and its strategy: what is looked at before anything is measured."""
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(model)
    model._comm_hooks = [(hook, None) for hook in comm_hooks]
    return SimpleNamespace(model=model)


class OfXla(XLAStrategy):
    pass


@pytest.mark.parametrize("strategy", [XLAStrategy, SingleDeviceXLAStrategy, OfXla])
def test_strategies_of_xla_and_unknown_ones_are_not_measured(strategy: type) -> None:
    unknown = SimpleNamespace(model=torch.nn.Linear(1, 1))

    assert "XLA traces" in why_not(object.__new__(strategy))
    assert "`strategy` is SimpleNamespace" in why_not(unknown)


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (powerSGD_hook, "powerSGD_hook"),
        (fp16_compress_wrapper(powerSGD_hook), "powerSGD_hook"),
        (post_localSGD_hook, "post_localSGD_hook"),
    ],
)
def test_hooks_that_change_the_mean_are_not_measured(hook: Any, name: str) -> None:
    assert f"`ddp_comm_hook` is {name}" in why_not(ddp(hook))


def test_comm_hooks_that_keep_the_mean_are_supported() -> None:
    def refers_to_itself(state: Any, bucket: Any) -> Any:
        return refers_to_itself

    strategy = ddp(fp16_compress_hook, fp16_compress_wrapper(allreduce_hook), refers_to_itself)

    check_supported(SimpleNamespace(strategy=strategy, world_size=2))


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_both_packages_know_the_callback_and_its_exception(package: Any) -> None:
    monitor = NoiseScaleMonitor()

    assert isinstance(monitor, package.Callback)
    exceptions = package.utilities.exceptions
    assert issubclass(
        trainer_access.MisconfigurationException, exceptions.MisconfigurationException
    )
    assert trainer(1, package, strategy="auto", callbacks=[monitor]).callbacks[0] is monitor


def test_the_first_process_of_ddp_alone_is_told_too() -> None:
    strategy, model = DDPStrategy(start_method="fork"), classifier(net=opaque_network())

    with pytest.raises(Exception, match="nothing to measure"):  # warnings are errors here
        fit_here(NoiseScaleMonitor(), strategy=strategy, model=model)
