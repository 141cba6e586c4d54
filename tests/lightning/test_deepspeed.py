# SPDX-License-Identifier: Apache-2.0
"""Lightning's DeepSpeedStrategy, which accumulates and steps by itself."""

from typing import Any

import deepspeed_engines
import pytest
import torch
from brute_force import brute_force
from fits import check_norms, classifier, fit_sharded, loader
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from tiers import slow
from torch import nn
from zoo import mlp

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
    return mlp(nn.LayerNorm(16))


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


@pytest.mark.parametrize(
    ("stage", "accumulated"), [(1, 2), slow(2, 1), slow(2, 2), slow(3, 1), slow(3, 2)]
)
def test_norms_are_those_of_brute_force(
    stage: int, accumulated: int, recorded: list[StepNorms]
) -> None:
    """The last window of an epoch goes on in the next: seven batches a rank."""

    def results(fitting: Any, _: Any) -> Any:
        steps = fitting.callbacks[0].history["step"].tolist()
        return list(recorded), steps, type(fitting.strategy.model).__name__

    options = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.1}
    monitor = NoiseScaleMonitor(every_n_steps=1)
    found = fit(stage, monitor, log_every_n_steps=1, results=results, **options)

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
        assert logged == [float(step + 1) for step in range(len(expected))]
        check_norms(steps, expected)


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
