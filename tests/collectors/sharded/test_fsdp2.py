# SPDX-License-Identifier: Apache-2.0
"""What is odd about FSDP2: units, rounds, meshes, divisors, precisions, what is refused."""

import gc
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import devices
import pytest
import torch
import torch.distributed as dist
from forked_once import Ranks
from ranks import on_ranks
from rounds import (
    CAPTURE,
    EVERY_PASS,
    EVERY_WAY,
    GROUPS,
    IN_GROUPS,
    SINGLE,
    STEPS,
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
    in_first_pass_only,
    loss_of,
    mesh_of,
    steps_of,
)
from tiers import slow
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor.placement_types import Shard

from noisescale import NoiseScaleMeter
from noisescale.collectors.rows.window_layout import each_micro_batch, whole_rank
from noisescale.collectors.sharded.fsdp2 import Fsdp2Collector
from noisescale.collectors.sharded.fsdp2_units import is_fsdp2
from noisescale.guard import NotMeasured

PAIR, SQUARE = (2,), (2, 2)

two, four = Ranks(2), Ranks(4)


def sharded(
    net: Net, mesh: tuple[int, ...] | DeviceMesh = PAIR, *, nested: bool = True, **options: Any
) -> Any:
    options["mesh"] = mesh_of(mesh) if isinstance(mesh, tuple) else mesh
    if nested:
        for block in net.blocks:
            fully_shard(block, **options)
    return fully_shard(net, **options)


def made(
    mesh: tuple[int, ...] = PAIR, *types: torch.dtype | None, nested: bool = True, **net: Any
) -> Callable[[], Any]:
    """What makes a model; `types`: of parameters, and of what is reduced."""
    policy = MixedPrecisionPolicy(*types)
    return lambda: sharded(Net(**net), mesh, nested=nested, mp_policy=policy)


def collector_of(model: nn.Module, groups: Any = None) -> Fsdp2Collector:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return Fsdp2Collector(model, trained, groups)


def steps(
    model: Any, rounds: Rounds, branch: Branch = always, *, groups: Any = None, **options: Any
) -> dict[str, Any]:
    result = steps_of(collector_of(model, groups), model, rounds, branch, **options)
    factor = getattr(model, "squares", 1.0)
    for row in result["rows"]:
        row[2:] = [[factor * one for one in expected] for expected in row[2:]]
    return result


def unit_of(module: nn.Module) -> Any:
    state = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        (unit,) = state._fsdp_param_groups
        return unit
    return state._fsdp_param_group  # before torch 2.12


# ---- norms


def in_second_step_only(step: int, pass_: int) -> bool:
    return step == 1


def along_another_dimension() -> Any:
    def second_if_even(p: nn.Parameter) -> Shard:
        return Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else Shard(0)

    return sharded(Net(8, 12), shard_placement_fn=second_if_even)


class Complex(nn.Module):
    """FSDP2 itself takes one dtype a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = Complex
        self.first = nn.Linear(5, 6)
        self.middle = nn.Linear(3, 3, dtype=torch.cfloat)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        z = self.middle(torch.view_as_complex(self.first(x).unflatten(-1, (3, 2))))
        return self.last(torch.view_as_real(z).flatten(-2))


def with_a_complex_unit() -> Any:
    mesh, net = mesh_of(PAIR), Complex()
    fully_shard(net.middle, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def offloaded_in_a_shared_unit() -> Any:
    net = Net()
    options: Any = {"mesh": mesh_of(PAIR), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    fully_shard([net.first, net.last], **options)
    return fully_shard(net, **options)


def replicated() -> Any:
    net: Any = Net()
    for block in net.blocks:
        replicate(block, mesh=mesh_of(PAIR))
    return replicate(net, mesh=mesh_of(PAIR))


def divided(make: Callable[[], Any], ranks: int) -> Callable[[], Any]:
    """By half of the ranks, so that `p.grad` is twice the mean."""

    def made() -> Any:
        model = make()
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(0.5 * ranks)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        model.squares = 4.0
        return model

    return made


FULL, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Where only what is reduced is rounded, each element is by 2^-9 or 2^-12 of itself at most: 4e-3 or
# 5e-4 of the squared norm if all went one way.
REDUCED_IN_BF16, REDUCED_IN_FP16, ALL_IN_BF16, ALL_IN_FP16 = 4e-3, 5e-4, 5e-2, 5e-3

runs = Runs(steps)
runs.add(
    two,
    {
        "another dimension": Run(along_another_dimension, EVERY_PASS, how={"groups": str}),
        "reentrant checkpoints": Run(made(reentrant=True), SUMMED, how=CAPTURE),
        "complex": Run(with_a_complex_unit, SINGLE),
        # Autograd accumulates once all uses have arrived, so it is reduced once.
        "called twice in one pass": Run(made(), SUMMED, how=TOGETHER),
        "offloaded": Run(offloaded_in_a_shared_unit, EVERY_PASS, how=WITHOUT),
        # No reduce-scatter is called, as by `replicate`.
        "one shard": Run(made((2, 1)), TWO_ROUNDS, how=IN_GROUPS),
        "reduced in fp16": Run(made(PAIR, None, FP16), TWO_ROUNDS, REDUCED_IN_FP16, IN_GROUPS),
        "in bf16": Run(made(PAIR, BF16), SINGLE, ALL_IN_BF16),
        "a divisor of one's own": Run(divided(made(), 2), SINGLE),
        "a divisor, in fp16": Run(divided(made(PAIR, None, FP16), 2), SINGLE, REDUCED_IN_FP16),
    },
)
runs.add(
    four,
    {
        # FSDP's final callback reduces the root's gradients.
        "one unit": Run(made(SQUARE, nested=False), SUMMED, how=CAPTURE),
        "nested units": Run(made(SQUARE), TWO_ROUNDS, how=IN_GROUPS),
        # What has no gradient is missing in the buffer, where the next one then takes its place.
        "without": Run(made(SQUARE), EVERY_PASS, how=WITHOUT),
    },
)
further = {
    "one shard in fp16": Run(made((2, 1), None, FP16), SINGLE, REDUCED_IN_FP16),
    "reduced in bf16": Run(made(PAIR, None, BF16), SINGLE, REDUCED_IN_BF16),
    "another dimension, without": Run(along_another_dimension, EVERY_PASS, how=WITHOUT),
    "checkpoints, one unit": Run(made(nested=False, reentrant=True), SUMMED, how=CAPTURE),
    "computed in bf16": Run(made(PAIR, BF16, FULL), TWO_ROUNDS, ALL_IN_BF16, IN_GROUPS),
    "in bf16, two rounds": Run(made(PAIR, BF16), TWO_ROUNDS, ALL_IN_BF16),
    "in fp16": Run(made(PAIR, FP16), TWO_ROUNDS, ALL_IN_FP16),
}
if "mesh" in inspect.signature(replicate).parameters:  # torch's own, and no other one
    further |= {
        f"replicated {number}": Run(replicated, rounds, how={"groups": groups})
        for number, (rounds, groups) in enumerate(EVERY_WAY)
    }
    runs.add(two, {"replicated": Run(replicated, TWO_ROUNDS, how=IN_GROUPS)})
runs.add(Ranks(2), further, quick=False)
every_way: list[tuple[Rounds, dict[str, Any]]] = [
    *((way, {"groups": of, "capture": on}) for way, of in EVERY_WAY for on in (False, True)),
    *(
        (way, {"groups": GROUPS, "branch": branch})
        for branch in (in_first_pass_only, in_second_step_only)
        for way in (EVERY_PASS, SUMMED)
    ),
]
for mesh in ((4,), SQUARE, (2, 1)):
    ways = {
        f"{mesh} {nested} {number}": Run(made(mesh, nested=nested), rounds, how=how)
        for nested in (False, True)
        for number, (rounds, how) in enumerate(every_way)
    }
    # What is reduced in half precision is divided before by what depends on the ranks.
    in_fp16, ranks = made(mesh, None, FP16), math.prod(mesh)
    divisors = {
        f"{mesh} in bf16": Run(made(mesh, None, BF16), TWO_ROUNDS, REDUCED_IN_BF16),
        f"{mesh} in fp16": Run(in_fp16, TWO_ROUNDS, REDUCED_IN_FP16, IN_GROUPS),
        f"{mesh} divided": Run(divided(made(mesh), ranks), SINGLE),
        f"{mesh} divided, in fp16": Run(divided(in_fp16, ranks), SINGLE, REDUCED_IN_FP16),
    }
    runs.add(Ranks(ranks), ways | (divisors if ranks > 2 else {}), quick=False)


@pytest.mark.parametrize("name", runs.names)
def test_norms_are_those_of_brute_force(name: str) -> None:
    """For more ways of training see the contract of all collectors."""
    runs.check(name)


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        case
        for ranks, case in ((2, (PAIR, FP16)), (4, slow(SQUARE, FULL)))
        if ranks <= devices.most_ranks()
    ],
)
def test_training_is_bitwise_what_it_is_without(
    device: torch.device, mesh: tuple[int, ...], dtype: torch.dtype
) -> None:
    def trained(measured: bool) -> list[Tensor]:
        net = Net().to(devices.of_rank(dist.get_rank()))
        model = sharded(net, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        collector = collector_of(model, GROUPS) if measured else None
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
        return [p.full_tensor() for p in model.parameters()]

    def both() -> list[bool]:
        return [torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True)]

    assert all(map(all, on_ranks(math.prod(mesh), both)))


# ---- what belongs to others


class CountingReduceScatter(ReduceScatter):
    """A user's own, with buffers of its own."""

    def __init__(self) -> None:
        self.allocated = self.reduced = 0
        self.default = DefaultReduceScatter()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated += 1
        return self.default.allocate(size, dtype=dtype, device=device)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.reduced += 1
        return self.default(*arguments, **options)


@two
def with_a_users_reduce_scatter() -> dict[str, Any]:
    model, own = sharded(Net()), CountingReduceScatter()
    model.blocks[0].set_custom_reduce_scatter(own)
    units = [unit_of(module) for module in (*model.blocks, model)]
    before = [unit._reduce_scatter_comm for unit in units]
    result = steps(model, EVERY_PASS)
    assert (own.allocated, own.reduced) == (2 * STEPS * 3, STEPS * 3)
    assert all(u._reduce_scatter_comm is c for u, c in zip(units, before, strict=True))
    return result


def test_a_users_reduce_scatter_is_used_and_restored() -> None:
    check(with_a_users_reduce_scatter())


@two
def set_beside_collectors() -> None:
    """A reduce-scatter, and how buffers are allocated."""
    replaced, model, own = sharded(Net()), sharded(Net()), CountingReduceScatter()
    collector = collector_of(replaced)
    replaced.set_custom_reduce_scatter(own)
    collector.close()
    collectors = [collector_of(model) for _ in range(2)]
    model.set_allocate_memory_from_process_group_for_comm(True)
    for collector in collectors:
        collector.close()
    assert unit_of(replaced)._reduce_scatter_comm is own
    assert isinstance(unit_of(model)._reduce_scatter_comm, ReduceScatter)


def test_what_is_set_beside_a_collector_stays() -> None:
    assert set_beside_collectors() == [None, None]


@two
def hooked() -> list[int]:
    model = sharded(Net())
    collector = collector_of(model, GROUPS)
    found = []
    for _ in range(2):
        loss = loss_of(model, 0, 0, dist.get_rank(), branch=False)
        collector.before_backward(loss, 1)
        loss.backward()
        for closes in (collector.small_sq_norms, collector.reset):
            closes()
            found.append(sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters()))
    return found


def test_hooks_that_tell_which_gradients_came_are_gone_after_the_step() -> None:
    """While a parameter has one, FSDP waits for each copy of an offloaded gradient."""
    for during, after, again, at_last in hooked():
        assert during == again > 0
        assert after == at_last == 0


# ---- which passes have norms


@two
def beside_passes_that_are_not_announced() -> None:
    model = sharded(Net())
    collector = collector_of(model, GROUPS)

    def run(announced: bool, branch: bool = True) -> Any:
        loss = loss_of(model, 0, 0, dist.get_rank(), branch)
        if announced:
            collector.before_backward(loss, 1)
        loss.backward()
        return collector.small_sq_norms()

    first = run(announced=True)
    between = run(announced=False)  # in the same step
    collector.reset()
    assert run(announced=False, branch=False) is None
    assert first.tolist() == between.tolist()


def test_passes_that_are_not_announced_do_not_count() -> None:
    assert beside_passes_that_are_not_announced() == [None, None]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 4), nn.Linear(4, 5)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).tanh()

    def decode(self, h: Tensor) -> Tensor:
        return self.decoder(h)


@two
def reduced_twice_in_one_pass() -> Tensor | None:
    model: Any = fully_shard(Halves(), mesh=mesh_of(PAIR))
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "decode")
    collector = collector_of(model)
    x = batch(0, 0, dist.get_rank()).requires_grad_()
    loss = model.decode(model.encode(x)).square().mean()
    collector.before_backward(loss, 3)
    loss.backward()
    return collector.small_sq_norms()


def test_a_unit_that_reduces_twice_in_one_pass_has_no_norm() -> None:
    """Its two buffers may hold parts of one parameter's gradient."""
    assert reduced_twice_in_one_pass() == [None, None]


@four
def without_norms() -> None:
    model = sharded(Net(), SQUARE)
    steps = WithoutNorms(collector_of(model), model)
    steps.go_through_all()
    model.blocks[0].set_requires_gradient_sync(False)
    steps.backward()
    steps.close("units that reduce in different passes")
    steps.run(True)
    steps.collector.reset()
    model.set_requires_all_reduce(False)
    steps.backward()
    assert not steps.collector.gradients_dropped
    steps.close("gradients not summed over replicas")
    steps.run(True)
    steps.collector.reset()
    model.set_requires_all_reduce(True)
    steps.run(True)
    steps.close("a good step after them", norms=True)


def test_what_has_no_norm_of_its_own_gets_none() -> None:
    assert without_norms() == [None] * 4


@two
def of_one_shard() -> list[bool]:
    found = []
    for dtype, divisor, groups, branch in (
        (None, None, None, True),
        (None, 4.0, None, True),
        (FP16, None, GROUPS, True),
        (FP16, None, GROUPS, False),  # a parameter without gradient
        (None, None, GROUPS, False),
    ):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        net: Any = replicate(Net(), mesh=mesh_of(PAIR), mp_policy=policy)
        if divisor is not None:
            net.set_gradient_divide_factor(divisor)
        collector = collector_of(net, groups)
        loss = loss_of(net, 0, 0, dist.get_rank(), branch)
        collector.before_backward(loss, 1)
        loss.backward()
        found.append(collector.small_sq_norms() is not None)
        collector.close()
    return found


def test_one_shard_with_a_divisor_that_is_not_known_has_no_small_norm() -> None:
    assert of_one_shard() == [[True, False, True, False, True]] * 2


@four
def summed_over_replicas_at_last() -> list[int]:
    model = sharded(Net(), SQUARE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meter = NoiseScaleMeter(model, every_n_steps=1, optimizer=optimizer)
    for step in range(3):
        for pass_ in range(2):
            model.set_requires_all_reduce(pass_ == 1)
            meter.backward(loss_of(model, step, pass_, dist.get_rank()) / 2, local_batch_size=4)
        meter.step()
        optimizer.step()
        optimizer.zero_grad()
    return [meter.measured_steps, meter.skipped_steps]


def test_sums_over_replicas_that_wait_for_the_last_pass_are_measured() -> None:
    """As Hugging Face's Trainer has them where a model is replicated and sharded."""
    assert summed_over_replicas_at_last() == [[3, 0]] * 4


# ---- parts and groups

SIZES = [[4.0, 8.0, 2.0, 4.0], [4.0, 0.0, 2.0, 4.0]]


@two
def layouts() -> list[list[tuple[float, ...]]]:
    """Of each sizes, by the passes that close a round."""
    collector = collector_of(sharded(Net()))
    found = []
    for sizes in SIZES:
        found.append([])
        for rounds in ([1, 2, 3, 4], [2, 4], [4], []):
            collector._step.rounds = rounds
            found[-1].append(tuple(collector.layout(sizes, 8))[:4])
    return found


def test_layout_lies_between_a_part_a_pass_and_a_part_a_rank() -> None:
    for of_rank in layouts():
        for sizes, (every_pass, pairs, one, none) in zip(SIZES, of_rank, strict=True):
            assert every_pass == pytest.approx(tuple(each_micro_batch(sizes, 8))[:4])
            assert one == pytest.approx(tuple(whole_rank(sizes, 8))[:4])
            per_round = [
                sum(1 / n if n else math.inf for n in r) / 4 for r in (sizes[:2], sizes[2:])
            ]
            inverse = sum(1 / n if n else math.inf for n in sizes) / 16
            assert pairs == pytest.approx((4.0**2 / 2, 2.0**2, sum(per_round) / 2, inverse))
            assert math.isnan(none[0])


@four
def members() -> list[Any]:
    whole = mesh_of((2, 1, 2))
    mesh = whole["replica", "shard"]  # which, before torch 2.10, does not keep it alive
    collectors = [collector_of(sharded(Net(), one)) for one in (mesh, mesh["shard"], (4,))]
    return [dist.get_process_group_ranks(one.group) for one in collectors]


def test_the_group_is_that_of_all_data_parallel_ranks() -> None:
    first, second = [[0, 1]] * 2, [[2, 3]] * 2

    assert [one[:2] for one in members()] == [first] * 2 + [second] * 2
    assert all(one[2] == [0, 1, 2, 3] for one in members())


@two
def searches_and_kinds() -> list[Any]:
    plain, part = Net(), Net()
    fully_shard(part.blocks[1], mesh=mesh_of(PAIR))
    model = sharded(Net())
    with mock.patch.object(gc, "get_referrers", wraps=gc.get_referrers) as search:
        group = collector_of(model).group
    return [search.call_count, group is dist.group.WORLD, is_fsdp2(plain), is_fsdp2(part)]


def test_all_objects_are_searched_for_meshes_once_a_model_and_not_once_a_parameter() -> None:
    """A process of a training holds a million objects, and a model hundreds of parameters.

    Sharded is what `fully_shard` was applied to, and the group of all ranks is torch's own.
    """
    assert searches_and_kinds() == [[1, True, False, True]] * 2


# ---- what is refused: last, as meshes of context parallelism are found by all that come later


def part() -> nn.Module:
    net = Net()
    fully_shard(net.blocks[0], mesh=mesh_of(PAIR))
    return net


def with_an_all_reduce_hook() -> nn.Module:
    model = sharded(Net())
    model.set_all_reduce_hook(lambda gradient: None)
    return model  # type: ignore[no-any-return]


def one_dimension() -> nn.Module:
    """As accelerate does without data parallelism: the group is that of all ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return sharded(Net(), mesh)  # type: ignore[no-any-return]


def flattened() -> nn.Module:
    """As torchtitan and accelerate shard where a batch is shared by the ranks of `cp`."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    return sharded(Net(), mesh._flatten("dp_shard_cp"))  # type: ignore[no-any-return]


def two_meshes() -> nn.Module:
    mesh, net = mesh_of(SQUARE), Net()
    fully_shard(net.blocks[0], mesh=mesh["shard"])
    return fully_shard(net, mesh=mesh)


def another_mesh() -> nn.Module:
    """As verl does, and torchtitan since it unflattens the mesh of all ranks twice."""
    init_device_mesh("cpu", SQUARE, mesh_dim_names=("dp", "sp"))
    return sharded(Net(), (4,))  # type: ignore[no-any-return]


REFUSED: dict[Callable[[], nn.Module], str] = {
    part: "`fully_shard` to the whole model",
    with_an_all_reduce_hook: "no all-reduce hook",
}
if hasattr(DeviceMesh, "_get_root_mesh"):
    REFUSED[one_dimension] = "mesh dimension 'cp'"
if hasattr(DeviceMesh, "_flatten"):
    REFUSED[flattened] = "mesh dimension 'cp'"
REFUSED_OF_FOUR: dict[Callable[[], nn.Module], str] = {
    two_meshes: "over one mesh, got 2",
    another_mesh: "mesh dimension 'sp'",
}


def refuse(models: dict[Callable[[], nn.Module], str]) -> None:
    for make, message in models.items():
        model = make()
        with pytest.raises(NotMeasured, match=message):
            collector_of(model)


refusals = two(partial(refuse, REFUSED)), four(partial(refuse, REFUSED_OF_FOUR))


def test_what_is_no_fsdp2_over_one_mesh_is_not_measured() -> None:
    assert [of_ranks() for of_ranks in refusals] == [[None] * 2, [None] * 4]
