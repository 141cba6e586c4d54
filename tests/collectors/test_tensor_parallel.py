# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism, alone and under FSDP2: the norms of gradients of which a rank has a part.

The oracle knows nothing of ranks: gradients of the same model on one process, in float64.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from brute_force import (
    columns_of,
    expected,
    gradient_of,
    in_float64,
    micro_batch,
    over_step,
    whole,
)
from forked_once import Ranks
from refused import refused
from tiers import slow_but
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from ways_of_capture import reducing

from noisescale import NoiseScaleMeter
from noisescale.collectors.rows.step_rows import MeasuredStep
from noisescale.guard import NotMeasured
from noisescale.meter.choosing import choose_collector
from noisescale.meter.options import MeterOptions

DDP = DistributedDataParallel

WORDS, WIDTH, LENGTH = 13, 8, 6  # an odd vocabulary: shards of 7 and 6
STEPS, MICROS, EXACT = 2, 2, 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Model(nn.Module):
    """Of words; `scale` is outside of every plan."""

    def __init__(self, *, tied: bool = False, scaled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = Scale() if scaled else nn.Identity()
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return self.scale(self.head(self.norm(h)))


def batch(step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    rows = 2 + rank + micro
    return torch.randint(WORDS, (rows, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def parallelized(model: Model, mesh: Any, *, sequence: bool, by_loss: bool = False) -> None:
    """Apply a plan, with sequence parallelism or without."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if by_loss else Replicate(),
            use_local_output=not by_loss,
        ),
    }
    for k in range(2):
        plan[f"blocks.{k}.up"] = ColwiseParallel(input_layouts=between)
        plan[f"blocks.{k}.down"] = RowwiseParallel(output_layouts=between)
    if sequence:
        plan |= {name: SequenceParallel() for name in ("blocks.0.norm", "blocks.1.norm", "norm")}
    tied = model.head.weight is model.words.weight
    parallelize_module(model, mesh, plan)
    if tied:  # each module has got a parameter of its own
        model.head.weight = model.words.weight


class Case(NamedTuple):
    """A way to be parallel."""

    data: int
    """Ranks of data parallelism."""
    by: Callable[..., Any] | None = fully_shard
    sequence: bool = True
    tied: bool = False
    by_loss: bool = False
    reduced_once: bool = False
    groups: Any = None

    def model(self) -> Model:
        """By a loss that is parallel, nothing else takes the logits."""
        return Model(tied=self.tied, scaled=not self.by_loss)


CASES = {
    "alone": Case(1, None),
    "alone, no sequence": Case(1, None, sequence=False, groups={"norms": "norm", "words": "words"}),
    "alone, tied, by loss": Case(1, None, tied=True, by_loss=True),
    "FSDP2 on one": Case(1),
    "FSDP2": Case(2, groups={"norms": "norm", "ends": "words|head"}),
    "FSDP2, reduced once": Case(2, reduced_once=True),
    "FSDP2, tied": Case(2, tied=True, sequence=False),
    "FSDP2, by loss": Case(2, by_loss=True),
    "replicate": Case(2, replicate, groups={"norms": "norm", "ends": "words|head"}),
    "DDP": Case(2, DDP, reduced_once=True, groups={"norms": "norm", "ends": "words|head"}),
    "DDP, no sequence": Case(2, DDP, sequence=False, reduced_once=True),
    "DDP, by loss": Case(2, DDP, by_loss=True, reduced_once=True),
}


def averaging(model: Any, mesh: Any, by: Callable[..., Any] | None) -> Any:
    """Have the gradients of parts averaged over the ranks of data parallelism."""
    if by is DDP:
        _pre_dp_module_transform(model)
        return DDP(model, process_group=mesh["data"].get_group())
    for block in model.blocks if by is not None else ():
        by(block, mesh=mesh["data"])
    return model if by is None else by(model, mesh=mesh["data"])


class Trained(NamedTuple):
    steps: list[MeasuredStep]
    groups: tuple[str, ...]
    same: bool
    """Whether the gradients are bitwise those without a meter."""


def trained(case: Case) -> Trained:
    torch.set_num_threads(1)
    (steps, ours, groups), (_, theirs, _) = (_run(case, measured=it) for it in (True, False))
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return Trained(steps, groups, same)


def _run(case: Case, *, measured: bool) -> tuple[Any, list[Tensor], Any]:
    tensor = dist.get_world_size() // case.data
    mesh = init_device_mesh("cpu", (case.data, tensor), mesh_dim_names=("data", "tensor"))
    model: Any = case.model()
    parallelized(model, mesh["tensor"], sequence=case.sequence, by_loss=case.by_loss)
    model = averaging(model, mesh, case.by)
    parameters = list(model.parameters())  # DDP's are not in the model later
    meter = NoiseScaleMeter(model, every_n_steps=1, groups=case.groups) if measured else None
    rank = mesh.get_local_rank("data")
    found: list[MeasuredStep] = []
    gradients: list[Tensor] = []
    for step in range(STEPS):
        for p in parameters:
            p.grad = None
        for micro in range(MICROS):
            last = micro == MICROS - 1
            rows = batch(step, rank, micro)
            once = reducing(model, last or not case.reduced_once)
            with once, loss_parallel() if case.by_loss else torch.enable_grad():
                loss = loss_of(model, rows) / MICROS
                if meter is not None:
                    meter.before_backward(loss, len(rows), capture_average=last)
                loss.backward()
        if meter is not None:
            meter.step()
            found += meter._capture.unread.read()
        gradients += [
            getattr(p.grad, "_local_tensor", p.grad).clone()
            for p in parameters
            if p.grad is not None
        ]
    names = () if meter is None else meter._capture.collector.norms.group_names
    if meter is not None:
        meter.close()
    return found, gradients, names


def expectation(case: Case, step: int, pattern: str = "") -> Any:
    """Of the parameters whose names match."""
    plain = in_float64(case.model())
    parts = []
    for rank in range(case.data):
        mine = []
        for micro in range(MICROS):
            rows = batch(step, rank, micro)
            gradient = gradient_of(plain, lambda net, rows=rows: loss_of(net, rows))
            mine.append(micro_batch(gradient, len(rows)))
        parts += [whole(mine)] if case.reduced_once else mine
    return expected(parts, columns_of(plain, lambda name: bool(re.search(pattern, name))))


QUICK = ("alone, no sequence", "alone, tied, by loss", "FSDP2", "DDP")
RANKS = {(data, quick): Ranks(2 * data) for data in (1, 2) for quick in (True, False)}
two, four, four_slow = RANKS[1, True], RANKS[2, True], RANKS[2, False]
FOUND = {
    name: RANKS[case.data, name in QUICK](partial(trained, case)) for name, case in CASES.items()
}


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_norms_are_those_of_the_model_on_one_process(name: str) -> None:
    case = CASES[name]
    first, *others = FOUND[name]()

    assert all(repr(other.steps) == repr(first.steps) for other in others)
    assert first.same
    for step, got in enumerate(first.steps):
        assert got.norms[:4] == pytest.approx(tuple(expectation(case, step)), rel=EXACT)
        assert got.norms.examples == sum(
            len(batch(step, rank, micro)) for rank in range(case.data) for micro in range(MICROS)
        )
        for entry, group in enumerate(first.groups):
            of_group = expectation(case, step, case.groups[group])
            assert got.entries[entry][:4] == pytest.approx(tuple(of_group), rel=EXACT)


# ---- a loss over the tokens of all ranks


MASKED = -100


def masked(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, of which some count: fewer on one rank than on the other."""
    rows = batch(step, rank, 2)
    labels = rows[:, 1:].clone()
    labels[:, : 1 + 3 * rank] = MASKED
    return rows[:, :-1], labels


def sum_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        model(x).flatten(0, 1), labels.flatten(), ignore_index=MASKED, reduction="sum"
    )


def as_torchtitan_trains(by: Any, *, tensor: int = 2) -> tuple[float, ...]:
    """The loss is the sum over a rank's tokens by those of all ranks, and gradients are summed.

    By DDP, whose gradients are averaged, it is that times the number of ranks.
    """
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, tensor), mesh_dim_names=("data", "tensor"))
    rank, model, factor = mesh.get_local_rank("data"), Model(), 2 if by is DDP else 1
    if tensor > 1:
        parallelized(model, mesh["tensor"], sequence=True)
    made = averaging(model, mesh, by)
    for module in (made, *model.blocks) if by is fully_shard else ():
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    optimizer = torch.optim.SGD(made.parameters(), lr=0)
    meter = NoiseScaleMeter(made, every_n_steps=1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, labels = masked(step, rank)
        tokens = labels.ne(MASKED).sum()
        of_all = tokens.clone()
        dist.all_reduce(of_all, group=mesh["data"].get_group())
        loss = factor * sum_of(made, x, labels) / of_all
        meter.backward(loss, local_batch_size=len(x), weight=tokens)
        meter.step()
    assert meter.measured_steps == STEPS, meter.not_measured
    return (*meter.sums.mean, meter.examples)


plain = two(lambda: as_torchtitan_trains(DDP, tensor=1))
over_parts_of_tensors = [four_slow(partial(as_torchtitan_trains, by)) for by in (fully_shard, DDP)]


def test_a_loss_over_all_ranks_tokens_is_weighted_as_torchtitan_weighs_it() -> None:
    model, signals = in_float64(Model()), []
    for step in range(STEPS):
        parts, examples = [], 0
        for rank in range(2):
            x, labels = masked(step, rank)
            tokens = int(labels.ne(MASKED).sum())
            gradient = gradient_of(
                model, lambda net, x=x, y=labels, n=tokens: sum_of(net, x, y) / n
            )
            parts.append(micro_batch(gradient, len(x), tokens))
            examples += len(x)
        signals.append(over_step(parts, examples)[0])

    assert plain()[0] == plain()[1]
    assert plain()[0][0] == pytest.approx(sum(signals) / STEPS, rel=1e-4)


@pytest.mark.slow
def test_a_loss_over_all_ranks_tokens_is_weighted_alike_over_parts() -> None:
    for one in [*over_parts_of_tensors[0](), *over_parts_of_tensors[1]()]:
        assert one == pytest.approx(plain()[0], rel=1e-4)


# ---- what is refused


def over_parts(*, tied: bool = False, run: bool = False, data: int = 2) -> nn.Module:
    """DDP over parts of a model."""
    model, mesh = parts_of_two()
    if tied:  # torch itself fails as long as it copies the weights of the first rank
        model.blocks[1].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    _pre_dp_module_transform(model)
    ranks = mesh["data"].get_group() if data == 2 else dist.new_subgroups(1)[0]
    ddp = DDP(model, process_group=ranks, init_sync=not tied)
    if run:
        ddp(torch.zeros(1, 2, dtype=torch.int64))
    return ddp


def parts_of_two() -> tuple[Model, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelized(model := Model(), mesh["tensor"], sequence=False)
    return model, mesh


@four
def refusals_of_four() -> None:
    for make, message in (
        (partial(over_parts, tied=True), "not have tied weights .* got 'module.blocks.1.up"),
        (partial(over_parts, run=True), "not have run yet"),
        (partial(over_parts, data=1), "got 1 x 2 ranks"),
        (lambda: parts_of_two()[0], "got neither in 4 processes"),
    ):
        with pytest.raises(NotMeasured, match=message):
            choose_collector(make(), MeterOptions())  # type: ignore[no-untyped-call]
    for small_batch in SMALL_BATCHES - {"rank"}:
        with refused("small_batch", requirement="DistributedDataParallel over tensor"):
            choose_collector(over_parts(), MeterOptions(small_batch=small_batch))
    for model in (over_parts(), parts_of_two()[0]):
        with pytest.raises(NotMeasured, match="hold whole parameters"):
            choose_collector(model, MeterOptions(), averaged=False)


@two
def refusals() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    parallelized(model := Model(), mesh, sequence=False)
    for small_batch in SMALL_BATCHES - {"micro_batch"}:
        with refused("small_batch", requirement="tensor parallel alone"):
            choose_collector(model, MeterOptions(small_batch=small_batch))
    # The mesh of one dimension has the group of all ranks, which has no name.
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for averaged in (True, False):
        plain = DDP(nn.Linear(2, 2)) if averaged else nn.Linear(2, 2)
        with pytest.raises(NotMeasured, match="context parallelism over 2"):
            choose_collector(plain, MeterOptions(), averaged=averaged)
    assert mesh.size() == 2


SMALL_BATCHES: set[Any] = {"half", "rank", "micro_batch"}


def test_what_is_not_known_to_be_averaged_is_refused() -> None:
    """And every other small batch than the one that there is."""
    assert refusals_of_four() == [None] * 4
    assert refusals() == [None] * 2
