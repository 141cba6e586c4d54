# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import pytest
from ranks import on_ranks
from refused import refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter, NoiseScaleMonitor
from noisescale.guard import NotMeasured
from noisescale.hugging_face import NoiseScaleCallback
from noisescale.meter import choosing
from noisescale.meter.choosing import choose_collector
from noisescale.meter.options import MeterOptions
from noisescale.methods.inner_product import NoiseAlongGradient


def test_a_model_without_trained_parameters_is_not_measured() -> None:
    with pytest.raises(NotMeasured, match=r"^`model` must .* got none"):
        choose_collector(nn.Linear(2, 2), MeterOptions(), parameters=[])


def test_parameters_on_meta_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))

    with refused("model", got="'1.weight' and 1 more on the device meta"):
        NoiseScaleMeter(model)
    assert NoiseScaleMeter(model, parameters=model[0].parameters()).device.type == "cpu"


def test_one_process_has_no_other_rank_to_compare_with() -> None:
    with refused("small_batch", requirement="in one process", remedy='"auto"'):
        choose_collector(nn.Linear(2, 2), MeterOptions(small_batch="rank"))


def test_several_processes_do_not_compare_halves_nor_spare_ranks() -> None:
    def chosen() -> str:
        model = DistributedDataParallel(nn.Linear(2, 2))
        with refused("small_batch", requirement="several processes", remedy='"auto"'):
            choose_collector(model, MeterOptions(small_batch="half"))
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("spare", "expert"))
        return type(choose_collector(model, MeterOptions())).__name__

    assert on_ranks(2, chosen) == ["DdpCollector"] * 2


def test_ranks_that_share_the_tokens_of_a_batch_are_not_measured_under_ddp_either() -> None:
    def refusal() -> str:
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context_parallel"))
        model = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(NotMeasured, match="data parallel") as error:
            choose_collector(model, MeterOptions())
        return str(error.value)

    assert all("(mesh dimension 'context_parallel')" in said for said in on_ranks(4, refusal))


@pytest.mark.parametrize("options", [{"extra": [NoiseAlongGradient]}, {"small_batch": "half"}])
def test_shards_have_no_further_measurements_and_no_halves(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(choosing, "is_sharded", lambda _: True)

    with refused("small_batch", requirement="if gradients are sharded"):
        choose_collector(model, MeterOptions(**options))


@pytest.mark.parametrize("made", [MeterOptions, NoiseScaleMonitor, NoiseScaleCallback])
def test_another_small_batch_is_refused_and_accumulation_named(made: Callable[..., Any]) -> None:
    ways = '"auto", "rank", "micro_batch", "half"'
    with refused("small_batch", requirement=ways, got="'example'", remedy="two micro-batches"):
        made(small_batch="example")
