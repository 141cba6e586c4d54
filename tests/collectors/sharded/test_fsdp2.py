# SPDX-License-Identifier: Apache-2.0
"""What is odd about FSDP2: units, rounds, meshes, divisors, precisions, what is refused."""

import contextlib
import gc
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import devices
import pytest

pytest.importorskip("torch", "2.9", "before torch 2.9 FSDP2 does not show what it reduces")

import torch
import torch._dynamo  # which FSDP2 imports, here once and not in every fork
import torch.distributed as dist
from ranks import on_ranks
from rounds import (
    EVERY_PASS,
    GROUPS,
    SINGLE,
    STEPS,
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
    mesh_of,
    steps_of,
    whole,
)
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


def sharded(
    net: Net, mesh: DeviceMesh, *, nested: bool = True, policy: Any = None, **options: Any
) -> Any:
    options["mp_policy"] = policy or MixedPrecisionPolicy()
    if nested:
        for block in net.blocks:
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def trained(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def steps(
    model: Any, rounds: Rounds, branch: Branch = always, *, groups: Any = None, **options: Any
) -> dict[str, Any]:
    collector = Fsdp2Collector(model, trained(model), groups)
    return steps_of(collector, model, rounds, branch, **options)


def unit_of(module: nn.Module) -> Any:
    state = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        (unit,) = state._fsdp_param_groups
        return unit
    return state._fsdp_param_group  # before torch 2.12


def check_runs(mesh: tuple[int, ...], runs: Callable[[DeviceMesh], list[dict[str, Any]]]) -> None:
    """Go through them on one set of ranks, and check each."""
    for results in zip(*on_ranks(math.prod(mesh), lambda: runs(mesh_of(mesh))), strict=True):
        check(list(results))


EVERY_WAY = [(SINGLE, GROUPS), (EVERY_PASS, None), (SUMMED, None), (TWO_ROUNDS, GROUPS)]


@pytest.mark.parametrize(("mesh", "ways"), [((4,), EVERY_WAY[3:]), ((2, 2), EVERY_WAY)])
def test_captured_norms_are_those_of_brute_force(mesh: tuple[int, ...], ways: Any) -> None:
    """Of one unit and of nested units, of which FSDP's final callback reduces the root's gradients.

    For two ranks see the contract of all collectors.
    """
    check_runs(
        mesh,
        lambda device_mesh: [
            steps(
                sharded(Net(), device_mesh, nested=nested), rounds, groups=groups, capture=capture
            )
            for nested in (False, True)
            for rounds, groups in ways
            for capture in (False, True)
        ],
    )


def test_a_parameter_without_gradient_leaves_the_others_where_they_are() -> None:
    """It is missing in the buffer, where the next one then takes its place."""

    def in_first_pass_only(step: int, pass_: int) -> bool:
        return pass_ == 0

    def in_second_step_only(step: int, pass_: int) -> bool:
        return step == 1

    check_runs(
        (2, 2),
        lambda device_mesh: [
            steps(sharded(Net(), device_mesh, nested=nested), rounds, branch, groups=GROUPS)
            for nested in (False, True)
            for rounds in (EVERY_PASS, SUMMED)
            for branch in (in_first_pass_only, in_second_step_only)
        ],
    )


@pytest.mark.skipif(
    "mesh" not in inspect.signature(replicate).parameters, reason="this torch has another"
)
def test_replicas_without_shards_are_measured() -> None:
    """By `replicate`, and by `fully_shard` with one shard: no reduce-scatter is called."""

    def every_way() -> list[dict[str, Any]]:
        results = []
        for rounds, groups in EVERY_WAY:
            net: Any = Net()
            for block in net.blocks:
                replicate(block, mesh=mesh_of((2,)))
            results.append(steps(replicate(net, mesh=mesh_of((2,))), rounds, groups=groups))
            results.append(steps(sharded(Net(), mesh_of((2, 1))), rounds, groups=groups))
        half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
        results.append(steps(sharded(Net(), mesh_of((2, 1)), policy=half), SINGLE))
        return results

    for results in zip(*on_ranks(2, every_way), strict=True):
        check(list(results), 5e-4)


def test_hooks_that_tell_which_gradients_came_are_gone_after_the_step() -> None:
    """While a parameter has one, FSDP waits for each copy of an offloaded gradient."""

    def hooked() -> list[int]:
        model = sharded(Net(), mesh_of((2,)))
        collector = Fsdp2Collector(model, trained(model), GROUPS)
        found = []
        for _ in range(2):
            loss = loss_of(model, 0, 0, dist.get_rank(), branch=False)
            collector.before_backward(loss, 1)
            loss.backward()
            for closes in (collector.small_sq_norms, collector.reset):
                closes()
                found.append(sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters()))
        return found

    for during, after, again, at_last in on_ranks(2, hooked):
        assert during == again > 0
        assert after == at_last == 0


def test_parameters_may_be_sharded_along_another_dimension() -> None:
    def second_if_even(p: nn.Parameter) -> Shard:
        return Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else Shard(0)

    def every_way() -> list[dict[str, Any]]:
        model = sharded(Net(8, 12), mesh_of((2,)), shard_placement_fn=second_if_even)
        return [
            steps(model, EVERY_PASS, groups=lambda name: name),
            steps(model, EVERY_PASS, lambda step, pass_: pass_ == 0, groups=GROUPS),
        ]

    for results in zip(*on_ranks(2, every_way), strict=True):
        check(list(results))


def test_nested_backward_passes_of_reentrant_checkpoints_are_whole() -> None:
    check_runs(
        (2,),
        lambda device_mesh: [
            steps(sharded(Net(reentrant=True), device_mesh, nested=nested), SUMMED, capture=True)
            for nested in (False, True)
        ],
    )


class Complex(nn.Module):
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


def test_complex_parameters_are_measured_in_a_unit_of_their_own() -> None:
    """FSDP2 itself takes one dtype a unit."""

    def measured() -> dict[str, Any]:
        mesh, net = mesh_of((2,)), Complex()
        fully_shard(net.middle, mesh=mesh)
        return steps(fully_shard(net, mesh=mesh), SINGLE)

    check(on_ranks(2, measured))


def test_modules_may_share_a_unit_and_gradients_be_offloaded() -> None:
    def shared() -> dict[str, Any]:
        net = Net()
        options: Any = {"mesh": mesh_of((2,)), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
        fully_shard([net.first, net.last], **options)
        return steps(
            fully_shard(net, **options), EVERY_PASS, lambda step, pass_: pass_ == 0, groups=GROUPS
        )

    check(on_ranks(2, shared))


TOLERANCES = {
    # Only what is reduced is rounded: each element by 2^-9 or 2^-12 of itself at most, so
    # 4e-3 or 5e-4 of the squared norm if all went one way.
    MixedPrecisionPolicy(reduce_dtype=torch.bfloat16): 4e-3,
    MixedPrecisionPolicy(reduce_dtype=torch.float16): 5e-4,
    # The forward and backward passes are rounded too.
    MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32): 5e-2,
    MixedPrecisionPolicy(torch.bfloat16): 5e-2,
    MixedPrecisionPolicy(torch.float16): 5e-3,
}


@pytest.mark.parametrize(("mesh", "policies"), [((2,), 5), ((4,), 2), ((2, 2), 2)])
def test_half_precision_is_normed_undivided(mesh: tuple[int, ...], policies: int) -> None:
    """What is reduced is divided before by what depends on the ranks."""
    chosen = list(TOLERANCES)[:policies]

    def every_way() -> list[dict[str, Any]]:
        device_mesh = mesh_of(mesh)
        return [
            steps(sharded(Net(), device_mesh, policy=policy), TWO_ROUNDS, groups=groups)
            for policy, groups in zip(chosen, (None, GROUPS, GROUPS, None, None), strict=False)
        ]

    every_result = zip(*on_ranks(math.prod(mesh), every_way), strict=True)

    for policy, results in zip(chosen, every_result, strict=True):
        check(list(results), TOLERANCES[policy])


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_a_divisor_of_ones_own_is_in_both_norms(mesh: tuple[int, ...]) -> None:
    ranks = math.prod(mesh)
    divisor = 0.5 * ranks  # p.grad is twice the mean

    def every_way() -> list[dict[str, Any]]:
        results = []
        for dtype in (torch.float32, torch.float16):
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            model = sharded(Net(), mesh_of(mesh), policy=policy)
            for module in (*model.blocks, model):
                module.set_gradient_divide_factor(divisor)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            results.append(steps(model, SINGLE))
        return results

    for results in zip(*on_ranks(ranks, every_way), strict=True):
        for result in results:
            for small, big, expected_small, expected_big in result["rows"]:
                assert small == pytest.approx([4 * e for e in expected_small], rel=5e-4)
                assert big == pytest.approx([4 * e for e in expected_big], rel=5e-4)


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        (mesh, dtype)
        for mesh, dtype in (((2,), torch.float16), ((2, 2), torch.float32))
        if math.prod(mesh) <= devices.most_ranks()
    ],
)
def test_training_is_bitwise_what_it_is_without(
    device: torch.device, mesh: tuple[int, ...], dtype: torch.dtype
) -> None:
    def trained(measured: bool) -> list[Tensor]:
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        model = sharded(Net().to(devices.of_rank(dist.get_rank())), mesh_of(mesh), policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        collector = Fsdp2Collector(model, named, GROUPS) if measured else None
        for step in range(4):
            optimizer.zero_grad()
            for pass_ in range(2):
                branch = step != 2
                loss = loss_of(model, step, pass_, dist.get_rank(), branch)
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


def test_a_users_reduce_scatter_is_used_and_restored() -> None:
    def restored() -> dict[str, Any]:
        model = sharded(Net(), mesh_of((2,)))
        own = CountingReduceScatter()
        model.blocks[0].set_custom_reduce_scatter(own)
        units = [unit_of(module) for module in (*model.blocks, model)]
        before = [unit._reduce_scatter_comm for unit in units]
        result = steps(model, EVERY_PASS)
        result["counts"] = own.allocated, own.reduced
        result["restored"] = [
            u._reduce_scatter_comm is c for u, c in zip(units, before, strict=True)
        ]
        return result

    results = on_ranks(2, restored)

    check(results)
    for result in results:
        assert result["counts"] == (2 * STEPS * 3, STEPS * 3)
        assert result["restored"] == [True, True, True]


def test_a_reduce_scatter_put_in_its_place_is_left_there() -> None:
    def left() -> bool:
        model = sharded(Net(), mesh_of((2,)))
        collector = Fsdp2Collector(model, trained(model))
        own = CountingReduceScatter()
        model.set_custom_reduce_scatter(own)
        collector.close()
        return unit_of(model)._reduce_scatter_comm is own

    assert on_ranks(2, left) == [True, True]


def test_passes_that_are_not_announced_do_not_count() -> None:
    def measured() -> list[list[float]]:
        model = sharded(Net(), mesh_of((2,)))
        collector = Fsdp2Collector(model, trained(model), GROUPS)

        def run(announced: bool, branch: bool = True) -> Tensor | None:
            loss = loss_of(model, 0, 0, dist.get_rank(), branch)
            if announced:
                collector.before_backward(loss, 1)
            loss.backward()
            return collector.small_sq_norms()

        assert run(announced=False) is None
        first = run(announced=True)
        assert first is not None
        run(announced=False)  # after the announced one, in the same step
        between = collector.small_sq_norms()
        collector.reset()
        assert run(announced=False, branch=False) is None
        assert between is not None
        return [first.tolist(), between.tolist()]

    for first, between in on_ranks(2, measured):
        assert first == between


def test_a_module_called_twice_in_one_pass_is_whole() -> None:
    """Autograd accumulates once all uses have arrived, so it is reduced once."""

    def captured() -> dict[str, Any]:
        model = sharded(Net(), mesh_of((2,)))
        collector = Fsdp2Collector(model, trained(model))
        expected = brute_force(whole(model), 0, [[0, 1]], always, collector.norms, 2)
        loss = (loss_of(model, 0, 0, dist.get_rank()) + loss_of(model, 0, 1, dist.get_rank())) / 2
        collector.before_backward(loss, 8)
        loss.backward()
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        dist.all_reduce(big)
        assert small is not None
        return {"rows": [(small.tolist(), big.tolist(), *expected)]}

    check(on_ranks(2, captured))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 4), nn.Linear(4, 5)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).tanh()

    def decode(self, h: Tensor) -> Tensor:
        return self.decoder(h)


def test_a_unit_that_reduces_twice_in_one_pass_has_no_norm() -> None:
    """Its two buffers may hold parts of one parameter's gradient."""

    def captured() -> Tensor | None:
        model = fully_shard(Halves(), mesh=mesh_of((2,)))
        register_fsdp_forward_method(model, "encode")
        register_fsdp_forward_method(model, "decode")
        collector = Fsdp2Collector(model, trained(model))
        x = batch(0, 0, dist.get_rank()).requires_grad_()
        loss = model.decode(model.encode(x)).square().mean()
        collector.before_backward(loss, 3)
        loss.backward()
        return collector.small_sq_norms()

    assert on_ranks(2, captured) == [None, None]


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_what_has_no_norm_of_its_own_gets_none(mesh: tuple[int, ...]) -> None:
    def none() -> list[str]:
        model = sharded(Net(), mesh_of(mesh))
        collector = Fsdp2Collector(model, trained(model))
        wrong = []

        @contextlib.contextmanager
        def incomparable(what: str) -> Iterator[None]:
            yield
            if collector.small_sq_norms() is not None:
                wrong.append(what)
            collector.reset()
            model.zero_grad()

        def run(*, sync: bool = True) -> None:
            model.set_requires_gradient_sync(sync)
            backward()

        def backward() -> None:
            loss = loss_of(model, 0, 0, dist.get_rank())
            collector.before_backward(loss, 1)
            loss.backward()

        with incomparable("no pass"):
            pass
        with incomparable("rounds of unequal length"):
            run()
            run(sync=False)
            run()
        with incomparable("passes that are never reduced"):
            run()
            run(sync=False)
        run()  # reduces what the last case left
        collector.reset()
        with incomparable("units that reduce in different passes"):
            model.set_requires_gradient_sync(True)
            model.blocks[0].set_requires_gradient_sync(False)
            backward()
        run()
        collector.reset()
        if len(mesh) == 2:
            with incomparable("gradients not summed over replicas"):
                model.set_requires_all_reduce(False)
                backward()
                if collector.gradients_dropped:
                    wrong.append("nothing was dropped")
        run()
        collector.reset()
        run()
        if collector.small_sq_norms() is None:
            wrong.append("a good step after them")
        return wrong

    assert on_ranks(math.prod(mesh), none) == [[]] * math.prod(mesh)


def test_layout_lies_between_a_part_a_pass_and_a_part_a_rank() -> None:
    both_sizes = [[4.0, 8.0, 2.0, 4.0], [4.0, 0.0, 2.0, 4.0]]

    def layouts() -> list[Any]:
        model = sharded(Net(), mesh_of((2,)))
        collector = Fsdp2Collector(model, trained(model))
        found = []
        for sizes in both_sizes:
            for rounds in ([1, 2, 3, 4], [2, 4], [4], []):
                collector._step.rounds = rounds
                found.append(tuple(collector.layout(sizes, 8))[:4])
        return [found[:4], found[4:]]

    for of_rank in on_ranks(2, layouts):
        for sizes, (every_pass, pairs, one, none) in zip(both_sizes, of_rank, strict=True):
            assert every_pass == pytest.approx(tuple(each_micro_batch(sizes, 8))[:4])
            assert one == pytest.approx(tuple(whole_rank(sizes, 8))[:4])
            per_round = [
                sum(1 / n if n else math.inf for n in r) / 4 for r in (sizes[:2], sizes[2:])
            ]
            inverse = sum(1 / n if n else math.inf for n in sizes) / 16
            assert pairs == pytest.approx((4.0**2 / 2, 2.0**2, sum(per_round) / 2, inverse))
            assert math.isnan(none[0])


def test_the_group_is_that_of_all_data_parallel_ranks() -> None:
    def members() -> list[Any]:
        whole = mesh_of((2, 1, 2))
        mesh = whole["replica", "shard"]  # which, before torch 2.10, does not keep it alive
        model = sharded(Net(), mesh)
        collector = Fsdp2Collector(model, trained(model))
        line = Fsdp2Collector(whole_line := sharded(Net(), mesh["shard"]), trained(whole_line))
        return [dist.get_process_group_ranks(c.group) for c in (collector, line)]

    assert on_ranks(4, members) == [[[0, 1]] * 2] * 2 + [[[2, 3]] * 2] * 2
    assert on_ranks(
        2,
        lambda: (
            Fsdp2Collector(m := sharded(Net(), mesh_of((2,))), trained(m)).group is dist.group.WORLD
        ),
    ) == [True, True]


def part() -> nn.Module:
    net = Net()
    fully_shard(net.blocks[0], mesh=mesh_of((2,)))
    return net


def two_meshes() -> nn.Module:
    mesh, net = mesh_of((2, 2)), Net()
    fully_shard(net.blocks[0], mesh=mesh["shard"])
    return fully_shard(net, mesh=mesh)


def flattened() -> nn.Module:
    """As torchtitan and accelerate shard where a batch is shared by the ranks of `cp`."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    return sharded(Net(), mesh._flatten("dp_shard_cp"))


def one_dimension() -> nn.Module:
    """As accelerate does without data parallelism: the group is that of all ranks."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return sharded(Net(), mesh)


def another_mesh() -> nn.Module:
    """As verl does, and torchtitan since it unflattens the mesh of all ranks twice."""
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    return sharded(Net(), mesh_of((4,)))


def hooked() -> nn.Module:
    model = sharded(Net(), mesh_of((2,)))
    model.set_all_reduce_hook(lambda gradient: None)
    return model


def context(name: str) -> str:
    return (
        rf"be data parallel only, got context parallelism over 2 ranks \(mesh dimension '{name}'\):"
        r" these ranks share the tokens of one batch, and their gradients are not independent\."
        r" Train without context parallelism\."
    )


@pytest.mark.parametrize(
    ("make", "ranks", "message"),
    [
        pytest.param(
            flattened,
            2,
            context("cp"),
            marks=pytest.mark.skipif(
                not hasattr(DeviceMesh, "_flatten"), reason="this torch flattens no mesh"
            ),
        ),
        pytest.param(
            one_dimension,
            2,
            context("cp"),
            marks=pytest.mark.skipif(
                not hasattr(DeviceMesh, "_get_root_mesh"), reason="this torch shows no root"
            ),
        ),
        (another_mesh, 4, context("sp")),
        (
            part,
            2,
            r"shard every trained parameter, got 'first\.weight': FSDP does not reduce its"
            r" gradient\. Apply `fully_shard` to the whole model as well, or leave the parameter"
            r" out\.",
        ),
        (
            two_meshes,
            4,
            r"be sharded over one mesh, got 2: its gradients are means over different ranks\."
            r" Measure the parameters of one mesh\.",
        ),
        (
            hooked,
            2,
            r"have no all-reduce hook, got one on the unit of 'first\.weight': FSDP does not know"
            r" what it averages over\. Pass `fully_shard` a mesh of two dimensions instead\.",
        ),
    ],
)
def test_what_is_no_fsdp2_over_one_mesh_is_not_measured(
    make: Callable[[], nn.Module], ranks: int, message: str
) -> None:
    def refused() -> None:
        model = make()
        with pytest.raises(ValueError, match=f"^`model` must {message}$"):
            Fsdp2Collector(model, trained(model))

    on_ranks(ranks, refused)


def test_all_objects_are_searched_for_meshes_once_a_model_and_not_once_a_parameter() -> None:
    """A process of a training holds a million objects, and a model hundreds of parameters."""

    def searches() -> int:
        model = sharded(Net(), mesh_of((2,)))
        with mock.patch.object(gc, "get_referrers", wraps=gc.get_referrers) as search:
            Fsdp2Collector(model, trained(model))
        return search.call_count

    assert on_ranks(2, searches) == [1, 1]


def test_sharded_is_what_fully_shard_was_applied_to() -> None:
    def which() -> list[bool]:
        plain, part = Net(), Net()
        fully_shard(part.blocks[1], mesh=mesh_of((1,)))
        return [is_fsdp2(plain), is_fsdp2(part)]

    assert on_ranks(1, which) == [[False, True]]


def test_sums_over_replicas_that_wait_for_the_last_pass_are_measured() -> None:
    """As Hugging Face's Trainer has them where a model is replicated and sharded."""

    def measured() -> list[Any]:
        model = sharded(Net(), mesh_of((2, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        meter = NoiseScaleMeter(model, every_n_steps=1, optimizer=optimizer)
        for step in range(6):
            for pass_ in range(2):
                model.set_requires_all_reduce(pass_ == 1)
                loss = loss_of(model, step, pass_, dist.get_rank()) / 2
                meter.backward(loss, local_batch_size=4)
            meter.step()
            optimizer.step()
            optimizer.zero_grad()
        return [meter.measured_steps, meter.skipped_steps]

    assert on_ranks(4, measured) == [[6, 0]] * 4


def test_one_shard_with_a_divisor_that_is_not_known_has_no_small_norm() -> None:
    def measured() -> list[bool]:
        found = []
        for policy, divisor, groups, branch in (
            (None, None, None, True),
            (None, 4.0, None, True),
            (torch.float16, None, GROUPS, True),
            (torch.float16, None, GROUPS, False),  # a parameter without gradient
            (None, None, GROUPS, False),
        ):
            options = {} if policy is None else {"reduce_dtype": policy}
            net = replicate(Net(), mesh=mesh_of((2,)), mp_policy=MixedPrecisionPolicy(**options))
            if divisor is not None:
                net.set_gradient_divide_factor(divisor)
            collector = Fsdp2Collector(net, trained(net), groups)
            loss = loss_of(net, 0, 0, dist.get_rank(), branch)
            collector.before_backward(loss, 1)
            loss.backward()
            found.append(collector.small_sq_norms() is not None)
            collector.close()
        return found

    assert on_ranks(2, measured) == [[True, False, True, False, True]] * 2


def test_how_buffers_are_allocated_may_be_set_beside_a_collector() -> None:
    def allocated() -> bool:
        model = sharded(Net(), mesh_of((2,)))
        collectors = [Fsdp2Collector(model, trained(model)) for _ in range(2)]
        model.set_allocate_memory_from_process_group_for_comm(True)
        for collector in collectors:
            collector.close()
        return isinstance(unit_of(model)._reduce_scatter_comm, ReduceScatter)

    assert on_ranks(2, allocated) == [True, True]
