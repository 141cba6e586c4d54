# SPDX-License-Identifier: Apache-2.0
"""What a second backward pass would change is named, and no pass is made; the rest is restored."""

import random
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    GraphExecGroup,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from noisescale import NoiseScaleMeter, measuring

ROWS, WIDTH, STEPS = 6, 4, 5


class Network(nn.Module):
    """A network whose hidden layer is `middle`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def middle(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.middle(self.first(x)))
        assert isinstance(out, Tensor)
        return out


def train(model: nn.Module, *, measured: bool = True, **options: Any) -> tuple[list[Tensor], Any]:
    """Return the weights after some steps, and the measured steps or why there are none."""
    meter = None
    if measured:
        meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NoiseScaleMeter has nothing to measure")
        for seed in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = F.mse_loss(model(x), x[:, :3])
            if meter is not None:
                meter.before_backward(loss, ROWS)
            loss.backward()
            if meter is not None:
                meter.step()
            optimizer.step()
    weights = [p.detach() for p in model.parameters()]
    if meter is None:
        return weights, 0
    meter.close()
    return weights, meter.not_measured or meter.measured_steps


def found(make: Callable[[], nn.Module], **options: Any) -> Any:
    """What is found in a training, which has to be bit for bit the one without a meter."""
    plain, _ = train(make(), measured=False)
    weights, steps = train(make(), **options)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    return steps


# What may keep state


class Fp8(torch.autograd.Function):
    """Scales by the largest gradients so far, as mixed precision in 8 bits does."""

    largest: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Fp8.largest.append(float(gradient.abs().max()))
        return gradient / max(Fp8.largest)


class Steps(Network):
    def __init__(self) -> None:
        super().__init__()
        Fp8.largest = []

    def middle(self, hidden: Tensor) -> Tensor:
        return Fp8.apply(hidden).tanh()


class Offloaded(torch.autograd.Function):
    """Goes forward and backward again in its backward pass, which adds to `.grad`."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer, ctx.x = layer, x.detach().to("cpu")
        with torch.no_grad():
            out = layer(x)
        assert isinstance(out, Tensor)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(gradient)
        return None, x.grad


class OffloadedLayer(Network):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def middle(self, hidden: Tensor) -> Tensor:
        return Offloaded.apply(self.inner, hidden).tanh()


class HookOnNode(Network):
    """Clips a gradient by the norms so far."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [1.0]

    def clip(self, inputs: tuple[Tensor], outputs: tuple[Tensor]) -> tuple[Tensor]:
        self.norms.append(float(inputs[0].norm()))
        return (inputs[0] / sum(self.norms),)

    def middle(self, hidden: Tensor) -> Tensor:
        hidden = hidden.tanh()
        assert hidden.grad_fn is not None
        hidden.grad_fn.register_hook(self.clip)
        return hidden


class PrehookOnNode(HookOnNode):
    def middle(self, hidden: Tensor) -> Tensor:
        hidden = hidden.tanh()
        assert hidden.grad_fn is not None
        hidden.grad_fn.register_prehook(lambda outputs: self.clip(outputs, outputs))
        return hidden


class Noise(Network):
    """Adds noise of a generator of its own where saved tensors are given back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def give_back(self, saved: Tensor) -> Tensor:
        return saved + torch.randn(saved.shape, generator=self.generator)

    def middle(self, hidden: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, self.give_back):
            return hidden.tanh()


class GivenBackOnce(Network):
    """Offloads activations and drops them when they come back, as trainers of large models do."""

    def middle(self, hidden: Tensor) -> Tensor:
        kept: dict[int, Tensor] = {}

        def keep(saved: Tensor) -> int:
            kept[len(kept)] = saved
            return len(kept) - 1

        with torch.autograd.graph.saved_tensors_hooks(keep, kept.pop):
            return hidden.tanh()


@torch.library.custom_op("noisescale_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return x


def doubled_backward(ctx: Any, gradient: Tensor) -> Tensor:
    Fp8.largest.append(1.0)
    return 2 * gradient


doubled.register_autograd(doubled_backward)


class CustomOperator(Network):
    def middle(self, hidden: Tensor) -> Tensor:
        out = doubled(hidden)
        assert isinstance(out, Tensor)
        return out.tanh()


class Mapped(Network):
    class Own(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Keep nothing."""

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            Fp8.largest.append(1.0)
            return gradient / len(Fp8.largest)

    def middle(self, hidden: Tensor) -> Tensor:
        Fp8.largest = []
        return torch.vmap(self.Own.apply)(hidden).tanh()


class HookInCheckpoint(Network):
    """A hook that sees the outputs of a layer which goes forward again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shifts = nn.Linear(8, 8), [0.0]

    def shift(self, _: Any, inputs: Any, output: Tensor) -> Tensor:
        self.shifts.append(0.1)
        return output + sum(self.shifts)

    def middle(self, hidden: Tensor) -> Tensor:
        if not self.inner._forward_hooks:
            self.inner.register_forward_hook(self.shift)
        out = checkpoint(lambda x: self.inner(x).tanh(), hidden, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Steps, "test_second_pass.Fp8"),
        (OffloadedLayer, "test_second_pass.Offloaded"),
        (HookOnNode, "test_second_pass.HookOnNode.clip on TanhBackward0"),
        (PrehookOnNode, "PrehookOnNode.middle.<locals>.<lambda> on TanhBackward0"),
        (Noise, "test_second_pass.Noise.give_back"),
        (GivenBackOnce, "the saved-tensor hook builtins.dict.pop"),
        (CustomOperator, "test_second_pass.doubled_backward"),
        (Mapped, "test_second_pass.Mapped.Own"),
        (HookInCheckpoint, "test_second_pass.HookInCheckpoint.shift"),
    ],
)
def test_what_may_keep_state_is_refused_by_name(make: Callable[[], nn.Module], name: str) -> None:
    said = found(make)

    assert name in said
    assert "pass `backward_twice=True`. Accumulate two or more" in said


def test_a_user_may_say_that_a_function_keeps_no_state() -> None:
    assert found(CustomOperator, backward_twice=True) == STEPS


# What would end a training


def nothing_kept(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Network):
    def middle(self, hidden: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, nothing_kept)
        out = checkpoint(torch.tanh, hidden, use_reentrant=False, context_fn=contexts)
        assert isinstance(out, Tensor)
        return out


def test_selective_checkpoints_are_refused_whatever_the_user_says() -> None:
    said = found(Selective, backward_twice=True)

    assert "got selective checkpointing (`context_fn`)" in said


def test_passes_that_share_what_goes_forward_again_are_refused() -> None:
    with GraphExecGroup():
        assert "got a `GraphExecGroup` around checkpoints" in found(Checkpointed)


# What is known to bear it


class OnTheCpu(Network):
    def middle(self, hidden: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return hidden.tanh()


class AskingHook(HookOnNode):
    def clip(self, inputs: tuple[Tensor], outputs: tuple[Tensor]) -> tuple[Tensor]:
        return inputs if measuring() else super().clip(inputs, outputs)


# Checkpointed parts with state in Python


class Checkpointed(Network):
    """Scales by a number that `state` counts or draws, in a part that goes forward again."""

    def state(self) -> float:
        return 1.0

    def scaled(self, hidden: Tensor) -> Tensor:
        return (hidden * self.state()).tanh()  # saved last: torch stops there

    def middle(self, hidden: Tensor) -> Tensor:
        out = checkpoint(self.scaled, hidden, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


class Counter(Checkpointed):
    calls = 0

    def state(self) -> float:
        self.calls += 1
        return 1 / self.calls


class Lists(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.recent = deque([1.0], maxlen=3)
        self.by_name = {"of": {"sums": [1.0]}, "seen": {1.0}}

    def state(self) -> float:
        self.recent.append(sum(self.recent))
        self.by_name["of"]["sums"].append(self.recent[-1])  # type: ignore[call-overload,index]
        self.by_name["seen"].add(self.recent[0])  # type: ignore[union-attr]
        return 1 / (len(self.by_name["of"]["sums"]) + len(self.by_name["seen"]))  # type: ignore


class Objects(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.cache = SimpleNamespace(inner=SimpleNamespace(calls=0))

    def state(self) -> float:
        self.cache.inner.calls += 1
        return 1 / float(self.cache.inner.calls)


class Generators(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.draws: tuple[Any, ...] = (
            partial(torch.rand, 1, generator=torch.Generator().manual_seed(0)),
            np.random.default_rng(0).random,
            np.random.RandomState(0).rand,
            random.Random(0).random,
        )
        self.of = [np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]
        self.torch = torch.Generator().manual_seed(0)

    def state(self) -> float:
        drawn = [float(torch.rand(1, generator=self.torch)), self.of[0].random()]
        return sum([*drawn, self.of[1].rand(), self.of[2].random()])


class Tensors(Checkpointed):
    """A plain tensor and a buffer, written in place and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.replaced = torch.ones(()), torch.ones(())
        self.register_buffer("average", torch.ones(()))
        self.register_buffer("written", torch.ones(()))
        self.register_buffer("expanded", torch.ones(()).expand(8))

    def state(self) -> float:
        self.plain.mul_(0.9), self.written.mul_(0.9)  # type: ignore[operator]
        self.replaced, self.average = self.replaced * 0.9, self.average * 0.9
        return float(self.plain + self.replaced + self.average + self.written)


class Closure(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        calls, seen = 0, [1.0]

        def state() -> float:
            nonlocal calls
            calls += 1
            seen.append(calls)
            return calls / sum(seen)

        self.state = state  # type: ignore[method-assign]

    def middle(self, hidden: Tensor) -> Tensor:
        state = self.state
        out = checkpoint(lambda x: (x * state()).tanh(), hidden, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize(
    "make",
    [OnTheCpu, AskingHook, Checkpointed, Counter, Lists, Objects, Generators, Tensors, Closure],
)
def test_what_is_known_or_restored_is_measured(make: Callable[[], nn.Module]) -> None:
    assert found(make) == STEPS


# Bad input


class HookThatRaises(Network):
    def middle(self, hidden: Tensor) -> Tensor:
        hidden = hidden.tanh()
        if hidden.requires_grad:
            hidden.register_hook(self.fail)
        return hidden

    def fail(self, gradient: Tensor) -> Tensor:
        raise KeyError("mistake of the user's")


def test_a_hook_that_raises_ends_the_training_where_it_would() -> None:
    with pytest.raises(KeyError):
        train(HookThatRaises())


class OwnFunction(Network):
    """A Function that is its own module's attribute."""

    class Of(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def __init__(self) -> None:
        super().__init__()
        self.of = self.Of

    def middle(self, hidden: Tensor) -> Tensor:
        out = self.of.apply(hidden)
        assert isinstance(out, Tensor)
        return out


def test_a_function_that_is_an_attribute_of_its_module_is_named() -> None:
    assert "test_second_pass.OwnFunction.Of" in found(OwnFunction)


def test_a_graph_that_was_freed_before_the_step_is_not_measured() -> None:
    model = Network()
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1)
    loss = model(torch.ones(ROWS, WIDTH)).square().mean()
    loss.backward()
    meter.before_backward(loss, ROWS)

    with pytest.warns(UserWarning, match="NoiseScaleMeter has nothing to measure"):
        meter.step()
    meter.close()


class Freed(torch.autograd.Function):
    """Frees what it saved, as reversible layers do, and has it no more when it is read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.detach().clone()
        ctx.kept.untyped_storage().resize_(0)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class FreedMemory(Network):
    def middle(self, hidden: Tensor) -> Tensor:
        return Freed.apply(hidden)


def test_memory_that_was_freed_is_not_read() -> None:
    """That would end the process."""
    assert found(FreedMemory, backward_twice=True) == STEPS
