# SPDX-License-Identifier: Apache-2.0
"""Lightning's DeepSpeedStrategy, which accumulates and steps by itself."""

from typing import Any

import deepspeed_engines
import pytest
import torch
from brute_force import brute_force
from fits import CLASSES, FEATURES, classifier, fit_sharded, loader
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

pytestmark = [
    *deepspeed_engines.QUIET,
    pytest.mark.filterwarnings("ignore:The `use_deterministic_algorithms"),
]
EXAMPLES, BATCH_SIZE = 100, 8


class DeepSpeedAnywhere(DeepSpeedStrategy):
    """Without Lightning's check for a GPU."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # the engine asks for an index

    def setup_environment(self) -> None:
        super(DDPStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        torch.set_num_threads(1)
        self.set_world_ranks()
        self._process_group_backend = "gloo"
        deepspeed_engines.deepspeed.init_distributed("gloo")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def fit(stage: int, *callbacks: Any, results: Any, **options: Any) -> list[Any]:
    strategy = DeepSpeedAnywhere(stage=stage)
    strategy.config["zero_allow_untested_optimizer"] = True
    return fit_sharded(
        *callbacks,
        strategy=strategy,
        model=classifier(net=network(), lr=0.0),
        train_loader=loader(BATCH_SIZE, EXAMPLES),
        results=results,
        **options,
    )


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_norms_are_those_of_brute_force(
    stage: int, accumulated: int, recorded: list[StepNorms]
) -> None:
    """The last window of an epoch goes on in the next: seven batches a rank."""
    found = fit(
        stage,
        NoiseScaleMonitor(every_n_steps=1),
        accumulate_grad_batches=accumulated,
        gradient_clip_val=0.1,
        log_every_n_steps=1,
        results=lambda fitting, _: (
            list(recorded),
            fitting.callbacks[0].history["step"].tolist(),
            type(fitting.strategy.model).__name__,
        ),
    )

    expected = brute_force(
        network(),
        ranks=2,
        accumulated=accumulated,
        compared="micro_batch",
        examples=EXAMPLES,
        batch_size=BATCH_SIZE,
    )[: 7 // accumulated]
    for steps, logged, kind in found:
        assert kind == "DeepSpeedEngine"
        assert len(steps) == len(expected)
        assert logged == [float(step + 1) for step in range(len(expected))]
        for got, want in zip(steps, expected, strict=True):
            assert got.small_sq_norm == pytest.approx(want.small_sq_norm, rel=2e-6)
            assert got.big_sq_norm == pytest.approx(want.big_sq_norm, rel=2e-6)
            assert got.small_batch == pytest.approx(want.small_batch)
            assert got.big_batch == pytest.approx(want.big_batch)


def test_the_run_is_recorded() -> None:
    """The optimizer, its parameters and the learning rate: the engine's are pieces of the model."""

    def results(fitting: Any, _: Any) -> Any:
        history = fitting.callbacks[0].history
        return (
            history.optimizer.kind.name,
            history.parameters,
            history["learning_rate"].tolist()[-1],
        )

    trained = sum(p.numel() for p in network().parameters())
    for stage in (2, 3):
        found = fit(stage, NoiseScaleMonitor(every_n_steps=1), results=results)
        assert found == [("SGD", trained, 0.0)] * 2


def test_a_batch_size_that_changes_is_refused() -> None:
    with pytest.raises(AssertionError, match="DeepSpeed"):
        fit(2, BatchSizeScheduler({0: 16, 2: 48}), results=lambda *_: None)
