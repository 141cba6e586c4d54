# SPDX-License-Identifier: Apache-2.0
"""What is odd about FSDP1: flat parameters, strategies, precisions, hooks, what is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from forked_once import Ranks
from ranks import in_a_fork, on_ranks
from rounds import (
    CAPTURE,
    EVERY_PASS,
    EVERY_WAY,
    GROUPS,
    IN_GROUPS,
    SINGLE,
    SUMMED,
    TOGETHER,
    TWO_ROUNDS,
    WITHOUT,
    Branch,
    Net,
    Rounds,
    Run,
    Runs,
    WithoutNorms,
    always,
    batch,
    check,
    steps_of,
)
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from noisescale import NoiseScaleMeter
from noisescale.collectors.sharded.fsdp1 import Fsdp1Collector, is_fsdp1, named_parameters
from noisescale.guard import NotMeasured

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),
]
HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
OPTIONS: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}

two, four = Ranks(2), Ranks(4)


def sharded(
    net: Any,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    *,
    nested: bool = True,
    flat: bool = False,
    **options: Any,
) -> Any:
    torch.set_num_threads(1)
    device = devices.of_rank(dist.get_rank())
    options |= {"sharding_strategy": strategy, "device_id": device, "use_orig_params": not flat}
    if strategy in HYBRID:
        options["device_mesh"] = init_device_mesh(devices.name, (2, dist.get_world_size() // 2))
    wrap = partial(FullyShardedDataParallel, **options)
    if nested:
        for index, block in enumerate(net.blocks):
            net.blocks[index] = wrap(block)
    if flat:  # a flat parameter is frozen as a whole
        net.frozen = wrap(net.frozen)
    return wrap(net)


def collector_of(model: nn.Module, groups: Any = None) -> Fsdp1Collector:
    trained = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
    return Fsdp1Collector(model, trained, groups)


def steps(
    model: Any, rounds: Rounds, branch: Branch = always, *, groups: Any = None, **options: Any
) -> dict[str, Any]:
    result = steps_of(collector_of(model, groups), model, rounds, branch, **options)
    assert not any(hooks_of(model))
    return result


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        module._handle.flat_param._post_accumulate_grad_hooks
        for module in FullyShardedDataParallel.fsdp_modules(model)
        if module._handle is not None
    ]


# ---- norms


def partly_frozen() -> Net:
    """A flat gradient contains those of frozen parameters, too."""
    net: Any = Net()
    net.again = partly_frozen
    for part in (net.blocks[0].up, net.blocks[1].up, net.last.bias):
        part.requires_grad_(False)
    return net  # type: ignore[no-any-return]


def made(policy: MixedPrecision | None = None, **options: Any) -> Callable[[], Any]:
    net = {name: options.pop(name) for name in ("reentrant", "tied") if name in options}
    return lambda: sharded(Net(**net), mixed_precision=policy, **options)


def with_a_users_hook() -> Any:
    model = sharded(Net())
    state = default_hooks.DefaultState(dist.group.WORLD)
    model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    return model


BF16 = torch.bfloat16
REDUCED = MixedPrecision(reduce_dtype=BF16)
COMPUTED = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
KEPT = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)

runs = Runs(steps)
runs.add(
    two,
    {
        # In original parameters one without gradient counts as zeros, a flat one gets zeros.
        "without": Run(made(), EVERY_PASS, how=WITHOUT),
        "without, flat": Run(made(flat=True), EVERY_PASS, how=WITHOUT),
        "frozen": Run(lambda: sharded(partly_frozen()), SINGLE, how=IN_GROUPS),
        "tied, flat": Run(made(nested=False, flat=True, tied=True), SUMMED, how=IN_GROUPS),
        "reentrant checkpoints": Run(made(reentrant=True), SINGLE, how=CAPTURE),
        "a user's hook": Run(with_a_users_hook, SUMMED, how=IN_GROUPS),
        "called twice in one pass": Run(made(), SUMMED, how=TOGETHER),
        # FSDP1 rounds what it reduces after the norms are taken: see the tests of FSDP2.
        "reduced in 16 bits": Run(made(REDUCED), SUMMED, 4e-3, IN_GROUPS),
        "kept in 16 bits": Run(made(KEPT), SINGLE, 5e-2, IN_GROUPS),
    },
)
runs.add(
    four,
    {
        "hybrid": Run(made(strategy=HYBRID[0]), TWO_ROUNDS, how=IN_GROUPS),
        "hybrid, flat": Run(made(flat=True, strategy=HYBRID[0]), SUMMED, how=CAPTURE),
    },
)
runs.add(
    Ranks(2),
    {
        "tied": Run(made(nested=False, tied=True), SUMMED, how=IN_GROUPS),
        "computed in 16 bits": Run(made(COMPUTED), EVERY_PASS, 5e-2, IN_GROUPS),
        "without, summed": Run(made(), SUMMED, how=WITHOUT),
        "without, flat and summed": Run(made(flat=True), SUMMED, how=WITHOUT),
        "frozen, no groups": Run(lambda: sharded(partly_frozen()), SINGLE),
    },
    quick=False,
)
for strategy in ShardingStrategy:
    ways = EVERY_WAY if strategy is not ShardingStrategy.NO_SHARD else EVERY_WAY[::2]
    runs.add(
        Ranks(4),
        {
            f"{strategy.name} {nested} {flat} {number}": Run(
                made(nested=nested, flat=flat, strategy=strategy),
                rounds,
                how={"groups": groups, "capture": number % 2 == 0},
            )
            for nested, flat in ((False, False), (True, False), (True, True))
            for number, (rounds, groups) in enumerate(ways)
        },
        quick=False,
    )


@pytest.mark.parametrize("name", runs.names)
def test_norms_are_those_of_brute_force(name: str) -> None:
    """For more ways of training see the contract of all collectors."""
    runs.check(name)


def compiled() -> dict[str, Any]:
    model = sharded(Net())
    model.forward = torch.compile(model.forward, backend="aot_eager")
    return steps(model, SINGLE, groups=GROUPS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@in_a_fork
def test_compiled() -> None:
    check(on_ranks(2, compiled))


@two
def equal_batches() -> list[list[float]]:
    """Small and big norms of passes in which both ranks have the same batch: they are equal."""

    def norms(model: nn.Module, collector: Fsdp1Collector) -> list[float]:
        model.zero_grad()
        loss = model(torch.ones(4, 5)).square().mean()
        collector.before_backward(loss, 4)
        loss.backward()
        small: Any = collector.small_sq_norms()
        both = torch.cat([small / 2, collector.big_sq_norms()])
        dist.all_reduce(both)
        collector.reset()
        return both.tolist()  # type: ignore[no-any-return]

    model = sharded(Net())
    collector = collector_of(model)
    found = [norms(model, collector)]
    for name, p in named_parameters(model):
        if name in ("last.weight", "blocks.0.up.weight"):
            p.requires_grad_(False)
    found.append(norms(model, collector))
    summed = sharded(Net())
    for module in FullyShardedDataParallel.fsdp_modules(summed):
        module._gradient_predivide_factor = module._gradient_postdivide_factor = 1
    return [*found, norms(summed, collector_of(summed))]


def test_what_is_frozen_later_does_not_count_and_summed_gradients_have_norms_of_the_sum() -> None:
    """Autograd goes on to write its gradient into the flat one, and FSDP drops it.

    Gradients are summed where both divisors of FSDP1 are set to one.
    """
    for of_pairs in equal_batches():
        assert all(small == pytest.approx(big, rel=1e-5) for small, big in of_pairs)
        (_, mean), (_, later), (_, summed) = of_pairs
        assert later < 0.9 * mean
        assert summed == pytest.approx(4 * mean, rel=1e-5)


# ---- which steps have norms


@two
def without_norms() -> None:
    model = sharded(Net())
    WithoutNorms(collector_of(model), model).go_through_all()


def test_what_has_no_norm_of_its_own_gets_none() -> None:
    assert without_norms() == [None, None]


@two
def rounds_of_some_roots() -> Tensor | None:
    """Of a container of two roots one may accumulate while the other reduces."""
    wrap = partial(FullyShardedDataParallel, **OPTIONS)
    torch.manual_seed(0)
    pair = nn.Sequential(wrap(nn.Linear(5, 4)), wrap(nn.Linear(4, 3)))
    collector = collector_of(pair)
    for number in range(2):
        with pair[0].no_sync() if number == 0 else torch.enable_grad():  # type: ignore[operator]
            loss = pair(batch(0, number, dist.get_rank())).square().mean()
            collector.before_backward(loss, 3)
            loss.backward()
    return collector.small_sq_norms()


def test_rounds_of_some_roots_alone_have_no_norm() -> None:
    assert rounds_of_some_roots() == [None, None]


@two
def dropped_and_averaged_twice() -> list[bool]:
    found = []
    for flat in (False, True):
        model = sharded(Net(), flat=flat)
        steps = WithoutNorms(collector_of(model), model)
        for reduces in (False, True):
            steps.run(reduces)
            found.append(steps.collector.gradients_dropped)
        model.zero_grad()
        found.append(steps.collector.gradients_dropped)
    model = sharded(Net(), ShardingStrategy.NO_SHARD)
    steps = WithoutNorms(collector_of(model), model)
    for _ in range(2):
        steps.backward()
        found.append(steps.collector.averaged_too_often)
    return found


def test_gradients_are_dropped_by_zero_grad_alone_and_a_second_average_is_told() -> None:
    """Without shards the second pass adds to an average, as under DDP."""
    assert dropped_and_averaged_twice() == [[*[False, False, True] * 2, False, True]] * 2


# ---- names and meters


@two
def names_and_kinds() -> list[Any]:
    net: Any = Net()
    before = is_fsdp1(net)
    net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    model = sharded(net)
    return [before, is_fsdp1(net), sorted(name for name, _ in named_parameters(model))]


def test_names_are_those_without_wrappers() -> None:
    """Of a compiled part as well. What has a wrapper in it is FSDP1's."""
    plain = sorted(name for name, _ in Net().named_parameters())
    assert names_and_kinds() == [[False, True, plain]] * 2


@two
def measured_loops() -> list[Any]:
    found = []
    for flat in (False, True):
        model = sharded(Net(), flat=flat)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        meter = NoiseScaleMeter(model, groups=GROUPS, parameters=model.parameters())
        for step in range(8):
            optimizer.zero_grad()
            x = batch(step, 0, dist.get_rank())
            meter.backward(model(x).square().mean(), len(x))
            meter.step()
            optimizer.step()
        assert meter.not_measured is None
        found.append([meter.measured_steps, sorted(meter.group_noise_scales)])
        found.append(tuple(meter.average_moments or ()))
    return found


def test_a_meter_measures_a_loop() -> None:
    """Parameters go by their own names; with flat parameters the optimizer has others."""
    one, other = measured_loops()

    assert one == other
    assert one[0] == one[2] == [8, sorted(GROUPS)]
    assert one[1] == pytest.approx(one[3], rel=1e-3)


# ---- what is refused: last, as later collectors find meshes of context parallelism


def ignored() -> nn.Module:
    net = Net()
    return FullyShardedDataParallel(net, ignored_states=[net.last.weight], **OPTIONS)


def context() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    return FullyShardedDataParallel(Net(), device_mesh=mesh["cp"], **OPTIONS)


def alone() -> nn.Module:
    groups = [dist.new_group([rank]) for rank in range(2)]
    return FullyShardedDataParallel(Net(), process_group=groups[dist.get_rank()], **OPTIONS)


def unfrozen() -> nn.Module:
    return sharded(Net().requires_grad_(False)).requires_grad_(True)  # type: ignore[no-any-return]


def two_groups() -> nn.Module:
    net: Any = Net()
    groups = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = groups[dist.get_rank() // 2]
    net.blocks[0] = FullyShardedDataParallel(net.blocks[0], process_group=mine, **OPTIONS)
    return FullyShardedDataParallel(net, **OPTIONS)


def over_tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Net()
    plan: Any = {"blocks.0.up": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(net, mesh["tp"], plan)
    return FullyShardedDataParallel(net, device_mesh=mesh["dp"], **OPTIONS)


REFUSED: dict[Callable[[], nn.Module], str] = {
    ignored: "`ignored_states`",
    alone: "two or more ranks",
    unfrozen: "be unfrozen before",
    context: "context parallelism over 2",
}
REFUSED_OF_FOUR: dict[Callable[[], nn.Module], str] = {
    two_groups: "one set of ranks",
    over_tensor_parallel: "`fully_shard` over tensor",
}


def refuse(models: dict[Callable[[], nn.Module], str]) -> None:
    for make, message in models.items():
        model = make()
        with pytest.raises(NotMeasured, match=message):
            collector_of(model)
        assert not any(hooks_of(model))


refusals = two(partial(refuse, REFUSED)), four(partial(refuse, REFUSED_OF_FOUR))


def test_what_is_not_averaged_over_one_set_of_ranks_is_not_measured() -> None:
    assert [of_ranks() for of_ranks in refusals] == [[None] * 2, [None] * 4]
