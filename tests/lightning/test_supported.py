# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from fits import classifier, fit_sharded, loader, opaque_network, trainer
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
from noisescale.collectors.sharded import fsdp2_units
from noisescale.guard import NotMeasured
from noisescale.lightning import trainer_access
from noisescale.lightning.supported import check_supported


def why_not(fitting: Any) -> str:
    with pytest.raises(NotMeasured) as error:
        check_supported(fitting)
    return str(error.value)


def ddp(*comm_hooks: Any) -> Any:
    """A DDP module's outside: what is looked at before anything is measured."""
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(model)
    model._comm_hooks = [(hook, None) for hook in comm_hooks]
    return model


def set_up(strategy: Any = None, **options: Any) -> Any:
    """A Trainer as it stands when a fit starts."""
    if strategy is None:
        strategy = SimpleNamespace(model=ddp(), precision_plugin=SimpleNamespace())
    defaults = {
        "strategy": strategy,
        "world_size": 2,
        "lightning_module": SimpleNamespace(automatic_optimization=True),
        "optimizers": [],
        "precision": "32-true",
    }
    return SimpleNamespace(**{**defaults, **options})


@pytest.mark.parametrize("strategy", [XLAStrategy, SingleDeviceXLAStrategy])
def test_other_strategies_are_not_measured(strategy: type) -> None:
    assert why_not(set_up(object.__new__(strategy))) == (
        f"`strategy` is {strategy.__name__}: XLA traces steps instead of running them."
        ' Use `strategy="ddp"`.'
    )


def test_subclasses_and_unknown_strategies_are_not_measured() -> None:
    class Mine(XLAStrategy):
        pass

    unknown = SimpleNamespace(model=torch.nn.Linear(1, 1))

    assert "is XLAStrategy: XLA traces" in why_not(set_up(object.__new__(Mine)))
    assert "is SimpleNamespace: it trains neither by DDP nor FSDP nor DeepSpeed." in why_not(
        set_up(unknown)
    )


@pytest.mark.parametrize(
    ("hook", "name", "reason"),
    [
        (powerSGD_hook, "powerSGD_hook", "PowerSGD replaces the mean gradient by a low-rank"),
        (fp16_compress_wrapper(powerSGD_hook), "powerSGD_hook", "PowerSGD replaces"),
        (post_localSGD_hook, "post_localSGD_hook", "post-local SGD stops averaging gradients"),
    ],
)
def test_hooks_that_change_the_mean_are_not_measured(hook: Any, name: str, reason: str) -> None:
    strategy = SimpleNamespace(model=ddp(hook), precision_plugin=SimpleNamespace())

    text = why_not(set_up(strategy))

    assert text.startswith(f"`ddp_comm_hook` is {name}: {reason}")
    assert text.endswith("Use a hook that keeps the mean, such as `fp16_compress_hook`, or none.")


def test_comm_hooks_that_keep_the_mean_are_supported() -> None:
    def refers_to_itself(state: Any, bucket: Any) -> Any:
        return refers_to_itself

    model = ddp(fp16_compress_hook, fp16_compress_wrapper(allreduce_hook), refers_to_itself)

    check_supported(set_up(SimpleNamespace(model=model, precision_plugin=SimpleNamespace())))


def warnings_of_a_sharded_fit(**options: Any) -> list[list[str]]:
    """What the monitor warns of on each rank, as many as train."""

    class Told(NoiseScaleMonitor):
        def _tell(self, message: str) -> None:
            told.append(message)

    told: list[str] = []
    model = classifier(sharded=True)
    return fit_sharded(Told(), model=model, results=lambda *_: told, **options)


def test_sharding_is_not_measured_before_torch_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2_units, "TAKES_A_REDUCE_SCATTER", False)
    message = (
        "`model` must be trained by DistributedDataParallel before torch 2.9, got one sharded by"
        f" `fully_shard` in torch {torch.__version__}: in that version FSDP2 does not show"
        " unsharded gradients. Update torch. Training goes on"
    )

    for told in warnings_of_a_sharded_fit():
        assert message in "".join(told)


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
    monitor = NoiseScaleMonitor()
    alone = trainer(1, strategy=DDPStrategy(start_method="fork"), callbacks=[monitor])

    with pytest.raises(Exception, match="nothing to measure"):  # warnings are errors here
        alone.fit(classifier(net=opaque_network()), loader())
