# SPDX-License-Identifier: Apache-2.0
"""Gradients that others change: what passes made is measured, or the step is left out by name."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from brute_force import expected, micro_batch, whole
from fits import heard
from ranks import on_ranks
from tiers import slow, slow_but
from torch import Tensor, nn
from ways_of_capture import WAYS, Net, batch, ddp, half_squares, not_averaging

from noisescale import NoiseScaleMeter

STEPS, ROWS = 6, 4
Change = Callable[[Any], None]


def each(change: Callable[[Tensor], Any]) -> Change:
    def change_all(model: Any) -> None:
        for p in model.parameters():
            if p.grad is not None:
                change(p.grad)

    return change_all


def scaled(factor: float) -> Change:
    return each(lambda gradient: gradient.mul_(factor))


def clipped(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


noised = each(lambda gradient: gradient.add_(0.1))
zeroed = scaled(0.0)


def dropped(model: Any) -> None:
    for p in model.parameters():
        p.grad = None


class Loop(NamedTuple):
    way: str = "micro-batches"
    passes: int = 2
    prepare: Change = lambda model: None
    after_pass: Change = lambda model: None
    before_step: Change = lambda model: None
    after_step: Change = dropped
    rows_alike: bool = False
    backward: Callable[[Any, Tensor], None] = lambda meter, loss: meter.backward(loss, ROWS)


class Measured(NamedTuple):
    moments: tuple[float, float]
    skipped: int
    told: list[str]

    def is_refused(self, *words: str, skipped: int = STEPS) -> bool:
        """Whether these steps were left out, with one warning that has these words."""
        (message,) = self.told
        assert all(word in message for word in words), message
        return self.skipped == skipped


def measured(loop: Loop) -> Measured:
    """Run the loop on this rank. The weights stand still."""
    way = WAYS[loop.way]
    model = way.wrapped(Net(), unused=False)
    loop.prepare(model)
    meter = NoiseScaleMeter(model, small_batch=way.small_batch, every_n_steps=1)  # type: ignore[arg-type]
    rank = dist.get_rank() if dist.is_initialized() else 0
    with heard() as told:
        for step in range(STEPS):
            for micro in range(loop.passes):
                x, y = batch(step, rank, micro, ROWS)
                if loop.rows_alike:
                    x, y = x[:1].expand_as(x), y[:1].expand_as(y)
                with not_averaging(model, way, last=micro == loop.passes - 1):
                    loop.backward(meter, half_squares(model(x), y) / loop.passes)
                loop.after_pass(model)
            loop.before_step(model)
            meter.step()
            loop.after_step(model)
        found = meter.sums.mean
    return Measured(found, meter.skipped_steps, [text for text in told if "measured" in text])


def run(way: str, *loops: Loop) -> list[Measured]:
    """Run the loops, one after another; ranks are forked once."""
    ranks = WAYS[way].ranks
    every = [loop._replace(way=way) for loop in loops]
    if ranks == 1:
        return [measured(loop) for loop in every]
    first, *others = on_ranks(ranks, lambda: [measured(loop) for loop in every])
    for other in others:
        for here, there in zip(first, other, strict=True):
            assert (there.skipped, there.told) == (here.skipped, [])
    return first  # type: ignore[no-any-return]


def truth(name: str, passes: int) -> tuple[float, float]:
    """|G|² and tr(Σ), averaged over the steps, from the gradient of each micro-batch."""
    way, net = WAYS[name], Net().double()
    trained = [p for p in net.parameters() if p.requires_grad]

    def gradient(step: int, rank: int, micro: int) -> Tensor:
        x, y = batch(step, rank, micro, ROWS)
        found = torch.autograd.grad(half_squares(net(x.double()), y.double()), trained)
        return torch.cat([g.flatten() for g in found])

    moments = []
    for step in range(STEPS):
        parts = [
            [micro_batch(gradient(step, rank, k), ROWS) for k in range(passes)]
            for rank in range(way.ranks)
        ]
        of_ranks = way.part == "rank"
        small = [whole(p) for p in parts] if of_ranks else [p for some in parts for p in some]
        moments.append(expected(small).moments)
    signal, trace = zip(*moments, strict=True)
    return sum(signal) / STEPS, sum(trace) / STEPS


def stepped_within(names: str, *, to_none: bool = True) -> Change:
    """Have an optimizer step in the backward pass, on parameters with `names` in their name."""

    def step(p: nn.Parameter) -> None:
        if to_none:
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()

    def prepare(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if names in name and p.requires_grad:
                p.register_post_accumulate_grad_hook(step)

    return prepare


SLOW_SHARDS = [pytest.mark.slow]
ACCUMULATING = [
    *(("micro-batches", 2), ("DDP", 2), ("DDP, micro-batches", 2)),
    *(slow("micro-batches", 3), slow("DDP, bucket views", 2), slow("DDP", 1)),
    ("FSDP2", 2),
    pytest.param("FSDP2, reduced once", 2, marks=SLOW_SHARDS),
]
ALONE = [("micro-batches", 2), ("halves", 1)]


@pytest.mark.parametrize(("way", "passes"), ACCUMULATING)
def test_changes_of_gradients_after_the_last_pass_change_no_number(way: str, passes: int) -> None:
    changes = scaled(1.1), scaled(0.9), clipped, noised, zeroed

    found = run(way, *(Loop(passes=passes, before_step=change) for change in changes))

    for one in found:
        assert one.moments == pytest.approx(truth(way, passes), rel=1e-4)
        assert (one.skipped, one.told) == (0, [])


def test_halves_are_those_of_an_untouched_training() -> None:
    changes = scaled(1.0), scaled(1.1), clipped, zeroed

    untouched, *found = run("halves", *(Loop(passes=1, before_step=change) for change in changes))

    assert found == [untouched] * 3
    assert untouched.skipped == 0


BETWEEN = "between two backward passes"
REFUSED = [
    (Loop(after_pass=scaled(1.1)), BETWEEN),
    (Loop(after_pass=zeroed), BETWEEN),
    (Loop(after_step=scaled(0.5)), "before the first backward pass"),
    (Loop(prepare=stepped_within("")), "gone by the end"),
    (Loop(prepare=stepped_within("last.weight")), "Gradients of last.weight were gone"),
]
"""Gradients changed between passes, left there, or dropped by an optimizer within the pass."""


@pytest.mark.parametrize(("way", "passes"), [*ACCUMULATING, ("halves", 1)])
def test_gradients_that_others_change_are_refused_by_name(way: str, passes: int) -> None:
    cases = REFUSED[2 if passes == 1 else 0 :] if way != "FSDP2, reduced once" else REFUSED[3:]

    found = run(way, *(loop._replace(passes=passes) for loop, _ in cases))

    for one, (loop, words) in zip(found, cases, strict=True):
        first_found_none = loop.after_step is not dropped
        assert one.is_refused(words, skipped=STEPS - first_found_none)


@pytest.mark.parametrize(("way", "passes"), ALONE)
def test_gradients_zeroed_in_place_between_steps_are_measured(way: str, passes: int) -> None:
    dropping, zeroing = run(way, *(Loop(passes=passes, after_step=c) for c in (dropped, zeroed)))

    assert zeroing.moments == pytest.approx(dropping.moments, rel=1e-6)
    assert zeroing.told == []


def hook_later(meter: Any, loss: Tensor) -> None:
    """After the meter has put its own hooks on the parameters."""
    meter.before_backward(loss, ROWS)
    parameters = meter._capture.collector.norms.parameters
    hooks = [p.register_hook(lambda g: 1.1 * g) for p in parameters]
    loss.backward()
    for hook in hooks:
        hook.remove()


def passes_within(chunks: int, *, announced: bool = False) -> Callable[[Any, Tensor], None]:
    """As GradCache: passes begin in a hook of the loss; the last may be what is announced."""

    def backward(meter: Any, loss: Tensor) -> None:
        leaf = loss.detach().requires_grad_()

        @torch.enable_grad()
        def hook(gradient: Tensor) -> None:
            for chunk in range(chunks):
                part = loss * gradient / chunks
                if announced and chunk == chunks - 1:
                    meter.before_backward(part, ROWS // chunks)
                part.backward(retain_graph=True)

        leaf.register_hook(hook)
        if not announced:
            meter.before_backward(leaf, ROWS)
        leaf.backward()

    return backward


WITHIN = [
    (Loop(backward=passes_within(1)), "ran within another one"),
    (Loop(backward=passes_within(2)), "ran within another one"),
    (Loop(backward=passes_within(2, announced=True)), "ran within another one"),
    (Loop(backward=hook_later), "`p.grad` was not what"),
    (Loop(prepare=stepped_within("last.weight", to_none=False)), "<locals>.step on last.weight"),
]


@pytest.mark.parametrize(("way", "passes"), ALONE)
def test_passes_and_hooks_within_a_pass_are_refused_by_name(way: str, passes: int) -> None:
    found = run(way, *(loop._replace(passes=passes) for loop, _ in WITHIN))

    assert all(one.is_refused(words) for one, (_, words) in zip(found, WITHIN, strict=True))


@pytest.mark.parametrize("passes", slow_but([1, 2], 2))
def test_ranks_are_measured_where_only_the_last_pass_within_a_pass_averages(passes: int) -> None:
    """As GradCache under DDP. Otherwise local and averaged gradients are mixed."""

    def moments(no_sync: bool) -> tuple[list[float], list[str]]:
        model = ddp(Net(), unused=False)
        meter = NoiseScaleMeter(model, every_n_steps=1)

        def go_through(chunk: tuple[Tensor, ...], averages: bool, _: Tensor) -> None:
            x, y = chunk
            apart = no_sync and not averages
            with model.no_sync() if apart else nullcontext(), torch.enable_grad():
                (half_squares(model(x), y) / 2 / passes).backward()

        with heard() as told:
            for step, micro in product(range(STEPS), range(passes)):
                last = micro == passes - 1
                halves = [part.chunk(2) for part in batch(step, dist.get_rank(), micro, ROWS)]
                leaf = torch.ones((), requires_grad=True)
                for which, chunk in enumerate(zip(*halves, strict=True)):
                    leaf.register_hook(partial(go_through, chunk, last and which == 1))
                with nullcontext() if last else model.no_sync():
                    meter.backward(leaf, ROWS)
                if last:
                    meter.step()
                    dropped(model)
        return meter.sums.mean, told

    ranks = on_ranks(2, lambda: [moments(no_sync) for no_sync in (True, False)])
    (apart, told), (mixed, told_of_mixing) = ranks[0]

    assert apart == pytest.approx(truth("DDP", passes), rel=1e-4)
    assert told == []
    assert mixed is None
    assert "more than once" in told_of_mixing[0]


def test_a_loop_may_drop_old_gradients_between_announcing_a_pass_and_running_it() -> None:
    def backward(meter: Any, loss: Tensor) -> None:
        meter.before_backward(loss, ROWS)
        for p in meter._capture.collector.norms.parameters:
            p.grad = None
        loss.backward()

    (found,) = run("halves", Loop(passes=1, after_step=scaled(1.0), backward=backward))

    assert (found.skipped, found.told) == (0, [])


def test_one_micro_batch_with_a_weight_of_32_bits_is_nothing_to_compare() -> None:
    def loop(weight: float) -> Loop:
        weighted = {"weight": torch.tensor(weight)}
        return Loop(passes=1, backward=lambda meter, loss: meter.backward(loss, ROWS, **weighted))

    for found in run("micro-batches", Loop(passes=1), *map(loop, (0.37, 0.55, 0.7, 0.9))):
        assert found.is_refused("one micro-batch")


def test_rows_that_are_one_example_are_said_to_be_so() -> None:
    (found,) = run("halves", Loop(passes=1, rows_alike=True))

    assert found.is_refused("All rows")
    assert "rank" not in found.told[0]


def test_a_step_that_ends_earlier_than_any_before_is_left_out() -> None:
    """Which pass is the last is not known: windows of three passes, then of two."""
    model = Net()
    meter = NoiseScaleMeter(model, small_batch="micro_batch", every_n_steps=1)
    captured = []
    for step in range(24):
        passes = 3 if step < 20 else 2
        for micro in range(passes):
            x, y = batch(step, 0, micro, ROWS)
            meter.backward(half_squares(model(x), y) / passes, ROWS)
        scaled(1.1)(model)
        meter.step()
        dropped(model)
        captured.append(meter.skipped_steps)  # read: the first checks are over

    assert captured == [0] * 20 + [1] * 4


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(("way", "passes"), ALONE)
def test_a_step_whose_gradient_is_zero_is_left_out_alone(way: str, passes: int, zero: int) -> None:
    model = Net()
    meter = NoiseScaleMeter(model, small_batch=WAYS[way].small_batch, every_n_steps=1)  # type: ignore[arg-type]
    counts = []
    with heard() as told:
        for step in range(STEPS):
            for micro in range(passes):
                x, y = batch(step, 0, micro, ROWS)
                loss = half_squares(model(x), y) / passes
                meter.backward(loss * (step != zero), ROWS)
            meter.step()
            dropped(model)
            counts.append(meter.measured_steps)

    said = [one for one in told if "such steps are not measured" in one.lower()]
    assert counts[-1] == STEPS - 1
    assert counts[zero] == (counts[zero - 1] if zero else 0)
    assert ["was zero" in one for one in said] == [True] * (zero == 0)
