# SPDX-License-Identifier: Apache-2.0
"""Halves of one batch against what two micro-batches give, and what must stay as it is."""

import copy
import gc
import math
import random
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from ranks import in_a_fork
from refused import refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from noisescale import NoiseScaleMeter, measuring
from noisescale.collectors.rows.step_norms import StepNorms

ROWS, WIDTH = 6, 4


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests() -> None:
    gc.collect()
    network()(batch()[0])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 3, generator=generator)


def mse(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(one[0]), one[1])


def sq_norm(loss: Tensor, model: nn.Module) -> float:
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(float(g.square().sum()) for g in torch.autograd.grad(loss, trained))


def steps(
    meter: NoiseScaleMeter,
    model: nn.Module,
    *windows: list[tuple[Tensor, Tensor]],
    loss: Callable[..., Tensor] = mse,
) -> None:
    for window in windows:
        model.zero_grad()
        for one in window:
            meter.backward(loss(model, one) / len(window), len(one[0]))
        meter.step()


def measured(model: nn.Module, **options: Any) -> NoiseScaleMeter:
    return NoiseScaleMeter(model, **{"small_batch": "half", "every_n_steps": 1, **options})


def test_windows_of_several_are_measured_by_micro_batches(recorded: list[StepNorms]) -> None:
    """The number changes in a run: two windows of one have to be seen before one is expected."""
    model = network()
    one, two = batch(1), batch(2)
    meter = measured(model)

    steps(meter, model, [one], [one, two], [one, two], [one], [one], [one])
    assert [meter.measured_steps, meter.skipped_steps] == [4, 2]

    small = (sq_norm(mse(model, one), model) + sq_norm(mse(model, two), model)) / 2
    for got in recorded[1:3]:
        assert got.small_sq_norm == pytest.approx(small)
        assert (got.small_batch, got.big_batch) == pytest.approx((ROWS, 2 * ROWS))
    assert recorded[5].small_batch == pytest.approx(ROWS / 2)


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_a_loop_that_accumulates_is_measured_where_its_first_batch_has_no_halves(rows: int) -> None:
    """It cannot be known before the step: BatchNorm, and batches of one row. All is as without."""
    model = network()
    if rows > 1:
        model.insert(1, nn.BatchNorm1d(8))
    plain = copy.deepcopy(model)
    windows = [[batch(2 * i, rows), batch(2 * i + 1, rows)] for i in range(4)]

    with closing(NoiseScaleMeter(model, every_n_steps=1)) as meter:
        steps(meter, model, *windows)

    assert meter.not_measured is None
    assert (meter.measured_steps, meter.skipped_steps) == (4, 0)
    for window in windows:
        plain.zero_grad()
        for one in window:
            (mse(plain, one) / 2).backward()
    left = [
        {**m.state_dict(), **{n: p.grad for n, p in m.named_parameters()}} for m in (model, plain)
    ]
    assert all(map(torch.equal, *(one.values() for one in left)))


def test_the_short_last_step_of_an_epoch_is_tried_by_halves_once_if_it_is_refused() -> None:
    """It is known to be the only batch, as under a Trainer. Of a second one in turn it is told."""
    model = network()
    model.insert(1, nn.BatchNorm1d(8))
    tried = []

    with closing(measured(model)) as meter:
        cuts: Any = meter._capture.collector
        find, cuts._cuts.find = cuts._cuts.find, lambda *given: tried.append(1) or find(*given)

        def step(*window: int) -> None:
            for which in window:
                last = which == window[-1]
                meter.before_backward(loss := mse(model, batch(which)), ROWS, last=last)
                loss.backward()
            meter.step()
            model.zero_grad()

        for epoch in range(3):
            step(3 * epoch, 3 * epoch + 1)
            step(3 * epoch + 2)
            assert meter.unmeasurable_since == 2 * epoch + 2
        assert (meter.measured_steps, meter.skipped_steps, len(tried)) == (3, 3, 1)

        with pytest.warns(UserWarning, match="got a BatchNorm"):
            step(10)


def test_few_steps_have_a_pass_more_and_more_are_measured_that_need_none() -> None:
    """The budget of 60 steps pays for 9: 3 steps, and 4.1 of the first hundred, at 0.75 each."""
    model = network()
    passes = []
    model[1].register_full_backward_pre_hook(lambda *_: passes.append(measuring()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meter = measured(model, every_n_steps="auto")
        steps(meter, model, *[[batch(i)] for i in range(60)])
        assert meter.measured_steps == 9
        assert sum(passes) >= 1 + 9  # the first has to be proved

        steps(meter, model, *[[batch(i), batch(i + 1)] for i in range(20)])
    # Not in the first three is it known that the next step needs none. The others cost an eighth,
    # and the budget ends before six of them.
    assert meter.measured_steps == 9 + 14


@pytest.mark.parametrize("every", [1, 4])
def test_rows_of_successive_steps_are_compared_apart_from_others(every: int) -> None:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meter = measured(model, every_n_steps=every)
    steps(meter, model, *[[batch(i)] for i in range(40 * every)])
    assert meter.measured_steps == 40

    collector: Any = meter._capture.collector
    look = collector._apart.found.look()
    assert math.isnan(look.apart) == (every == 1)
    assert math.isnan(look.correlation) == (every == 4)


def test_where_rows_may_be_alike_successive_steps_are_measured() -> None:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meter = measured(model, every_n_steps="auto")
    found: Any = meter._capture.collector
    found._apart.suspects_rows = True
    those = []
    for i in range(60):
        before = meter.measured_steps
        steps(meter, model, [batch(i)])
        those += [i] * (meter.measured_steps - before)

    assert [b - a for a, b in zip(those[::2], those[1::2], strict=True)] == [1] * 5


class Running(nn.Module):
    """Subtracts a running mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean.clone()
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - mean


class Noisy(nn.Module):
    """Dropout in a checkpoint, and a running mean, which would be updated once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 8)
        self.body = nn.Sequential(Running(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.retain_grad()
        self.kept.append(hidden)
        return checkpoint(self.body, hidden.tanh(), use_reentrant=False)


class Square(torch.autograd.Function):
    """In a checkpoint what it saved is there only after that went forward again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


class Counts(Noisy):
    """It draws another mask when it goes forward again, and is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def count(self, x: Tensor) -> Tensor:
        self.passes += 1
        return F.dropout(Square.apply(x), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(
            self.count, self.first(x), use_reentrant=False, preserve_rng_state=False
        )
        return self.body(hidden)


class ShownSeveralTimes(Noisy):
    """With numbers that a buffer and a saved tensor show once for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(8).expand(ROWS, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Square.apply(self.first(x)) + self.shift
        return self.body[2](hidden * Square.apply(self.shift[:1].clone().expand(ROWS, 8)))


class SameMemory(torch.autograd.Function):
    """Its gradients are in the same memory each time, as in a CUDA graph."""

    memory: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        found = gradient @ weight, gradient.T @ x, gradient.sum(0)
        for i, one in enumerate(found):
            SameMemory.memory.setdefault(i, torch.empty_like(one)).copy_(one)
        return tuple(SameMemory.memory[i].detach() for i in range(3))


class AsGraph(Noisy):
    """As `torch.cuda.make_graphed_callables` makes a layer."""

    def forward(self, x: Tensor) -> Tensor:
        SameMemory.memory = {}
        hidden = SameMemory.apply(x, self.first.weight, self.first.bias)
        return self.body[2](hidden.tanh())


@pytest.mark.parametrize(
    ("make", "measured_steps", "groups"),
    [
        (Noisy, 5, None),
        (Noisy, 5, [0, 1, 0, 2, 2, 1]),
        (Counts, 0, None),
        (ShownSeveralTimes, 5, None),
        (AsGraph, 5, None),
    ],
)
def test_training_is_what_it_is_without(
    make: Callable[[], Noisy], measured_steps: int, groups: Any, device: torch.device
) -> None:
    trusted = partial(measured, backward_twice=True)

    def trained(meter_of: Callable[[nn.Module], NoiseScaleMeter | None]) -> list[Any]:
        model = make().to(device)
        meter = meter_of(model)
        accumulated: list[Tensor] = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        for seed in range(5):
            optimizer.zero_grad()
            x, y = batch(seed)
            loss = mse(model, (x.to(device), y.to(device)))
            if meter is None:
                loss.backward()
            else:
                meter.backward(loss, ROWS, row_groups=groups)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "NoiseScaleMeter has nothing to measure")
                    meter.step()
            optimizer.step()
        if meter is not None:
            assert meter.measured_steps == measured_steps
            meter.close()
        drawn = [torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        drawn.append(torch.rand(1, device=device))
        kept = [x.grad for x in model.kept]
        return [*model.parameters(), *model.buffers(), *accumulated, *drawn, *kept]

    for ours, theirs in zip(trained(trusted), trained(lambda _: None), strict=True):
        assert torch.equal(ours, theirs)


def why_not(model: nn.Module, loss: Callable[..., Tensor] = mse, **options: Any) -> str:
    """Why a training is not measured, as one warning says. It goes on as without, in silence."""
    plain = copy.deepcopy(model)
    loss(plain, batch()).backward()
    meter = measured(model, **options)
    with pytest.warns(UserWarning, match="NoiseScaleMeter has nothing to measure") as told:
        steps(meter, model, [batch()], loss=loss)
    (warned,) = told
    assert meter.not_measured is not None
    assert meter.not_measured in str(warned.message)
    assert not meter.measuring
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is theirs.grad or torch.equal(ours.grad, theirs.grad)
    steps(meter, model, [])
    meter.close()
    return meter.not_measured


class InPlace(torch.autograd.Function):
    """Scales what it saved by the gradient, as fused losses do to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0].mul_(2 * gradient)


def penalized(model: nn.Module, one: tuple[Tensor, Tensor], by: float = 5) -> Tensor:
    return mse(model, one) + by * model[0].weight.square().sum()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (penalized, "`weight_decay`"),
        (lambda model, one: model(torch.cat([one[0], one[0] + 1])).square().mean(), "got none"),
        (lambda model, one: InPlace.apply(model(one[0]) - one[1]), "got InPlace"),
        (
            lambda model, one: F.cross_entropy(
                model(one[0]) @ model(one[0] + 0.1).T, torch.arange(ROWS)
            ),
            "(Mm of shape (6, 6))",
        ),
    ],
    ids=["penalized", "two views", "in place", "contrastive"],
)
def test_a_loss_whose_halves_would_mislead_is_refused(
    loss: Callable[..., Tensor], reason: str
) -> None:
    assert reason in why_not(network(), loss, backward_twice=True)


@pytest.mark.parametrize("stem", [True, False])
def test_reentrant_checkpoints_are_refused(stem: bool) -> None:
    """Torch would end the pass, or leave parameters out in silence where none are before them."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.body = network()
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x) if stem else x.requires_grad_()
            out = self.head(checkpoint(self.body, x, use_reentrant=True))
            assert isinstance(out, Tensor)
            return out

    assert "got a checkpoint with `use_reentrant=True`" in why_not(Checkpointed())


@pytest.mark.slow
@in_a_fork
def test_what_was_compiled_to_give_its_buffers_away_is_refused_with_the_remedy() -> None:
    """Of shapes that vary, what the forward pass kept is overwritten by the backward pass."""
    import torch._functorch.config

    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 3, 8, 8), torch.arange(ROWS) % 3
    for donated in (True, False):
        torch.compiler.reset()
        torch._functorch.config.donated_buffer = donated
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        meter = measured(compiled)
        meter.backward(F.cross_entropy(compiled(x), y), ROWS)
        if donated:
            with pytest.warns(match="donated_buffer"):
                meter.step()
            assert all(p.grad is not None for p in model.parameters())
        else:
            meter.step()
            assert meter.measured_steps == 1
        meter.close()


def test_out_of_memory_at_a_measured_step_is_told_once_and_training_goes_on() -> None:
    model = network()
    meter = measured(model)
    steps(meter, model, [batch(0)])
    expected = torch.autograd.grad(mse(model, batch(1)), list(model.parameters()))

    def fails(*_: Any) -> None:
        if measuring():
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = model[1].register_full_backward_pre_hook(fails)
    with pytest.warns(UserWarning, match="not measured: OutOfMemoryError"):
        steps(meter, model, [batch(1)])
    handle.remove()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)
    assert (meter.measured_steps, meter.skipped_steps) == (1, 1)
    steps(meter, model, [batch(2)])
    assert meter.measured_steps == 2


def test_batch_norm_is_refused_while_it_goes_by_the_batch() -> None:
    """Once it is thawed in a run, too."""
    for normalize in (nn.BatchNorm1d(8, track_running_stats=False), nn.BatchNorm1d(8)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 8), normalize, nn.Linear(8, 3))
        assert "got a BatchNorm" in why_not(model)

    normalize.eval()
    with closing(measured(model)) as meter:
        steps(meter, model, [batch(0)], [batch(1)])
        normalize.train()
        with pytest.warns(UserWarning, match="got a BatchNorm"):
            steps(meter, model, *[[batch(seed)] for seed in range(2, 5)])
        assert (meter.measured_steps, meter.skipped_steps) == (2, 3)
        normalize.eval()
        steps(meter, model, [batch(5)])
        assert meter.measured_steps == 3


def test_what_is_made_of_batch_norm_with_one_row_is_measured() -> None:
    """Normalization of each instance, and of a weight (timm's StdConv2d)."""

    class Standardized(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            weight = F.batch_norm(
                self.weight.reshape(1, self.out_channels, -1), None, None, training=True
            ).reshape_as(self.weight)
            return F.conv1d(x, weight, self.bias)

    torch.manual_seed(0)
    model = nn.Sequential(
        Standardized(1, 4, 2), nn.InstanceNorm1d(4), nn.Flatten(), nn.Linear(12, 3)
    )
    x, y = batch()
    with closing(measured(model)) as meter:
        steps(meter, model, [(x[:, None], y)])
        assert meter.measured_steps == 1


def test_a_term_past_the_cut_is_looked_at_in_each_measured_step() -> None:
    """Its weight grows: what passed the proof at first does not later."""
    model = network()

    with closing(measured(model)) as meter:
        steps(meter, model, [batch(0)], [batch(1)], loss=partial(penalized, by=0.0))
        assert meter.measured_steps == 2
        with pytest.warns(UserWarning, match=r"of \|g\|² in the proof"):
            steps(meter, model, [batch(2)], loss=partial(penalized, by=1.0))
        assert (meter.measured_steps, meter.skipped_steps) == (2, 1)


def test_a_small_parameter_that_rows_lead_to_is_measured(recorded: list[StepNorms]) -> None:
    """A bias that the training step adds is cut where it is added."""
    model = network()
    model.register_parameter("bias", nn.Parameter(torch.zeros(3)))

    def biased(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(one[0]) + model.get_parameter("bias"), one[1])

    with closing(measured(model)) as meter:
        steps(meter, model, [batch()], loss=biased)
        assert meter.measured_steps == 1
    assert recorded[0].big_sq_norm == pytest.approx(sq_norm(biased(model, batch()), model))


def test_weights_of_losses_are_left_out_by_name_where_they_are_cut_past(
    recorded: list[StepNorms],
) -> None:
    """Kendall's; a loss without them in between leaves nothing out."""
    model = network()
    model.register_parameter("log_variance", nn.Parameter(torch.zeros(2)))

    def weighted(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
        s = model.get_parameter("log_variance")
        out = model(one[0])
        return (-s[0]).exp() * F.mse_loss(out, one[1]) + (-s[1]).exp() * out.abs().mean() + s.sum()

    with closing(measured(model)) as meter:
        with pytest.warns(UserWarning, match="but log_variance"):
            steps(meter, model, [batch(0)], loss=weighted)
        steps(meter, model, [batch(1)], loss=weighted)
        assert meter.measured_steps == 2
    assert model.log_variance.grad is not None
    model.log_variance.requires_grad_(False)
    assert recorded[1].big_sq_norm == pytest.approx(sq_norm(weighted(model, batch(1)), model))


def test_a_cut_of_the_users_is_where_rows_are_signed() -> None:
    model = network()
    with refused("cut", got="'body'"):
        measured(model, cut="body")
    with refused("cut", requirement="None"):
        NoiseScaleMeter(model, small_batch="micro_batch", cut=["2"])
    with closing(measured(model, cut=["2"])) as meter:
        steps(meter, model, [batch(0)], [batch(1)])
        assert meter.measured_steps == 2
    model.other = nn.Linear(1, 1)  # type: ignore[assignment]
    assert "none of them" in why_not(model, lambda m, b: mse(m[:3], b), cut=["other"])


def test_batches_without_halves_are_told_of() -> None:
    """Of one row; of as many positions as rows it is not known which are which."""
    model, recurrent = network(), nn.LSTM(WIDTH, 3)
    with closing(measured(model)) as meter:
        with pytest.warns(UserWarning, match="has no halves"):
            steps(meter, model, [batch(rows=1)])
        assert (meter.measured_steps, meter.skipped_steps) == (0, 1)
    with closing(measured(recurrent)) as meter:
        meter.backward(recurrent(torch.randn(ROWS, ROWS, WIDTH))[0].square().mean(), ROWS)
        with pytest.warns(UserWarning, match="as many positions as"):
            meter.step()


def test_another_graph_is_proved_anew_at_the_next_measured_step() -> None:
    model = network()
    meter = measured(model)

    def doubled(*of: Any) -> Tensor:
        return 2 * mse(*of)

    steps(meter, model, [batch(0)])
    steps(meter, model, [batch(1)], [batch(2)], loss=doubled)
    steps(meter, model, [batch(3)])
    steps(meter, model, [batch(4)], loss=doubled)

    assert (meter.measured_steps, meter.skipped_steps) == (4, 1)


def test_between_steps_and_after_the_proof_modules_have_no_hooks() -> None:
    from torch.nn.modules import module as of_torch

    def hooks() -> int:
        return len(of_torch._global_forward_hooks) + len(of_torch._global_forward_pre_hooks)

    model = network()
    with closing(measured(model)) as meter:
        assert hooks() == 2
        meter.pause()
        assert hooks() == 0
        meter.resume()
        assert hooks() == 2
        steps(meter, model, [batch(0)])
        assert hooks() == 0


def test_a_forward_pass_that_no_backward_pass_follows_is_not_kept() -> None:
    model = network()
    with closing(measured(model)):
        hidden = model[0](batch()[0])
        kept = hidden.untyped_storage()._weak_ref()
        model[2](hidden.tanh())
        del hidden

        assert torch.UntypedStorage._expired(kept)
