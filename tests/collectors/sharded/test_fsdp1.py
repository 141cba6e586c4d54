# SPDX-License-Identifier: Apache-2.0
"""What is odd about FSDP1: flat parameters, strategies, precisions, hooks, what is refused."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import devices
import pytest
import torch
import torch._dynamo  # which FSDP1 imports, here once and not in every fork
import torch.distributed as dist
from ranks import in_a_fork, on_ranks
from rounds import (
    EVERY_PASS,
    GROUPS,
    SINGLE,
    SUMMED,
    TWO_ROUNDS,
    Branch,
    Net,
    Rounds,
    always,
    batch,
    brute_force,
    check,
    loss_of,
    steps_of,
    whole,
)
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from noisescale import NoiseScaleMeter
from noisescale.collectors.sharded.fsdp1 import Fsdp1Collector
from noisescale.collectors.sharded.fsdp1_units import is_fsdp1, named_parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`"),
]
STRATEGIES = list(ShardingStrategy)
HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]


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


def trained(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in named_parameters(model) if p.requires_grad]


def steps(
    model: Any, rounds: Rounds, branch: Branch = always, *, groups: Any = None, **options: Any
) -> dict[str, Any]:
    collector = Fsdp1Collector(model, trained(model), groups)
    result = steps_of(collector, model, rounds, branch, **options)
    assert not any(hooks_of(model))
    return result


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        module._handle.flat_param._post_accumulate_grad_hooks
        for module in FullyShardedDataParallel.fsdp_modules(model)
        if module._handle is not None
    ]


def check_all(ranks: int, every_way: Callable[[], list[dict[str, Any]]], **options: Any) -> None:
    for results in zip(*on_ranks(ranks, every_way), strict=True):
        check(list(results), **options)


EVERY_WAY = [(SINGLE, GROUPS), (EVERY_PASS, None), (SUMMED, None), (TWO_ROUNDS, GROUPS)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_captured_norms_are_those_of_brute_force(strategy: ShardingStrategy) -> None:
    """Of original and flat parameters, in one unit and in nested ones, on four ranks."""
    ways = EVERY_WAY
    if strategy is ShardingStrategy.NO_SHARD:
        ways = [(SINGLE, GROUPS), (SUMMED, None)]

    check_all(
        4,
        lambda: [
            steps(
                sharded(Net(), strategy, nested=nested, flat=flat),
                rounds,
                groups=groups,
                capture=capture,
            )
            for nested, flat in ((False, False), (True, False), (True, True))
            for capture, (rounds, groups) in zip((True, False, True, False), ways, strict=False)
        ],
    )


def test_a_parameter_without_gradient_counts_as_zeros() -> None:
    """In original parameters. A flat one gets zeros from autograd."""

    def in_first_pass_only(step: int, pass_: int) -> bool:
        return pass_ == 0

    check_all(
        2,
        lambda: [
            steps(sharded(Net(), flat=flat), rounds, in_first_pass_only, groups=GROUPS)
            for flat in (False, True)
            for rounds in (EVERY_PASS, SUMMED)
        ],
    )


class PartlyFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = PartlyFrozen
        for block in self.blocks:
            block.up.requires_grad_(False)  # type: ignore[union-attr]
        self.last.bias.requires_grad_(False)


def test_frozen_parameters_of_a_unit_do_not_count() -> None:
    """Its flat gradient contains theirs."""
    check_all(2, lambda: [steps(sharded(PartlyFrozen()), SINGLE, groups=g) for g in (None, GROUPS)])


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = Tied
        self.blocks[1].side = self.blocks[0].side  # type: ignore[union-attr]


def test_tied_parameters_count_once() -> None:
    check_all(
        2,
        lambda: [
            steps(sharded(Tied(), nested=False, flat=flat), SUMMED, groups=GROUPS)
            for flat in (False, True)
        ],
    )


def test_reentrant_checkpoints_are_whole() -> None:
    check_all(2, lambda: [steps(sharded(Net(reentrant=True)), SINGLE, capture=True)])


TOLERANCES = [  # see the tests of FSDP2
    (MixedPrecision(reduce_dtype=torch.bfloat16), 4e-3),
    (MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32), 5e-2),
    (MixedPrecision(torch.bfloat16, keep_low_precision_grads=True), 5e-2),
]


def test_half_precision() -> None:
    """FSDP1 rounds what it reduces after the norms are taken."""

    def every_way() -> list[dict[str, Any]]:
        return [
            steps(sharded(Net(), mixed_precision=policy), rounds, groups=GROUPS)
            for (policy, _), rounds in zip(TOLERANCES, (SUMMED, EVERY_PASS, SINGLE), strict=True)
        ]

    found = zip(*on_ranks(2, every_way), strict=True)
    for (_, tolerance), results in zip(TOLERANCES, found, strict=True):
        check(list(results), tolerance)


def test_a_users_communication_hook_stays() -> None:
    def with_hook() -> dict[str, Any]:
        model = sharded(Net())
        state = default_hooks.DefaultState(dist.group.WORLD)
        model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
        return steps(model, SUMMED, groups=GROUPS)

    check(on_ranks(2, with_hook))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@in_a_fork
def test_compiled() -> None:
    def compiled() -> dict[str, Any]:
        model = sharded(Net())
        model.forward = torch.compile(model.forward, backend="aot_eager")
        return steps(model, SINGLE, groups=GROUPS)

    check(on_ranks(2, compiled))


@pytest.mark.parametrize("strategy", [STRATEGIES[0], ShardingStrategy.NO_SHARD])
def test_training_is_bitwise_what_it_is_without(strategy: ShardingStrategy) -> None:
    def trained_so(measured: bool) -> list[Tensor]:
        model = sharded(Net(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        collector = Fsdp1Collector(model, trained(model), GROUPS) if measured else None
        for step in range(4):
            optimizer.zero_grad()
            for pass_ in range(2):
                loss = loss_of(model, step, pass_, dist.get_rank(), branch=step != 2)
                if collector is not None and step != 1:
                    collector.before_backward(loss, 1, capture_average=pass_ == 1)
                loss.backward()
            if collector is not None:
                collector.small_sq_norms(), collector.big_sq_norms()
                collector.reset()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def both() -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(trained_so(True), trained_so(False), strict=True)]

    assert all(map(all, on_ranks(2, both)))


def test_what_was_averaged_twice_is_told() -> None:
    """Without shards the second pass adds to an average, as under DDP."""

    def too_often() -> list[bool]:
        model = sharded(Net(), ShardingStrategy.NO_SHARD)
        collector = Fsdp1Collector(model, trained(model))
        found = []
        for _ in range(2):
            loss = loss_of(model, 0, 0, dist.get_rank())
            collector.before_backward(loss, 1)
            loss.backward()
            found.append(collector.averaged_too_often)
        return found

    assert on_ranks(2, too_often) == [[False, True]] * 2


def test_what_has_no_norm_of_its_own_gets_none() -> None:
    def none() -> dict[str, bool]:
        model = sharded(Net())
        collector = Fsdp1Collector(model, trained(model))
        found = {}

        def run(announced: bool = True) -> None:
            loss = loss_of(model, 0, 0, dist.get_rank())
            if announced:
                collector.before_backward(loss, 1)
            loss.backward()

        def close(what: str) -> None:
            found[what] = collector.small_sq_norms() is None
            collector.reset()
            model.zero_grad()

        close("no pass")
        run(announced=False)
        close("none that was announced")
        with model.no_sync():
            run()
        close("none that reduces")
        run()
        with model.no_sync():
            run()
        run()
        close("rounds of unequal length")
        run()
        close("a good step after them")
        return found

    for found in on_ranks(2, none):
        assert not found.pop("a good step after them")
        assert all(found.values())


def test_rounds_of_some_roots_alone_have_no_norm() -> None:
    """Of a container of two roots one may accumulate while the other reduces."""

    def captured() -> Tensor | None:
        wrap = partial(
            FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True
        )
        torch.manual_seed(0)
        pair = nn.Sequential(wrap(nn.Linear(5, 4)), wrap(nn.Linear(4, 3)))
        collector = Fsdp1Collector(pair, trained(pair))
        for number in range(2):
            with pair[0].no_sync() if number == 0 else torch.enable_grad():  # type: ignore[operator]
                loss = pair(batch(0, number, dist.get_rank())).square().mean()
                collector.before_backward(loss, 3)
                loss.backward()
        return collector.small_sq_norms()

    assert on_ranks(2, captured) == [None, None]


def test_names_are_those_without_wrappers() -> None:
    """Of a compiled part as well."""

    def names() -> list[str]:
        net: Any = Net()
        net.blocks[0] = torch.compile(net.blocks[0], backend="aot_eager")
        return sorted(name for name, _ in named_parameters(sharded(net, nested=True)))

    plain = sorted(name for name, _ in Net().named_parameters())
    assert on_ranks(2, names) == [plain, plain]


def test_gradients_are_dropped_by_zero_grad_alone() -> None:
    def dropped() -> list[bool]:
        found = []
        for flat in (False, True):
            model = sharded(Net(), flat=flat)
            collector = Fsdp1Collector(model, trained(model))
            for adds in (True, False):
                with model.no_sync() if adds else torch.enable_grad():
                    loss = loss_of(model, 0, 0, dist.get_rank())
                    collector.before_backward(loss, 1)
                    loss.backward()
                found.append(collector.gradients_dropped)
            model.zero_grad()
            found.append(collector.gradients_dropped)
        return found

    assert on_ranks(2, dropped) == [[False, False, True] * 2] * 2


def test_a_module_called_twice_in_one_pass_is_whole() -> None:
    def captured() -> dict[str, Any]:
        model = sharded(Net())
        collector = Fsdp1Collector(model, trained(model))
        expected = brute_force(whole(model), 0, [[0, 1]], always, collector.norms, 2)
        loss = (loss_of(model, 0, 0, dist.get_rank()) + loss_of(model, 0, 1, dist.get_rank())) / 2
        collector.before_backward(loss, 8)
        loss.backward()
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        dist.all_reduce(big)
        assert small is not None
        return {"rows": [(small.tolist(), big.tolist(), *expected)]}

    check(on_ranks(2, captured))


@pytest.mark.parametrize("flat", [False, True])
def test_a_meter_measures_a_loop(flat: bool) -> None:
    """Parameters go by their own names; with flat parameters the optimizer has others."""

    def measured() -> list[Any]:
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
        moments = meter.average_moments
        return [meter.measured_steps, *moments, sorted(meter.group_noise_scales)]

    one, other = on_ranks(2, measured)
    assert one == other
    assert one[0] == 8
    assert one[-1] == sorted(GROUPS)


def ignored() -> nn.Module:
    net = Net()
    return FullyShardedDataParallel(
        net,
        device_id=torch.device("cpu"),
        ignored_states=[net.last.weight],
        use_orig_params=True,
    )


def two_groups() -> nn.Module:
    net: Any = Net()
    group = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = group[dist.get_rank() // 2]
    net.blocks[0] = FullyShardedDataParallel(
        net.blocks[0], process_group=mine, device_id=torch.device("cpu")
    )
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def context() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    return FullyShardedDataParallel(
        Net(), device_mesh=mesh["cp"], device_id=torch.device("cpu"), use_orig_params=True
    )


def over_tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net: Any = Net()
    plan = {"blocks.0.up": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(net, mesh["tp"], plan)
    return FullyShardedDataParallel(
        net, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True
    )


@pytest.mark.parametrize(
    ("make", "ranks", "message"),
    [
        (
            ignored,
            2,
            "shard every trained parameter, got 'last.weight': FSDP does not reduce its gradient."
            " Do not ignore it (`ignored_states`), freeze it, or leave it out by `parameters`.",
        ),
        (
            two_groups,
            4,
            "be sharded over one set of ranks, got several: its gradients are means over different"
            " ranks. Measure the parameters of one of them.",
        ),
        (
            lambda: sharded(Net()),
            1,
            "be sharded over two or more ranks, got FullyShardedDataParallel on one: there is"
            " nothing to compare. Train without FSDP on one device.",
        ),
        (
            over_tensor_parallel,
            4,
            "be sharded by `fully_shard` over tensor parallelism, got FullyShardedDataParallel: a"
            " rank has only a part of its gradient. Use `fully_shard`.",
        ),
        (
            context,
            2,
            "be data parallel only, got context parallelism over 2 ranks (mesh dimension 'cp'):"
            " these ranks share the tokens of one batch, and their gradients are not independent."
            " Train without context parallelism.",
        ),
    ],
)
def test_what_is_not_averaged_over_one_set_of_ranks_is_not_measured(
    make: Callable[[], nn.Module], ranks: int, message: str
) -> None:
    def refused() -> None:
        model = make()
        with pytest.raises(ValueError, match=f"^`model` must {re.escape(message)}$"):
            Fsdp1Collector(model, trained(model))

    on_ranks(ranks, refused)


def test_what_is_fsdp1() -> None:
    def which() -> Iterator[bool]:
        net: Any = Net()
        yield is_fsdp1(net)
        net.last = FullyShardedDataParallel(net.last, device_id=torch.device("cpu"))
        yield is_fsdp1(net)

    assert on_ranks(1, lambda: list(which())) == [[False, True]]


def of_equal_batches(model: nn.Module, collector: Fsdp1Collector) -> tuple[float, float]:
    """Small and big norm of a pass in which both ranks have the same batch: they are one number."""
    model.zero_grad()
    loss = model(torch.ones(4, 5)).square().mean()
    collector.before_backward(loss, 4)
    loss.backward()
    small, big = collector.small_sq_norms(), collector.big_sq_norms()
    assert small is not None
    both = torch.cat([small / 2, big])
    dist.all_reduce(both)
    collector.reset()
    return both[0].item(), both[1].item()


def test_what_is_frozen_after_the_meter_was_made_does_not_count() -> None:
    """Autograd goes on to write its gradient into the flat one, and FSDP drops it."""

    def found() -> list[tuple[float, float]]:
        model = sharded(Net())
        collector = Fsdp1Collector(model, trained(model))
        before = of_equal_batches(model, collector)
        for name, p in named_parameters(model):
            if name in ("last.weight", "blocks.0.up.weight"):
                p.requires_grad_(False)
        return [before, of_equal_batches(model, collector)]

    for (small, big), (small_later, big_later) in on_ranks(2, found):
        assert (small, small_later) == pytest.approx((big, big_later), rel=1e-5)
        assert big_later < 0.9 * big


def test_gradients_that_are_summed_have_norms_of_the_sum() -> None:
    """As where both divisors of FSDP1 are set to one."""

    def found() -> tuple[float, float]:
        model = sharded(Net())
        for module in FullyShardedDataParallel.fsdp_modules(model):
            module._gradient_predivide_factor = module._gradient_postdivide_factor = 1
        return of_equal_batches(model, Fsdp1Collector(model, trained(model)))

    for small, big in on_ranks(2, found):
        assert small == pytest.approx(big, rel=1e-5)


def test_what_is_unfrozen_after_it_was_wrapped_is_not_measured() -> None:
    def refused() -> None:
        model = sharded(Net().requires_grad_(False))
        model.requires_grad_(True)
        with pytest.raises(ValueError, match="must be unfrozen before FullyShardedDataParallel"):
            Fsdp1Collector(model, trained(model))
        assert not any(hooks_of(model))

    on_ranks(2, refused)
