# SPDX-License-Identifier: Apache-2.0
"""Norms under DeepSpeed's engine, against gradients taken one by one."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import deepspeed_engines
import pytest
import torch
import torch.distributed as dist
from deepspeed_engines import engine_of
from fits import heard
from ranks import as_torchrun, on_ranks
from refused import refused
from rounds import (
    GROUPS,
    STEPS,
    Branch,
    Net,
    always,
    brute_force,
    check,
    examples,
    in_first_pass_only,
    loss_of,
    whole,
)
from torch import nn

from noisescale import NoiseScaleMeter
from noisescale.collectors import deepspeed
from noisescale.collectors.deepspeed import DeepSpeedCollector
from noisescale.guard import NotMeasured
from noisescale.meter.choosing import choose_collector
from noisescale.meter.options import MeterOptions

pytestmark = deepspeed_engines.QUIET
STAGES = range(4)
BUCKETS = {"reduce_bucket_size": 40, "allgather_bucket_size": 40}


def steps(
    net: Any,
    stage: int,
    passes: int,
    branch: Branch = always,
    *,
    groups: Any = None,
    **config: Any,
) -> dict[str, Any]:
    """Go through a few steps; return what was captured and what it should be."""
    engine = engine_of(net, stage, passes, **config)
    collector = choose_collector(engine, MeterOptions(groups=groups))
    assert type(collector) is DeepSpeedCollector
    rank = dist.get_rank()
    result: dict[str, Any] = {"rows": []}
    for step in range(STEPS):
        parts = [[pass_] for pass_ in range(passes)]
        expected = brute_force(whole(net), step, parts, branch, collector.norms, passes)
        for pass_ in range(passes):
            loss = loss_of(engine, step, pass_, rank, branch(step, pass_))
            collector.before_backward(loss, examples(pass_, rank))
            engine.backward(loss)
            assert not collector.gradients_dropped
            engine.step()
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        if dist.get_world_size() > 1:
            dist.all_reduce(big)
        result["rows"].append((None if small is None else small.tolist(), big.tolist(), *expected))
        collector.reset()
    collector.close()
    assert "_take_model_step" not in vars(engine)
    assert not any(p._backward_hooks for p in net.parameters())
    return result


def train(meter: NoiseScaleMeter, step: int = 0, pass_: int = 0, factor: float = 1.0) -> bool:
    """Take a step of a meter's engine, if the pass is the last of one."""
    loss = loss_of(meter.engine, step, pass_, dist.get_rank())
    meter.backward(loss * factor, 8)
    meter.engine.step()
    return meter.step()


def check_all(
    ranks: int, every_way: Callable[[], list[dict[str, Any]]], tolerance: float = 2e-6
) -> None:
    for results in zip(*on_ranks(ranks, as_torchrun(every_way)), strict=True):
        check(list(results), tolerance)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_captured_norms_are_those_of_brute_force(ranks: int, stage: int) -> None:
    """Clipped, of several micro-batches of unequal sizes, and a frozen layer."""
    check_all(
        ranks,
        lambda: [
            steps(Net(), stage, passes, groups=groups, gradient_clipping=0.01)
            for passes, groups in product((1, 3), (None, GROUPS))
        ],
    )


def test_a_parameter_without_gradient_counts_as_zeros() -> None:
    check_all(
        2, lambda: [steps(Net(), s, 2, in_first_pass_only, groups=GROUPS) for s in STAGES[:3]]
    )


def test_tied_weights_and_checkpoints() -> None:
    check_all(2, lambda: [steps(Net(tied=True), s, 2, groups=GROUPS) for s in STAGES])


@pytest.mark.parametrize(
    "config",
    [
        {"zero": {**BUCKETS, "overlap_comm": True}},
        {"zero": {**BUCKETS, "contiguous_gradients": False}},
        {"gradient_predivide_factor": 4.0, "zero": {"reduce_scatter": False}},
        {"zero": {"compute_grad_norm": False}, "gradient_clipping": 0.0},
    ],
    ids=str,
)
def test_other_ways_to_average(config: dict[str, Any]) -> None:
    """In buckets that overlap or are written in place, and where the engine computes no norm."""
    check_all(2, lambda: [steps(Net(), s, 2, **config) for s in (1, 2)])


def test_half_precision() -> None:
    """DeepSpeed averages in bfloat16, and the loss scale of float16 is taken out."""
    half = [
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
        {"fp16": {"enabled": True, "loss_scale": 64.0}},
    ]

    check_all(
        2,
        lambda: [
            steps(Net(), s, 2, groups=groups, **config)
            for config, s, groups in product(half, (1, 2, 3), (None, GROUPS))
        ],
        tolerance=5e-2,
    )


def test_what_the_optimizer_does_not_step_is_not_measured() -> None:
    """The engine averages what its optimizer steps, and no more."""

    def names() -> list[str]:
        engine = engine_of(Net(), 2, only="blocks")
        collector = choose_collector(engine, MeterOptions())
        loss = loss_of(engine, 0, 0, dist.get_rank())
        collector.before_backward(loss, 4)
        engine.backward(loss)
        engine.step()
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        dist.all_reduce(small)
        dist.all_reduce(big)
        assert big.item() <= small.item() / 2
        assert collector._average._by_parameter is False  # type: ignore[attr-defined]
        return collector.norms.names

    for found in on_ranks(2, as_torchrun(names)):
        assert found
        assert all(name.startswith("blocks") for name in found)


def test_a_checkpoint_that_is_loaded_is_no_step(tmp_path: Path) -> None:
    def counts() -> tuple[list[bool], int]:
        engine = engine_of(Net(), 1, 2)
        meter = NoiseScaleMeter(engine, every_n_steps=1)
        for pass_ in range(6):
            if pass_ == 4:
                engine.save_checkpoint(str(tmp_path), tag="a")
            train(meter, 0, pass_ % 4)
        engine.load_checkpoint(str(tmp_path), tag="a")
        return [train(meter, 0, pass_) for pass_ in range(4)], meter.measured_steps

    assert on_ranks(2, as_torchrun(counts)) == [([False, True] * 2, 5)] * 2


def test_a_loss_scale_that_grows_in_a_step_gives_no_wrong_norm() -> None:
    """Stage 3 divides by the scale that it has grown to: nothing is known of such steps."""
    growing = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}

    for rows in on_ranks(2, as_torchrun(lambda: steps(Net(), 3, 1, fp16=growing)["rows"])):
        known = [row for row in rows if not math.isnan(row[1][0])]
        assert len(known) < len(rows)
        for _, big, _, expected in known:
            assert big == pytest.approx(expected, rel=5e-2)


def test_one_process_compares_micro_batches() -> None:
    check_all(1, lambda: [steps(Net(), s, 2) for s in STAGES])


def heard_losses() -> tuple[list[float], list[float]]:
    """The losses in a history, and as they were before the engine divides them."""
    engine = engine_of(nn.Linear(5, 3), 1, 2)
    meter = NoiseScaleMeter(engine, every_n_steps=1, log_every_n_steps=1)
    losses = []
    for step in range(6):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        losses.append(nn.functional.cross_entropy(engine(x), torch.arange(8) % 3))
        meter.backward(losses[-1], 8)
        engine.step()
        meter.step()
    means = [(a.item() + b.item()) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    return meter.history["training_loss"].tolist(), means


def test_losses_are_heard_before_the_engine_divides_them() -> None:
    ((found, expected),) = on_ranks(1, as_torchrun(heard_losses))

    assert found[1:] == pytest.approx(expected[1:], rel=1e-5)


def trained(measured: bool, stage: int, **config: Any) -> list[torch.Tensor]:
    """The weights after some steps with accumulation."""
    net = Net()
    engine = engine_of(net, stage, 2, lr=0.1, **config)
    meter = NoiseScaleMeter(engine, every_n_steps=1, groups=GROUPS) if measured else None
    for step in range(3):
        for pass_ in range(2):
            if meter is not None:
                assert train(meter, step, pass_) is (pass_ == 1)
                continue
            engine.backward(loss_of(engine, step, pass_, dist.get_rank()))
            engine.step()
    if meter is not None:
        assert meter.measured_steps == 3, meter.not_measured
    with deepspeed_engines.deepspeed.zero.GatheredParameters(list(net.parameters())):
        return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("config", [{"gradient_clipping": 0.1}, {"bf16": {"enabled": True}}])
def test_training_is_the_same_bit_for_bit(stage: int, config: dict[str, Any]) -> None:
    def both() -> list[list[torch.Tensor]]:
        return [trained(measured, stage, **config) for measured in (False, True)]

    for plain, measured in on_ranks(2, as_torchrun(both)):
        assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_that_the_engine_loses_are_refused_and_the_remedy_helps(
    ranks: int, stage: int
) -> None:
    """Stages 1 and 2 overwrite gradients at each pass that they take for the last of a step."""

    def counts() -> tuple[list[str], list[int]]:
        measured = []
        with heard() as told:
            for passes in (1, 4):
                meter = NoiseScaleMeter(engine_of(Net(), stage, passes), every_n_steps=1)
                for step, pass_ in product(range(STEPS), range(4)):
                    meter.backward(loss_of(meter.engine, step, pass_, dist.get_rank()), 8)
                    if passes == 4 or pass_ == 3:
                        meter.engine.step()
                        meter.step()
                measured += [meter.steps, meter.measured_steps]
        return [one for one in told if "measured" in one or "measure." in one], measured

    for told, measured in on_ranks(ranks, as_torchrun(counts)):
        assert measured == [STEPS, 0, STEPS, STEPS]
        (message,) = told
        assert "Set it to 4, do not divide the loss, and call `engine.step()`" in message


def test_one_micro_batch_is_told_to_accumulate_by_the_engine() -> None:
    """Halves of a batch are no remedy there."""

    def told() -> list[str]:
        with heard() as messages:
            meter = NoiseScaleMeter(engine_of(Net(), 1), every_n_steps=1)
            train(meter)
            assert not meter.measured_steps
        return [one for one in messages if "micro-batch" in one]

    ((message,),) = on_ranks(1, as_torchrun(told))
    assert message.endswith("Set `gradient_accumulation_steps` to 2 or more, or use more devices.")


def test_a_step_that_overflows_is_left_out() -> None:
    """On one rank alone: all of them skip it."""

    def counts() -> tuple[int, int, int]:
        engine = engine_of(Net(), 2, 1, lr=0.1, fp16={"enabled": True, "initial_scale_power": 4})
        meter = NoiseScaleMeter(engine, every_n_steps=1)
        for step in range(4):
            bad = step == 1 and dist.get_rank() == 1
            train(meter, step, factor=math.inf if bad else 1.0)
        assert engine.skipped_steps == 1
        return meter.steps, meter.measured_steps, meter.skipped_steps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert on_ranks(2, as_torchrun(counts)) == [(4, 3, 1)] * 2


def test_a_resumed_meter_goes_on() -> None:
    def moments() -> list[Any]:
        whole_run, first, second = (
            NoiseScaleMeter(engine_of(Net(), 1), every_n_steps=1) for _ in range(3)
        )
        for step in range(4):
            train(whole_run, step)
            if step == 2:
                second.load_state_dict(first.state_dict())
            train(first if step < 2 else second, step)
        return [tuple(meter.average_moments or ()) for meter in (whole_run, second)]

    for expected, found in on_ranks(2, as_torchrun(moments)):
        assert found == pytest.approx(expected)


def test_a_meter_that_is_stopped_or_closed_leaves_the_engine_alone() -> None:
    """The steps of the training are still counted."""

    def steps() -> list[int]:
        found = []
        for is_refused in (False, True):
            engine = engine_of(Net(), 1, 2)
            engine.has_moe_layers = is_refused
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                meter = NoiseScaleMeter(engine, every_n_steps=1)
                for pass_ in range(6):
                    train(meter, 0, pass_)
                    if pass_ == 3:
                        meter.stop(NotMeasured("enough"))
                        assert "_take_model_step" not in vars(engine)
            found.append(meter.steps)
        return found

    assert on_ranks(2, as_torchrun(steps)) == [[3, 3]] * 2


def test_step_is_called_after_the_engines() -> None:
    def too_early() -> None:
        meter = NoiseScaleMeter(engine_of(Net(), 1))
        meter.backward(loss_of(meter.engine, 0, 0, dist.get_rank()), 8)
        with pytest.raises(RuntimeError, match="after `engine"):
            meter.step()

    on_ranks(2, as_torchrun(too_early))


def test_an_error_leaves_out_its_step() -> None:
    """In every function of the collector; training goes on."""

    def measured() -> list[tuple[int, int]]:
        found = []
        average = deepspeed._EngineAverage
        for kind, name in (
            (DeepSpeedCollector, "before_backward"),
            (DeepSpeedCollector, "_capture"),
            (DeepSpeedCollector, "small_sq_norms"),
            (average, "sq_norms"),
            (deepspeed, "_loss_scale_of"),
        ):
            meter = NoiseScaleMeter(engine_of(Net(), 2), every_n_steps=1)
            broken = Mock(side_effect=ValueError("broken"))
            for step in range(3):
                with patch.object(kind, name, broken) if step == 1 else nullcontext():
                    train(meter, step)
            found.append((meter.steps, meter.measured_steps))
            meter.close()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert on_ranks(2, as_torchrun(measured)) == [[(3, 2)] * 5] * 2


OTHERS: dict[str, Any] = {
    "gradient_average": False,
    "zero_quantized_gradients": lambda: True,
    "fp16_enabled": lambda: True,
    "pipeline_parallelism": True,
    "has_moe_layers": True,
    "dp_world_size": 1,
    "enable_backward_allreduce": False,
    "zenflow": True,
    "is_deepcompile_enabled": lambda: True,
    "optimizer": nn.Identity(),
}


def test_other_engines_and_small_batches_are_refused() -> None:
    """Engines are not made here: some need hardware, some another launcher."""

    def refusals() -> None:
        for name, value in OTHERS.items():
            engine = engine_of(Net(), 0)
            object.__setattr__(engine, name, value)
            with pytest.raises(NotMeasured, match="an engine that averages"):
                choose_collector(engine, MeterOptions())
        for options in ({"small_batch": "half"}, {"averaged": False}):
            with refused("small_batch", requirement="under DeepSpeed"):
                NoiseScaleMeter(engine_of(Net(), 1), **options)

    on_ranks(2, as_torchrun(refusals))
