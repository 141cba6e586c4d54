# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed under the Trainer of transformers, against DDP on the same batches.

accelerate steps inside the backward pass there. On CPU it takes no note of the ranks, which is
lifted here.
"""

from typing import Any

import deepspeed_engines
import pytest
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from ranks import as_torchrun, on_ranks
from transformers import Trainer
from transformers_fits import Fit, fit, language_model, sentences

from noisescale.estimation.moments import GradientMoments
from noisescale.hugging_face import BatchSizeCallback, NoiseScaleCallback
from noisescale.meter.estimates import MomentSums

pytestmark = [*deepspeed_engines.QUIET, pytest.mark.filterwarnings("ignore::UserWarning")]


def engine(stage: int) -> dict[str, Any]:
    """Options of TrainingArguments; call it on a rank."""
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


def runs(stage: int | None, **options: Any) -> list[tuple[Fit, list[str]]]:
    """On two ranks."""

    def one() -> tuple[Fit, list[str]]:
        kinds = set()
        told: list[str] = []

        class Checked(Trainer):
            def training_step(self, *arguments: Any, **keywords: Any) -> Any:
                kinds.add(type(self.model_wrapped).__name__)
                return super().training_step(*arguments, **keywords)

        class Told(NoiseScaleCallback):
            def _tell(self, message: str) -> None:
                told.append(message)

        more = {} if stage is None else engine(stage)
        run = fit(Told(window=50, small_batch="micro_batch"), kind=Checked, **options, **more)
        assert kinds == {"DistributedDataParallel" if stage is None else "DeepSpeedEngine"}
        return run._replace(parameters=[]), told

    return on_ranks(2, as_torchrun(one))


def moments(run: Fit) -> GradientMoments:
    return MomentSums(**run.state["meter"]["estimates"]["sums"]).mean


LANGUAGE = {"model": language_model, "examples": sentences}


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1},
        {"gradient_accumulation_steps": 2, "learning_rate": 0.0},
        {**LANGUAGE, "gradient_accumulation_steps": 2, "learning_rate": 0.0},
    ],
    ids=["clipped", "accumulation", "by labels, accumulation"],
)
def test_norms_are_those_under_ddp(options: dict[str, Any]) -> None:
    """DDP is asked for micro-batches, too, as they are the small batches of an engine."""
    plain, _ = runs(None, **options)[0]
    for stage in (1, 2, 3):
        for run, warned in runs(stage, **options):
            assert warned == []
            assert run.state["meter"]["counts"]["steps"] == 7
            assert moments(run) == pytest.approx(tuple(moments(plain)), rel=1e-4)


def test_a_batch_size_that_grows_trains_as_under_ddp() -> None:
    def losses(stage: int | None) -> list[list[float]]:
        def one() -> list[float]:
            more = {} if stage is None else engine(stage)
            callbacks = BatchSizeCallback({0: 8, 3: 24}, lr_scaling="none", max_batch_size=24)
            run = fit(callbacks, max_steps=12, **more)
            return [row["loss"] for row in run.log_history if "loss" in row]

        return on_ranks(2, as_torchrun(one))

    plain, found = losses(None), losses(2)

    assert len(plain[0]) < 12
    assert found[0] == pytest.approx(plain[0], rel=1e-4)
