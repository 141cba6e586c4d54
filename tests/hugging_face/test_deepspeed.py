# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed under the Trainer of transformers, against DDP on the same batches.

accelerate steps inside the backward pass there. On CPU it takes no note of the ranks, which is
lifted here.
"""

from functools import partial
from typing import Any

import deepspeed_engines
import pytest
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers_fits import check_growing_batch, fits_by

IGNORED = pytest.mark.filterwarnings("ignore::UserWarning")
pytestmark = [pytest.mark.slow, IGNORED, *deepspeed_engines.QUIET]


def engine(stage: int) -> dict[str, Any]:
    PartialState._prepare_backend = lambda *_, **__: (  # type: ignore[method-assign]
        "gloo",
        DistributedType.MULTI_CPU,
    )
    config = {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    return {"use_cpu": False, "deepspeed": config}


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1},
        {"gradient_accumulation_steps": 2, "learning_rate": 0.0},
        {"language": True, "gradient_accumulation_steps": 2, "learning_rate": 0.0},
    ],
    ids=["clipped", "accumulation", "by labels, accumulation"],
)
def test_norms_are_those_under_ddp(options: dict[str, Any]) -> None:
    """DDP is asked for micro-batches, too, as they are the small batches of an engine."""
    options = {**options, "small_batch": "micro_batch"}
    plain, _ = fits_by("DistributedDataParallel", **options)[0]
    for stage in (1, 2, 3):
        for run, warned in fits_by("DeepSpeedEngine", partial(engine, stage), **options):
            assert warned == []
            assert run.state["meter"]["counts"]["steps"] == 7
            assert run.moments == pytest.approx(tuple(plain.moments), rel=1e-4)


def test_a_batch_size_that_grows_trains_as_under_ddp() -> None:
    check_growing_batch(partial(engine, 2))
