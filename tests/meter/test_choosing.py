# SPDX-License-Identifier: Apache-2.0
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter, NoiseScaleMonitor
from noisescale.collectors.per_example.collector import PerExampleCollector
from noisescale.guard import NotMeasured
from noisescale.hugging_face import NoiseScaleCallback
from noisescale.meter import choosing
from noisescale.meter.choosing import choose_collector
from noisescale.meter.options import MeterOptions
from noisescale.methods.inner_product import NoiseAlongGradient


def meter(**options: Any) -> NoiseScaleMeter:
    return NoiseScaleMeter(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), **options)


def test_normalization_layers_are_compared_by_example_without_saying_so() -> None:
    measuring = meter(layers="normalization")

    assert isinstance(measuring._capture.collector, PerExampleCollector)
    measuring.close()
    for made in (NoiseScaleMonitor, NoiseScaleCallback):
        assert made(layers="normalization")._options.small_batch == "example"


@pytest.mark.parametrize("made", [meter, NoiseScaleMonitor, NoiseScaleCallback])
@pytest.mark.parametrize("small_batch", ["rank", "micro_batch"])
def test_layers_of_another_small_batch_are_refused(
    made: Callable[..., Any], small_batch: str
) -> None:
    message = (
        f'`layers` must be "all" with `small_batch="{small_batch}"`, got \'normalization\': only'
        " single examples are measured layer by layer. Leave `small_batch` out."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        made(small_batch=small_batch, layers="normalization")


def test_layers_and_what_is_measured_beside_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="`extra` must be empty if examples are the small batches"):
        NoiseScaleMonitor(layers="normalization", extra=[NoiseAlongGradient])


def test_a_model_without_trained_parameters_is_not_measured() -> None:
    message = (
        "`model` must have parameters that require a gradient, got none."
        " Unfreeze some before training starts."
    )
    with pytest.raises(NotMeasured, match=f"^{re.escape(message)}$"):
        choose_collector(nn.Linear(2, 2), MeterOptions(), parameters=[])


def test_parameters_on_meta_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    message = (
        "`model` must hold the numbers of its parameters, got '1.weight' and 1 more on the device"
        " meta. Make them first (`to_empty`, or `load_state_dict` with `assign=True`), or leave"
        " them out by `parameters`."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NoiseScaleMeter(model)
    assert NoiseScaleMeter(model, parameters=model[0].parameters()).device.type == "cpu"


def test_one_process_has_no_other_rank_to_compare_with() -> None:
    message = (
        '`small_batch` must be "half", "micro_batch" or "example" in one process, got "rank": there'
        ' is no other rank to compare with. Leave it at "auto".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_collector(nn.Linear(2, 2), MeterOptions(small_batch="rank"))


def test_several_processes_do_not_compare_halves() -> None:
    def refusal() -> str:
        model = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="must be") as error:
            choose_collector(model, MeterOptions(small_batch="half"))
        return str(error.value)

    message = (
        '`small_batch` must be "rank", "micro_batch" or "example" if several processes train, got'
        ' "half": comparing the gradients of the processes needs no extra pass. Leave it at "auto".'
    )
    assert on_ranks(2, refusal) == [message] * 2


def test_ranks_that_share_the_tokens_of_a_batch_are_not_measured_under_ddp_either() -> None:
    def refusal() -> str:
        torch.set_num_threads(1)
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context_parallel"))
        model = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(NotMeasured, match="must be data parallel only") as error:
            choose_collector(model, MeterOptions())
        return str(error.value)

    def measured() -> str:
        torch.set_num_threads(1)
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("spare", "expert"))
        model = DistributedDataParallel(nn.Linear(2, 2))
        return type(choose_collector(model, MeterOptions())).__name__

    assert all("(mesh dimension 'context_parallel')" in said for said in on_ranks(4, refusal))
    assert on_ranks(2, measured) == ["DdpCollector"] * 2


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"small_batch": "example"}, "'example' and none"),
        ({"extra": [NoiseAlongGradient]}, "'auto' and NoiseAlongGradient"),
    ],
)
def test_sharded_gradients_are_compared_by_micro_batches_of_ranks_alone(
    options: dict[str, Any], got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(choosing, "is_sharded", lambda _: True)

    with pytest.raises(ValueError, match=f"if gradients are sharded, got {got}"):
        choose_collector(model, MeterOptions(**options))
