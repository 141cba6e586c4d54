# SPDX-License-Identifier: Apache-2.0
"""What a refusal says helps does help: each remedy is followed, and steps are measured then."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fits import CLASSES, FEATURES, data, heard, network
from ranks import on_ranks
from remedies import Case, Found, check
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale import NoiseScaleMeter

STEPS, ROWS = 4, 8


def cross_entropy(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x), y)


def backward(meter: Any, loss: Tensor, size: int, which: int) -> None:
    meter.backward(loss, size)


def nothing(model: Any) -> None:
    """Change nothing."""


def dropped(model: nn.Module) -> None:
    model.zero_grad()


def loop(
    net: Callable[[], nn.Module] = network,
    *,
    passes: int = 1,
    rows: int = ROWS,
    size: int | None = None,
    optimizer: Any = torch.optim.SGD,
    loss: Callable[..., Tensor] = cross_entropy,
    backward: Callable[..., None] = backward,
    prepare: Callable[[Any], Any] = nothing,
    after_pass: Callable[[Any], None] = nothing,
    after_passes: Callable[[Any], None] = nothing,
    after_step: Callable[[Any], None] = dropped,
    alike: bool = False,
    **options: Any,
) -> Found:
    """Train in a loop of one's own."""
    model, taken = net(), 0
    x, y = data(STEPS * 2 * rows).tensors
    if alike:
        x, y = x[:1].expand_as(x), y[:1].expand_as(y)
    prepare(model)
    stepping = optimizer(model.parameters(), lr=1e-3)
    with heard() as told:
        meter = NoiseScaleMeter(model, every_n_steps=1, optimizer=stepping, **options)
        for _ in range(STEPS):
            for which in range(passes):
                batch = slice(taken, taken := taken + rows)
                of_batch = loss(model, x[batch], y[batch]) / passes
                backward(meter, of_batch, rows if size is None else size, which)
                after_pass(model)
            after_passes(model)
            meter.step()
            if optimizer is torch.optim.SGD:
                stepping.step()
            after_step(model)
        meter.close()
    return Found(told, meter.measured_steps, meter)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


def hooked(hook: Callable[..., None]) -> nn.Module:
    net = network()
    net[1].register_full_backward_hook(hook)
    return net


def asking(*_: Any) -> None:
    if noisescale.measuring():
        return


class Halved(torch.autograd.Function):
    """Of one's own: halves the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class Halving(nn.Module):
    def __init__(self, by_hook: bool) -> None:
        super().__init__()
        self.net, self.by_hook = network(), by_hook

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.net(x)
        if not self.by_hook:
            return Halved.apply(h)
        h.register_hook(lambda gradient: gradient / 2)
        return h


def with_penalty(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(net, x, y) + sum(p.square().sum() for p in net.parameters())


def contrastive(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = nn.functional.normalize(net(x))
    return nn.functional.cross_entropy(h @ h.T, torch.arange(len(h)))


def of_constants(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.0 * cross_entropy(net, x, y)


def packed(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of a row of several sequences."""
    return nn.functional.cross_entropy(net(x[None]).flatten(0, 1), y)


def as_pairs(meter: Any, loss: Tensor, size: int, which: int, **known: Any) -> None:
    """Two rows are of one example."""
    meter.backward(loss, size, rows=ROWS, **known)


def in_one_row(meter: Any, loss: Tensor, size: int, which: int) -> None:
    meter.backward(loss, size, rows=1)


def unseen(meter: Any, loss: Tensor, size: int, which: int) -> None:
    loss.backward()


def weighted(meter: Any, loss: Tensor, size: int, which: int, *, last: int) -> None:
    meter.backward(loss, size, weight=None if which > last else 2.0)


def cached(meter: Any, loss: Tensor, size: int, which: int) -> None:
    """As GradCache: in a pass of its own."""
    leaf = loss.detach().requires_grad_()

    def hook(gradient: Tensor) -> None:
        with torch.enable_grad():
            loss.backward(gradient)

    leaf.register_hook(hook)
    meter.backward(leaf, size)


def stepping_within(model: nn.Module) -> None:
    def step(p: nn.Parameter) -> None:
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


def keeping(model: nn.Module) -> None:
    """A cache that takes gradients within the pass."""

    def take(p: nn.Parameter) -> None:
        p.grad = torch.zeros_like(p)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(take)


def old(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def taken(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def cache(model: nn.Module) -> None:
    """Keep the gradients of a pass apart."""
    for p in model.parameters():
        p.kept = [*getattr(p, "kept", ()), p.grad]  # type: ignore[attr-defined]  # noted on it
        p.grad = None


def put_back(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = sum(p.kept)  # type: ignore[attr-defined]  # see above
        p.kept = []  # type: ignore[attr-defined]  # see above


def scaled(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= 1.1


several = partial(loop, passes=2)
by_micro_batches = partial(several, small_batch="micro_batch")
LOOPS = {
    "one micro-batch: accumulate": Case(
        "Accumulate two or more micro-batches",
        partial(loop, small_batch="micro_batch"),
        by_micro_batches,
    ),
    "one micro-batch: halves": Case(
        '`small_batch="half"`',
        partial(loop, small_batch="micro_batch"),
        partial(loop, small_batch="half"),
    ),
    "BatchNorm": Case(
        "Accumulate two or more", partial(loop, normalized), partial(several, normalized)
    ),
    "contrastive": Case(
        "Accumulate two or more",
        partial(loop, loss=contrastive),
        partial(several, loss=contrastive),
    ),
    "Function": Case(
        "pass `backward_twice=True`",
        partial(loop, partial(Halving, by_hook=False)),
        partial(loop, partial(Halving, by_hook=False), backward_twice=True),
    ),
    "hook on a tensor": Case(
        "as a `torch.autograd.Function`, and pass `backward_twice=True`",
        partial(loop, partial(Halving, by_hook=True)),
        partial(loop, partial(Halving, by_hook=False), backward_twice=True),
    ),
    "hook on a module": Case(
        "return at once while `noisescale.measuring()`",
        partial(loop, partial(hooked, lambda *_: None)),
        partial(loop, partial(hooked, asking)),
    ),
    "penalty": Case(
        "`weight_decay`",
        partial(loop, loss=with_penalty),
        partial(loop, optimizer=partial(torch.optim.SGD, weight_decay=2.0)),
    ),
    "one row": Case("batches of two rows", partial(loop, rows=1), partial(loop, rows=2)),
    "packed rows": Case(
        "A batch of 4 in one row has no halves to compare. Such steps are not measured. Accumulate",
        partial(loop, loss=packed, backward=in_one_row, size=4),
        partial(several, loss=packed, backward=in_one_row, size=4),
    ),
    "several rows of an example": Case(
        "`row_groups` of the meter",
        partial(loop, backward=as_pairs, size=4),
        partial(loop, backward=partial(as_pairs, row_groups=[0, 0, 1, 1, 2, 2, 3, 3]), size=4),
    ),
    "groups of other rows": Case(
        "return as many",
        partial(loop, backward=partial(as_pairs, row_groups=[0, 1, 2, 3]), size=4),
        partial(loop, backward=partial(as_pairs, row_groups=[0, 0, 1, 1, 2, 2, 3, 3]), size=4),
    ),
    "rows alike": Case("Give each row", partial(loop, alike=True), loop),
    "weights of some": Case(
        "Pass 1 for passes that count once",
        partial(several, backward=partial(weighted, last=0)),
        partial(several, backward=partial(weighted, last=1)),
    ),
    "LBFGS": Case(
        "first-order optimizer such as SGD", partial(loop, optimizer=torch.optim.LBFGS), loop
    ),
    "no backward pass": Case(
        "`meter.backward(loss, local_batch_size)`", partial(loop, backward=unseen), loop
    ),
    "no gradient": Case(
        "let the loss depend on the parameters", partial(loop, loss=of_constants), loop
    ),
    "steps within the pass": Case(
        "`zero_grad` after the backward pass", partial(loop, prepare=stepping_within), loop
    ),
    "a cache": Case(
        "Take and change gradients after the last pass of a step. What may do so: the hook",
        partial(loop, prepare=keeping),
        partial(loop, after_passes=taken),
    ),
    "a cache between passes": Case(
        "Let the passes of a step add up their gradients in `p.grad`",
        partial(several, after_pass=cache, after_passes=put_back),
        several,
    ),
    "changes between passes": Case(
        "only after the last pass",
        partial(several, after_pass=scaled),
        partial(several, after_passes=scaled),
    ),
    "old gradients": Case(
        "Call `zero_grad` after each step",
        partial(loop, prepare=old, after_step=nothing),
        loop,
    ),
    "passes within a pass": Case("in one backward pass", partial(loop, backward=cached), loop),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_meter_says_helps_does(name: str) -> None:
    check(LOOPS[name], STEPS)


@pytest.mark.parametrize(
    ("remedy", "small_batch"), [("model.no_sync()", "rank"), ('"micro_batch"', "micro_batch")]
)
def test_what_is_said_of_gradients_that_are_averaged_twice_helps(
    remedy: str, small_batch: Any
) -> None:
    """Of two ranks that accumulate."""

    def train(no_sync: bool, small_batch: Any) -> tuple[list[str], int]:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model, every_n_steps=1, small_batch=small_batch)
        x, y = data(4 * STEPS * ROWS, seed=dist.get_rank()).tensors
        with heard() as told:
            for step in range(STEPS):
                for micro in range(2):
                    batch = slice((first := (2 * step + micro) * ROWS), first + ROWS)
                    apart = no_sync and micro == 0
                    with model.no_sync() if apart else nullcontext():
                        meter.backward(cross_entropy(model, x[batch], y[batch]) / 2, ROWS)
                meter.step()
                model.zero_grad()
            measured = meter.measured_steps
        return told, measured

    def both() -> list[tuple[list[str], int]]:
        return [train(False, "rank"), train(small_batch == "rank", small_batch)]

    (told, before), (_, after) = on_ranks(2, both)[0]

    assert (before, after) == (0, STEPS)
    assert any(remedy in one for one in told)
