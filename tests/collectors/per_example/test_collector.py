# SPDX-License-Identifier: Apache-2.0
"""What the per-example collector captures of layers of all kinds, what it leaves out and why."""

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from brute_force import Expected, columns_of, examples_of, expected, gradients_of_examples
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from ways_of_capture import reducing

from noisescale.collectors.per_example.collector import PerExampleCollector
from noisescale.guard import NotMeasured
from noisescale.meter.choosing import choose_collector
from noisescale.meter.options import MeterOptions

Batch = tuple[Tensor, Tensor]


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, or half the squares, over all rows alike."""
    return loss_of(model(batch[0]), batch[1])


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    if y.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, -2), y.flatten())
    return (output - y).square().mean() / 2


def oracle(
    model: nn.Module, batches: Sequence[Batch], names: Sequence[str] | None = None
) -> Expected:
    """What a step shows; of some parameters, or of all that are trained."""
    parts = [
        part
        for batch in batches
        for part in examples_of(gradients_of_examples(model, batch, loss_of))
    ]
    return expected(parts, None if names is None else columns_of(model, names.__contains__))


def collector_of(model: nn.Module, **options: Any) -> PerExampleCollector:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    trained = [(n, p) for n, p in inner.named_parameters() if p.requires_grad]
    return PerExampleCollector(model, trained, **options)


def step(
    model: nn.Module,
    collector: PerExampleCollector,
    batches: Sequence[Batch],
    *,
    sizes: Sequence[float] | None = None,
    divisor: float | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] = mean_loss,
) -> tuple[Tensor | None, Tensor]:
    """One optimizer step; return the scaled small norms and this rank's scaled share."""
    model.zero_grad()
    k = len(batches)
    divisor = k if divisor is None else divisor
    sizes = [len(x) for x, _ in batches] if sizes is None else sizes
    for j, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        with reducing(model, j == k - 1):
            value = loss(model, batch) / divisor
            collector.before_backward(value, size)
            value.backward()
    small, big = collector.small_sq_norms(), collector.big_sq_norms()
    layout = collector.layout(sizes, divisor)
    collector.reset()
    return None if small is None else small * layout.small_scale, big * layout.big_scale


def probed(
    model: nn.Module, batches: Sequence[Batch], quiet: bool = True, **options: Any
) -> PerExampleCollector:
    """A collector after its first step."""
    collector = collector_of(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if quiet else "error")
        small, _ = step(model, collector, batches)
    assert small is None
    return collector


def check(
    model: nn.Module,
    collector: PerExampleCollector,
    batches: Sequence[Batch],
    rtol: float = 1e-5,
    **options: Any,
) -> None:
    """Assert that a step's norms are those of the oracle, over the measured parameters."""
    small, big = step(model, collector, batches, **options)
    want = oracle(model, batches, collector.norms.names)
    assert small is not None
    assert small.sum().item() == pytest.approx(want.small_sq_norm, rel=rtol)
    assert big.sum().item() == pytest.approx(want.big_sq_norm, rel=rtol)


def numbers(rows: int, *shape: int, outputs: int = 3, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *shape, generator=generator)
    return x, torch.randn(rows, outputs, generator=generator)


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *(middle or (nn.Tanh(),)), nn.Linear(8, 3))


class Transformer(nn.Module):
    """What a language model has, in small: positions are embedded from `arange`."""

    def __init__(self, tied: bool = False, context: int = 5, checkpointing: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(11, 8)
        self.wpe = nn.Embedding(context, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8)])
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out((q @ k.mT).softmax(-1) @ v)
        return x + self.mlp(self.norms[1](x))


def tokens(rows: int, seed: int = 0) -> Batch:
    ids = torch.randint(0, 11, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 9, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "mlp": (mlp, lambda rows, seed: numbers(rows, 6, seed=seed)),
    "transformer": (Transformer, tokens),
    "reentrant checkpointing": (lambda: Transformer(checkpointing="reentrant"), tokens),
    "other checkpointing": (lambda: Transformer(checkpointing="other"), tokens),
    "convnet": (convnet, lambda rows, seed: numbers(rows, 3, 8, 8, seed=seed)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", MODELS)
def test_norms_are_those_of_single_gradients_which_stay_as_they_are(
    case: str, dtype: torch.dtype
) -> None:
    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    make_model, make_batch = MODELS[case]
    model = make_model().to(dtype)
    made = [make_batch(rows, seed) for seed, rows in enumerate((4, 7, 2))]
    batches = [(cast(x), cast(y)) for x, y in made]
    collector = probed(model, batches)

    check(model, collector, batches, rtol=1e-5 if dtype == torch.float32 else 1e-10)
    plain = make_model().to(dtype)
    for batch in batches:
        (mean_loss(plain, batch) / len(batches)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    everything = [n for n, _ in model.named_parameters() if not n.startswith("wpe")]
    assert collector.norms.names == everything


def test_a_group_of_which_nothing_can_be_measured_has_no_norm() -> None:
    """And normalization layers may be asked for alone."""
    batches = [tokens(4), tokens(3, seed=1)]
    groups = {"norms": r"norm", "positions": r"wpe"}
    every, norms = Transformer(), Transformer(tied=True)
    of_all = probed(every, batches, groups=groups)
    of_norms = probed(norms, batches, quiet=False, layers="normalization", groups={"e": "head|wte"})

    assert of_all.norms.group_names == ("positions", "norms")
    assert of_norms.norms.names == [n for n, _ in norms.named_parameters() if "norm" in n]
    for model, collector in ((every, of_all), (norms, of_norms)):
        small, big = step(model, collector, batches)
        assert small is not None
        names = collector.norms.names
        for entry in range(len(small)):
            chosen = [n for n, e in zip(names, collector.norms.entry_of, strict=True) if e == entry]
            assert all(("norm" in n) == (entry == 1) for n in chosen)
            want = oracle(model, batches, chosen)
            assert small[entry].item() == pytest.approx(want.small_sq_norm, rel=1e-5)
            assert big[entry].item() == pytest.approx(want.big_sq_norm, rel=1e-5)


# ---- what is left out, and how that is found


def left_out(
    model: nn.Module, batch: Batch, sizes: Sequence[float] | None = None, **options: Any
) -> tuple[PerExampleCollector, dict[str, list[str]]]:
    """A collector after its first step, and what its warning names, by the first word of why."""
    collector = collector_of(model, **options)
    with pytest.warns(UserWarning, match="Left out") as caught:
        step(model, collector, [batch], sizes=sizes)
    (warning,) = caught
    sizes_of = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    share = sum(sizes_of[name] for name in collector.norms.names) / sum(sizes_of.values())
    covers = f"covers {len(collector.norms.names)} parameters with {share:.0%} of all numbers."
    assert covers in str(warning.message)
    return collector, named_in(warning)


def named_in(warning: Any) -> dict[str, list[str]]:
    parts = str(warning.message).split("Left out: ")[1].rstrip(".").split("; ")
    pairs = [part.rstrip(")").split(" (") for part in parts]
    return {" ".join(why.split()[:3]): names.split(", ") for names, why in pairs}


class Network(nn.Module):
    """Layers, each made of its class and arguments, and what is done with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: tuple[Any, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (kind, *arguments) in layers.items():
            self.add_module(name, kind(*arguments))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def called_twice(twice: bool = True) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.middle(net.first(x).tanh()).tanh()
        return net.last(net.middle(x) if net.twice else x)

    layers = {"first": (nn.Linear, 6, 8), "middle": (nn.Linear, 8, 8), "last": (nn.Linear, 8, 3)}
    net: Any = Network(forward, **layers)
    net.twice = twice
    return net


def flattened() -> nn.Module:
    """Sequences for the embedding, their tokens one by one for the rest."""
    return Network(
        lambda net, ids: net.head(net.inner(net.wte(ids)).flatten(0, 1)).unflatten(0, ids.shape),
        wte=(nn.Embedding, 11, 8),
        inner=(nn.Linear, 8, 8),
        head=(nn.Linear, 8, 11),
    )


class Buffered(nn.Module):
    """Positions are a buffer, not in order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("positions", torch.arange(64).flip(0) % 5)
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.wte(ids) + self.wpe(self.positions[: ids.shape[1]]))


class Complex(nn.Module):
    """Complex layers of every shape that formulas differ for, and a weight that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.real = nn.Linear(6, 32)
        self.grouped = nn.Conv1d(2, 4, 3, padding=1, groups=2, dtype=torch.cfloat)
        self.wide = nn.Linear(8, 9, dtype=torch.cfloat)
        self.narrow = nn.Linear(9, 2, dtype=torch.cfloat)
        self.alone = nn.Linear(2, 3, dtype=torch.cfloat)
        self.spectral = nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.real(x).view(-1, 2, 8, 2))
        z = self.narrow(self.wide(self.grouped(z)).tanh()).mean(1)
        z = self.alone(z.conj()) @ self.spectral
        return z.real + z.abs()


OUTSIDE, NO_FORMULA = "used outside of", "in layers without"
NO_ROWS, TWICE = "in layers whose", "in modules called"
LEFT_OUT: dict[str, tuple[Callable[[], nn.Module], Batch, dict[str, list[str]]]] = {
    "tied": (
        lambda: Transformer(tied=True),
        tokens(4),
        {NO_ROWS: ["wpe.weight"], "shared by several": ["wte.weight"]},
    ),
    "attention": (
        lambda: zoo.Attention(own=False),
        (tokens(4)[0], torch.arange(4) % 3),
        {
            OUTSIDE: ["attention.out_proj.weight", "attention.out_proj.bias"],
            NO_FORMULA: ["attention.in_proj_weight", "attention.in_proj_bias"],
        },
    ),
    "called twice": (called_twice, numbers(4, 6), {TWICE: ["middle.weight", "middle.bias"]}),
    "parametrization": (
        lambda: mlp(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
        numbers(4, 6),
        {NO_FORMULA: [f"1.parametrizations.weight.original{i}" for i in range(2)]},
    ),
    "flattened": (flattened, tokens(4), {NO_ROWS: ["head.weight", "head.bias"]}),
    "positions as many as rows": (Transformer, tokens(5), {NO_ROWS: ["wpe.weight"]}),
    "positions in a buffer": (Buffered, tokens(5), {NO_ROWS: ["wpe.weight"]}),
    "unused": (
        zoo.PartlyUnused,
        numbers(4, 8),
        {"without a gradient": ["unused.weight", "unused.bias"]},
    ),
    "complex weights of no layer": (Complex, numbers(4, 6), {NO_FORMULA: ["spectral"]}),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_cannot_be_measured_is_left_out_and_the_rest_is_exact(case: str) -> None:
    make_model, batch, expected = LEFT_OUT[case]
    model = make_model()

    collector, found = left_out(model, batch)

    assert found == expected
    assert not set(chain(*found.values())) & set(collector.norms.names)
    check(model, collector, [batch])


class ReZero(nn.Module):
    """A residual block behind a gate of zero. Its gradients are zero until the gate opens."""

    def __init__(self, reused: bool, closed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.gate = nn.Parameter(torch.zeros(1), requires_grad=not closed)
        self.reused = reused

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.inner(x.tanh())
        if self.reused:
            y = y + F.linear(x.cos(), self.inner.weight)
        return self.last(x + self.gate * y)


ZERO_AT_FIRST: dict[str, tuple[Callable[[], nn.Module], int, dict[str, list[str]]]] = {
    "ReZero": (lambda: ReZero(reused=False), 6, {NO_FORMULA: ["gate"]}),
    "ReZero, reused": (
        lambda: ReZero(reused=True), 6, {NO_FORMULA: ["gate"], OUTSIDE: ["inner.weight"]},
    ),
    "LoRA": (zoo.lora, 8, {}),
    "head of zeros": (zoo.zero_head, 8, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", ZERO_AT_FIRST)
def test_what_has_a_gradient_of_zeros_is_judged_when_it_has_another(case: str) -> None:
    """The sum over examples and autograd's gradient agree where both are zero, whatever is used."""
    torch.manual_seed(0)
    make_model, width, expected = ZERO_AT_FIRST[case]
    model, batch = make_model(), numbers(4, width)
    collector = collector_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    measured = []

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            measured.append(step(model, collector, [batch])[0])
            optimizer.step()

    assert measured == [None, None]
    assert [named_in(warning) for warning in caught] == [expected] * bool(expected)
    for _ in range(3):
        check(model, collector, [batch])
        optimizer.step()


def test_what_stays_zero_is_left_out_in_the_end() -> None:
    model, batch = ReZero(reused=False, closed=True), numbers(4, 6)
    collector = collector_of(model)

    with pytest.warns(UserWarning, match="Left out") as caught:
        measured = [step(model, collector, [batch])[0] for _ in range(9)]

    (warning,) = caught
    assert [small is None for small in measured] == [True] * 8 + [False]
    assert named_in(warning) == {"whose gradient was": ["inner.weight", "inner.bias"]}
    check(model, collector, [batch])


def test_steps_without_a_finite_gradient_are_none_of_those_looked_at() -> None:
    """And a loss that is zero at first, as that of a sparse reward, however long it lasts."""
    infinite = numbers(4, 6)[0] * torch.inf, numbers(4, 6)[1]
    for model, batch, factor in ((ReZero(reused=True), infinite, 1), (mlp(), numbers(4, 6), 0)):
        collector = collector_of(model)
        for one in (numbers(4, 6), *[batch] * 10):
            useless = step(model, collector, [one], loss=lambda *of, f=factor: f * mean_loss(*of))
            assert useless[0] is None
        if isinstance(model, ReZero):
            model.gate.data.fill_(0.3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert step(model, collector, [numbers(4, 6)])[0] is None
        assert [OUTSIDE in named_in(one) for one in caught] == [True] * factor
        check(model, collector, [numbers(4, 6)])


def test_a_gradient_that_is_zero_on_one_rank_is_compared_on_the_other() -> None:
    def measured() -> tuple[int, list[str]]:
        model = DistributedDataParallel(ReZero(reused=False))
        model.module.gate.data.fill_(0.5)
        collector = collector_of(model, group=model.process_group)
        batch, steps = numbers(4, 6, seed=dist.get_rank()), 0

        def loss(*of: Tensor) -> Tensor:
            return mean_loss(*of) * dist.get_rank()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while collector._probe is not None:
                steps += 1
                step(model, collector, [batch], loss=loss)
        return steps, collector.norms.names

    for steps, names in on_ranks(2, measured):
        assert steps == 1
        assert "inner.weight" in names


def test_tokens_may_be_counted() -> None:
    """Those of flattened rows, and of padded sequences."""
    flat = flattened(), 4 * 5, ["head.weight", "head.bias"]
    for model, size, left in (flat, (Transformer(), 17, ["wpe.weight"])):
        collector, found = left_out(model, tokens(4), sizes=[size])

        assert found == {NO_ROWS: left}
        check(model, collector, [tokens(4)], sizes=[size])


def test_a_batch_in_the_second_dimension_and_more_rows_than_examples_are_refused() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0].transpose(0, 1)).square().mean()

    model, batches = mlp(), [numbers(8, 6)]
    with pytest.raises(NotMeasured, match="does not have the rows"):
        step(model, collector_of(model), [numbers(7, 4, 6)], loss=loss)
    with pytest.raises(NotMeasured, match="got 4 for 8 rows"):
        step(model, probed(model, batches), batches, sizes=[4])


def test_a_module_called_twice_later_costs_those_steps() -> None:
    model, batch = called_twice(twice=False), numbers(4, 6)
    collector = probed(model, [batch])

    model.twice = True
    twice, _ = step(model, collector, [batch])
    model.twice = False

    assert twice is None
    check(model, collector, [batch])


def test_layers_that_disagree_later_cost_those_steps_and_a_warning() -> None:
    """Computed positions of shape (length, length) may be as many as rows."""

    def with_relative_positions(net: Any, ids: Tensor) -> Tensor:
        n = torch.arange(ids.shape[1])
        weights = net.relative(n[:, None] - n + 5).squeeze(-1).softmax(-1)
        return net.head(weights @ net.wte(ids))

    embeddings = {"wte": (nn.Embedding, 11, 8), "relative": (nn.Embedding, 11, 1)}
    model = Network(with_relative_positions, **embeddings, head=(nn.Linear, 8, 11))
    collector = probed(model, [tokens(5)])

    with pytest.warns(UserWarning, match="Layers disagree"):
        assert step(model, collector, [tokens(4)])[0] is None


def test_a_gradient_that_cancels_is_not_taken_for_a_wrong_one() -> None:
    """A bias of keys moves all scores alike: its gradient is rounding and nothing else."""
    model: Any = Network(
        lambda net, x: (net.key(x.mT).sum(1).softmax(-1).unsqueeze(1) @ net.value(x)).squeeze(1),
        key=(nn.Conv1d, 6, 8, 1),
        value=(nn.Linear, 6, 3),
    )
    batch = numbers(64, 33, 6)

    collector = probed(model, [batch], quiet=False)

    assert "key.bias" in collector.norms.names
    assert model.key.bias.grad.norm() < 1e-5
    check(model, collector, [batch])


def test_nothing_left_is_refused() -> None:
    twice = nn.Linear(6, 6)
    collector = collector_of(twice)

    with pytest.raises(NotMeasured, match="weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0"):
        collector_of(nn.LSTM(6, 8))
    with pytest.raises(NotMeasured, match=r"weight, bias \(in modules called"):
        step(twice, collector, [numbers(4, 6, outputs=6)], loss=lambda m, b: m(m(b[0])).mean())
    with pytest.raises(NotMeasured, match="`layers` must find"):
        collector_of(mlp(), layers="normalization")


def test_compiled_modules_are_refused() -> None:
    inside = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inside[1].compile(backend="eager")
    wrapped = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))

    for model, name in [
        (inside, "1"),
        (wrapped, "0"),
        (torch.compile(mlp(), backend="eager"), "all of it"),
    ]:
        with pytest.raises(NotMeasured, match=rf"torch.compile on {name}\. "):
            choose_collector(model, MeterOptions(small_batch="example"))


def test_batch_normalization_is_refused_while_it_goes_by_the_batch() -> None:
    with pytest.raises(ValueError, match=r"no BatchNorm .* got 1: "):
        collector_of(mlp(nn.BatchNorm1d(8)))

    collector_of(mlp(nn.BatchNorm1d(8)).eval())


def test_the_coverage_is_the_share_of_the_squared_gradient() -> None:
    model = mlp(nn.PReLU(8))
    collector = collector_of(model)
    assert collector.coverage == 1.0
    with pytest.warns(UserWarning, match=r"Left out: 1\.weight"):
        step(model, collector, [numbers(4, 6)])

    step(model, collector, [numbers(4, 6)])

    grads = {name: float(p.grad.square().sum()) for name, p in model.named_parameters()}
    share = 1 - grads["1.weight"] / sum(grads.values())
    assert 0.01 < share < 0.99
    assert collector.coverage == pytest.approx(share)
    resumed = collector_of(model)
    with pytest.warns(UserWarning, match="Left out"):
        resumed.load_state_dict(collector.state_dict())
    assert resumed.coverage == pytest.approx(share)


# ---- ways of training


def test_parameters_frozen_on_the_way_no_longer_count() -> None:
    model, batch = mlp(), numbers(4, 6)
    collector = probed(model, [batch])
    model[0].requires_grad_(False)

    check(model, collector, [batch])  # of what is trained: 2.weight and 2.bias


def test_an_input_changed_in_place_costs_the_step_and_no_error() -> None:
    """Legal where autograd has no need of it: only the bias is trained, or under autocast."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    batch = numbers(4, 6, outputs=6)

    def changed(model: nn.Module, batch: Batch) -> Tensor:
        h = model[0](batch[0])
        with torch.autocast("cpu", torch.bfloat16):
            y = model[1](h)
        return mean_loss(lambda _: y.float() + h.mul_(2), batch)  # type: ignore[arg-type]

    collector = probed(model, [batch])
    small, _ = step(model, collector, [batch], loss=changed)

    assert small is None
    check(model, collector, [batch])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_measured_to_its_precision(dtype: torch.dtype) -> None:
    model, batch = Transformer(), tokens(8)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype):
            output = model(batch[0])
        return loss_of(output.float(), batch[1]) * 256

    collector = collector_of(model)
    with pytest.warns(UserWarning, match="Left out") as caught:
        step(model, collector, [batch], loss=loss)
    small, _ = step(model, collector, [batch], loss=loss)

    assert small is not None
    assert named_in(*caught) == {NO_ROWS: ["wpe.weight"]}
    want = oracle(model, [batch], collector.norms.names)
    assert small.item() / 256**2 == pytest.approx(want.small_sq_norm, rel=0.02)


def test_what_was_kept_goes_with_the_pass_or_with_the_graph() -> None:
    model = mlp()
    collector = probed(model, [numbers(4, 6)])
    kept: list[Any] = []
    original = collector._hooks.on_forward

    def spy(layer: Any, x: Tensor, output: Tensor) -> None:
        original(layer, x, output)
        kept.append(x.untyped_storage()._weak_ref())

    def alive() -> list[bool]:
        return [not torch.UntypedStorage._expired(reference) for reference in kept]

    collector._hooks.on_forward = spy  # type: ignore[method-assign]
    loss = mean_loss(model, numbers(4, 6))
    assert any(alive())
    collector.before_backward(loss, 4)
    loss.backward()
    assert alive() == [False, False]  # though `loss` still holds the graph
    kept.clear()
    mean_loss(model, numbers(4, 6))
    assert alive() == [False, False]


def test_checkpointing_still_frees_what_it_computes_again() -> None:
    block = mlp()
    collector = probed(block, [numbers(4, 6)])
    inner: list[Any] = []
    block[1].register_forward_hook(lambda *a: inner.append(a[-1].untyped_storage()._weak_ref()))

    def again(model: nn.Module, batch: Batch) -> Tensor:
        output = checkpoint(model, batch[0], use_reentrant=False)
        assert [torch.UntypedStorage._expired(reference) for reference in inner[-1:]] == [True]
        return loss_of(output, batch[1])

    check(block, collector, [numbers(4, 6)], loss=again)


def test_inputs_by_keyword_and_torch_func_are_no_obstacle() -> None:
    model, batch = mlp(), numbers(4, 6)

    def by_keyword(model: nn.Module, batch: Batch) -> Tensor:
        torch.func.vjp(model, batch[0])
        first, act, last = model.children()
        return loss_of(last(input=act(first(input=batch[0]))), batch[1])

    collector = probed(model, [batch], quiet=False)

    check(model, collector, [batch], loss=by_keyword)


def test_a_graph_gone_through_twice_is_not_relied_on() -> None:
    model, batch = mlp(), numbers(4, 6)
    collector = probed(model, [batch])
    loss = mean_loss(model, batch)

    collector.before_backward(loss, 4)
    loss.backward(retain_graph=True)
    collector.before_backward(loss, 4)
    loss.backward()

    assert collector.small_sq_norms() is None
    collector.reset()
    check(model, collector, [batch])


# ---- several ranks


def test_ranks_agree_on_what_is_left_out_and_one_says_so() -> None:
    def names() -> tuple[list[str], list[Any]]:
        ddp = DistributedDataParallel(called_twice(twice=dist.get_rank() == 1))
        collector = collector_of(ddp, group=dist.group.WORLD)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step(ddp, collector, [numbers(4, 6)])
        return collector.norms.names, [named_in(warning) for warning in caught]

    (names_of_one, said), (names_of_other, nothing) = on_ranks(2, names)

    assert names_of_one == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert names_of_other == names_of_one
    assert said == [{TWICE: ["middle.weight", "middle.bias"]}]
    assert nothing == []
