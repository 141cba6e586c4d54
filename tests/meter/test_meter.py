# SPDX-License-Identifier: Apache-2.0
import contextlib
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from brute_force import expected, gradient_of, in_float64, micro_batch, over_step
from fits import data, heard, loss_of, network
from ranks import on_ranks
from refused import refused
from torch.nn.parallel import DistributedDataParallel

import noisescale.meter.meter as meter_module
from noisescale import NoiseScaleMeter
from noisescale.batches.weights import GuessedTerms
from noisescale.collectors.ddp import DdpCollector, Phase
from noisescale.collectors.devices import read
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.estimation.recent import RecentSteps
from noisescale.meter.capture import KnownToHost
from noisescale.meter.step_timer import StepTimer


def batch(step: int, size: int = 8) -> list[torch.Tensor]:
    """Another batch for every step and rank."""
    x, y = data(1000).tensors
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    start = (step * ranks + rank) * size
    return [x[start : start + size], y[start : start + size]]


def go(
    meter: NoiseScaleMeter, model: Any, *losses: torch.Tensor, rows: int = 8, **options: Any
) -> None:
    model.zero_grad()
    for loss in losses:
        meter.backward(loss, rows, **options)
    meter.step()


def train(meter: NoiseScaleMeter, model: Any, steps: Iterable[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        go(meter, model, loss_of(model, batch(step)))
        optimizer.step()


def model_and_meter(**options: Any) -> tuple[Any, NoiseScaleMeter]:
    """Of this process, or of all of its group."""
    model = DistributedDataParallel(network()) if dist.is_initialized() else network()
    return model, NoiseScaleMeter(model, **options)


def of_both(value: Any) -> tuple[Any, Any]:
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return values[0], values[1]


class OnTwoRanks:
    """What holds on each rank."""

    def a_torch_loop_measures_the_same_on_all_ranks(self) -> None:
        model, meter = model_and_meter(window=10)
        train(meter, model, range(20))
        scale = meter.noise_scale
        meter.close()

        assert meter.noise_scale == scale
        assert (meter.steps, meter.examples, meter.batch_size, meter.skipped_steps) == (
            20,
            320,
            16,
            0,
        )
        assert scale.low > 0
        assert scale.steps == pytest.approx(10, rel=0.05)
        first, second = of_both(scale)
        assert first == second

    def equal_gradients_on_all_ranks_are_left_out_with_a_warning(self) -> None:
        model, meter = model_and_meter()
        for _ in range(5):
            go(meter, model, loss_of(model, data(8).tensors))
        with heard() as told:
            assert meter.noise_scale.steps == 0

        assert meter.skipped_steps == 5
        on_zero, on_one = of_both(told)
        assert ["same gradient" in text for text in on_zero] == [True]
        assert on_one == []

    def averaging_more_than_once_a_step_is_left_out_with_a_warning(self) -> None:
        """Accumulation without `no_sync` leaves a mix of local and averaged gradients."""
        model, meter = model_and_meter()
        with heard() as told:
            go(meter, model, *(loss_of(model, batch(step)) / 2 for step in range(2)))
            assert meter.skipped_steps == 1

        on_zero, on_one = of_both(told)
        assert ["`model.no_sync()`" in text for text in on_zero] == [True]
        assert on_one == []

    def a_step_without_backward_is_left_out_and_close_reads_what_is_under_way(self) -> None:
        model, meter = model_and_meter()
        train(meter, model, range(3))
        meter.step()
        meter.close()

        assert (meter.skipped_steps, meter.noise_scale.steps, meter.steps) == (1, 2, 4)

    def a_rank_that_saves_alone_after_an_error_does_not_wait_for_the_others(self) -> None:
        """Rank 1 takes part in the last reduction once rank 0 has saved: to wait is to hang."""
        model, meter = model_and_meter()
        train(meter, model, range(4))
        assert meter.noise_scale.steps == 3
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            meter.step()
            steps = meter.state_dict(interrupted=True)["counts"]["steps"]
            meter.close(interrupted=True)
            store.set("saved", "")
            assert (steps, meter.noise_scale.steps) == (5, 3)
        else:
            meter.state_dict()
            store.wait(["saved"])
            dist.all_reduce(torch.zeros(34, dtype=torch.float64))  # that of rank 0's last step

    def ranks_of_other_clocks_and_one_that_goes_on_measure_the_same_steps(self) -> None:
        """Rank 0 has steps of 0.5 s and ends at step 900, rank 1 of 1.5 s and 1,100.

        On rank 0 measuring costs a quarter of the constant, and on rank 1 the constant.
        """
        rank = dist.get_rank()
        costs = [0.125 * (1 + 3 * rank) / 4] * 4
        clock = mock.PropertyMock(return_value=0.5 + rank)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        inputs = torch.randn(8, 2) + rank

        def due_in(meter: NoiseScaleMeter, steps: int) -> list[bool]:
            found = []
            meter.last_step = 900.0 + 200 * rank
            for _ in range(steps):
                found.append(meter.due)
                go(meter, model, model(inputs).square().mean())
            return found

        options: Any = {"log_every_n_steps": 20, "small_batch": "rank"}
        never_known = mock.patch.object(meter_module, "KNOWN_WITHIN", 0.0)
        timed = mock.patch.multiple(StepTimer, mean=clock, costs=costs, finds_savings=True)
        with timed, never_known:
            meter = NoiseScaleMeter(model, **options)
            begun = due_in(meter, 630)
            saved = meter.state_dict()
            whole = begun + due_in(meter, 370)
            meter.close()
            resumed = NoiseScaleMeter(model, **options)
            resumed.load_state_dict(of_both(saved)[0])
            assert begun + due_in(resumed, 370) == whole

        first, second = of_both(whole)
        assert first == second
        pace = resumed._pace
        assert (pace.last_step, pace.opening) == (1000, pytest.approx(600, rel=0.05))
        assert resumed._cost == 0.125 / 2
        late = whole[600:667]
        assert sum(late) / len(late) < sum(whole[500:600]) / 100 / 3

    def rows_not_read_for_long_are_bounded(self) -> None:
        waiting = []
        with mock.patch("noisescale.meter.meter._MOST_UNREAD", 6):
            model, meter = model_and_meter()
            for step in range(8):
                go(meter, model, loss_of(model, batch(step)))
                waiting.append(len(meter._capture.unread))

        assert waiting == [1, 2, 3, 4, 5, 0, 1, 2]

    def training_within_join_is_not_measured_on_all_ranks_alike(self) -> None:
        """Else the first all-reduce of the meter's ends the processes."""
        for small_batch in ("rank", "micro_batch"):
            model, meter = model_and_meter(small_batch=small_batch)
            steps = 2 + 2 * dist.get_rank()  # uneven
            with heard() as told, model.join():
                for seed in range(steps):
                    go(meter, model, loss_of(model, data(8, seed=seed).tensors))

            first, second = of_both(meter.not_measured)
            assert first == second
            assert "`join()`" in first
            on_zero, on_one = of_both([text for text in told if "NoiseScaleMeter" in text])
            assert ([first in text for text in on_zero], on_one) == ([True], [])
            assert meter.steps == steps

    def a_rank_that_cannot_measure_takes_part_in_the_collectives_of_the_others(self) -> None:
        """Its steps are left out on all ranks, and it alone warns."""
        model, meter = model_and_meter(every_n_steps=1)
        weight_of_first = None if dist.get_rank() else 2.0
        with heard() as told:
            for step in range(4):
                first, last = (loss_of(model, batch(2 * step + part)) / 2 for part in range(2))
                model.zero_grad()
                with model.no_sync():
                    meter.backward(first, 8, weight=weight_of_first)
                meter.backward(last, 8, weight=2.0)
                meter.step()
            assert (meter.measured_steps, meter.skipped_steps, meter.measuring) == (0, 4, True)

        on_zero, on_one = of_both([text for text in told if "1 for 2 passes" in text])
        assert on_zero == []
        assert ["on rank 1" in text for text in on_one] == [True]

    def all_ranks_leave_out_a_step_whose_weight_is_none_on_one(self) -> None:
        for weights in ((-1.0, 2.0), (math.inf, 2.0), (None, 2.0)):
            model, meter = model_and_meter(every_n_steps=1)
            with heard():
                for weight in (weights[dist.get_rank()], 2.0):
                    go(meter, model, loss_of(model, batch(0)) / 2, weight=weight)
                assert (meter.measured_steps, meter.skipped_steps) == (1, 1)

    def a_model_that_is_not_wrapped_is_refused(self) -> None:
        with refused("model", error=TypeError, got="Sequential", remedy="DistributedDataParallel("):
            NoiseScaleMeter(network())


ON_TWO_RANKS = [name for name in vars(OnTwoRanks) if not name.startswith("_")]


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    """Of each of `ON_TWO_RANKS`, on either rank. Ranks are forked once."""

    def failure_of(claim: str) -> str:
        try:
            getattr(OnTwoRanks(), claim)()
        except Exception:
            return traceback.format_exc()
        return ""

    return on_ranks(2, lambda: {claim: failure_of(claim) for claim in ON_TWO_RANKS})


@pytest.mark.parametrize("claim", ON_TWO_RANKS)
def test_on_two_ranks(claim: str, failures: list[dict[str, str]]) -> None:
    for rank in failures:
        assert not rank[claim], rank[claim]


def gradient_on(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """In double precision; the model's own gradients are left alone."""
    return gradient_of(in_float64(model), lambda net: loss_of(net, (x.double(), y)))


def test_one_process_compares_its_micro_batches() -> None:
    """With unequal micro-batches and a short last window."""
    model, meter = model_and_meter()
    x, y = data(60).tensors
    moments, weights = [], []
    for sizes in ([8, 8, 8], [4, 12, 8], [5, 7]):
        model.zero_grad()
        gradients = []
        for size in sizes:
            gradients.append(gradient_on(model, x[:size], y[:size]))
            meter.backward(loss_of(model, (x[:size], y[:size])) / 3, local_batch_size=size)
            x, y = x[size:], y[size:]
        meter.step(loss_divisor=3)
        moments.append(expected(list(map(micro_batch, gradients, sizes))).moments)
        weights.append(sum(sizes))

    assert meter.sums.mean == pytest.approx(np.average(moments, 0, weights).tolist(), rel=1e-5)
    assert (meter.examples, meter.batch_size, meter.skipped_steps) == (60, 12, 0)


def doubled(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A comm hook whose averages are not the local gradients, also on one rank."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda reduced: 2 * reduced.value()[0])


def rows_of_one_rank(device: torch.device) -> list[tuple[float, float]]:
    """Small and big squared norms of each step; on CUDA a synchronisation is an error."""
    # One rank alone would have its micro-batches compared.
    meter_module.choose_collector = lambda ddp, *_, **__: DdpCollector(
        ddp, GradientNorms(list(ddp.module.named_parameters()))
    )
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(device)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, doubled)
    meter = NoiseScaleMeter(ddp)
    for _ in range(5):
        model.zero_grad()
        loss = ddp(torch.randn(8, 256, device=device)).square().mean()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        meter.backward(loss, local_batch_size=8)
        meter.step()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert meter._capture.collector.phase is Phase.AT_BACKWARD_END
    return [(row[0].item(), row[1].item()) for row, *_ in meter._capture.unread._waiting]


def test_local_norms_are_captured_before_the_averages_are_written(device: torch.device) -> None:
    (rows,) = on_ranks(1, rows_of_one_rank, device)

    assert len(rows) == 5
    for small, big in rows:
        assert big == pytest.approx(4 * small, rel=1e-6)


@pytest.mark.parametrize("mean_of_means", [False, True])
def test_weighted_micro_batches_are_compared_by_their_weights(mean_of_means: bool) -> None:
    """Weights matter up to a common factor only."""
    model = network()
    x, y = data(24).tensors
    sizes, weights = [4, 12, 8], [1.0, 5.0, 2.0]
    gradients = []

    def measured(factor: float) -> Any:
        meter = NoiseScaleMeter(model)
        model.zero_grad()
        gradients.clear()
        for start, size, weight in zip([0, 4, 16], sizes, weights, strict=True):
            part = (x[start : start + size], y[start : start + size])
            gradients.append(gradient_on(model, *part))
            loss = loss_of(model, part) * weight / sum(weights)
            given = torch.tensor(weight * factor) if factor > 1 else weight * factor
            meter.backward(loss, size, weight=given, mean_of_means=mean_of_means)
        meter.step()
        return meter.sums.mean

    on_host, on_device = measured(0.1), measured(7)

    parts = list(map(micro_batch, gradients, sizes, weights))
    signal, trace = expected(parts).moments if mean_of_means else over_step(parts, sum(sizes))
    for got in (on_host, on_device):
        assert got == (pytest.approx(signal, rel=1e-5), pytest.approx(trace, rel=1e-5))


def test_a_mean_over_tokens_is_right_where_parts_weigh_unequally() -> None:
    """Rows of 1 to 16 tokens, |G|² = 1; by sizes alone tr(Σ) reads 0.7 of the truth."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    meter = NoiseScaleMeter(model, window=4000, small_batch="micro_batch", every_n_steps=1)
    squares = 0.0
    steps, parts = 600, 2
    for _ in range(steps):
        model.zero_grad()
        tokens = torch.tensor([1, 2, 4, 8, 16])[torch.randint(5, (parts,))]
        for count in tokens.tolist():
            mean = 1 + 2 * torch.randn(count, 1).mean(0, keepdim=True)
            meter.backward(model(mean).sum() * count / tokens.sum(), 1, weight=count)
        meter.step()
        squares += (model.weight.grad.item() - 1) ** 2 / steps

    signal, trace = meter.sums.mean

    assert meter.skipped_steps == 0  # whatever the sign of their moments
    assert signal == pytest.approx(1, rel=0.15)
    assert trace == pytest.approx(parts * squares, rel=0.15)


def test_a_restored_meter_goes_on_with_the_mean_share_of_pairs() -> None:
    model = network()

    def measured(*, restored: bool) -> float:
        meter = NoiseScaleMeter(model, every_n_steps=1)
        for step in range(4):
            if restored and step == 2:
                state, meter = meter.state_dict(), NoiseScaleMeter(model, every_n_steps=1)
                meter.load_state_dict(state)
            model.zero_grad()
            for micro in range(2):
                weight = 1.0 + 3 * step * micro
                loss = loss_of(model, batch(2 * step + micro)) * weight / (2 + 3 * step)
                meter.backward(loss, 8, weight=weight)
            meter.step()
        return meter.sums.mean.grad_sq_norm

    assert measured(restored=True) == measured(restored=False)


ROWS_OF_GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("of", ["passes", "passes, on a device", "rows", "groups of rows"])
@pytest.mark.parametrize("wrong", [-2.0, math.nan, math.inf, 0.0])
def test_a_step_with_weights_that_are_none_is_left_out(wrong: float, of: str) -> None:
    model, meter = model_and_meter(every_n_steps=1)

    def step(first: float, second: float) -> None:
        model.zero_grad()
        if "rows" in of:
            weights = torch.tensor([first, *[second] * 7])
            groups = ROWS_OF_GROUPS if "groups" in of else None
            meter.backward(loss_of(model, batch(0)), 8, weight=weights, row_groups=groups)
        else:
            for micro, weight in enumerate((first, second)):
                given = torch.tensor(weight) if "device" in of else weight
                meter.backward(loss_of(model, batch(micro)) / 2, 8, weight=given)
        meter.step()

    with heard() as told:
        for _ in range(2):
            step(wrong, 1.0 if wrong else 0.0)  # weights may be zero, but not all of them
        assert meter.skipped_steps == 2
    assert sum("weight" in text for text in told) == 1
    step(1.0, 2.0)
    assert (meter.measured_steps, meter.skipped_steps) == (1, 2)


def told_of(
    order: list[int],
    *,
    follow: bool,
    given: bool = False,
    width_of: Callable[[int], int] | None = None,
    as_graph: Callable[[Any], Any] = lambda loss: loss,
) -> str:
    """What is said of a run whose steps have passes of these numbers of tokens.

    With `width_of` they are guessed, of batches with such a second dimension.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    meter = NoiseScaleMeter(model, every_n_steps=1, small_batch="micro_batch")
    for step in range(20):
        model.zero_grad()
        turn = step % len(order)
        for tokens in order if order == sorted(order) else order[turn:] + order[:turn]:
            loss = as_graph((model(1 + torch.rand(1, 1) / 9).sum() + 2) * (tokens if follow else 1))
            weight, terms = (tokens, None) if given else (None, torch.tensor(tokens))
            if width_of is not None:
                terms = GuessedTerms(partial(float, tokens), width_of(tokens))
            meter.before_backward(loss, 1, weight=weight, host=KnownToHost(terms=terms))
            loss.backward()
        meter.step()
    with heard() as told:
        assert meter.measured_steps == 20
    return "".join(told)


def test_losses_and_weights_that_do_not_go_together_are_told() -> None:
    """Losses that follow their tokens without a weight, means of means with one, sorted parts."""
    for order, follow, given, said in (
        ([5, 1, 9], True, False, "no weight"),
        ([5, 1, 9], False, False, ""),
        ([5, 5, 5], True, False, ""),
        ([5, 1, 9], False, True, "do not grow"),
        ([5, 1, 9], True, True, ""),
        ([1, 5, 9], True, True, "sorted"),
    ):
        told = told_of(order, follow=follow, given=given)
        assert said in told
        assert bool(told) == bool(said), (order, follow, given)


def test_guessed_tokens_are_told_of_where_lengths_vary_and_losses_follow() -> None:
    order = [5, 1, 9]

    told = told_of(order, follow=True, width_of=lambda tokens: tokens)

    assert "by the lengths of their batches" in told
    assert "`weight_fn`" in told
    assert told_of(order, follow=False, width_of=lambda tokens: tokens) == ""
    assert told_of(order, follow=True, width_of=lambda tokens: 8) == ""


def test_losses_that_are_all_in_the_same_memory_are_told_apart() -> None:
    """As those of a CUDA graph are."""
    memory = torch.zeros(())

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
            return memory.copy_(loss).detach()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    assert told_of([5, 1, 9], follow=True, given=True, as_graph=Graph.apply) == ""


def test_losses_that_cannot_be_read_cost_only_these_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rows_alone(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
        if min(map(len, tensors)) == 1:
            raise RuntimeError("overwritten")
        return read(tensors)

    monkeypatch.setattr("noisescale.collectors.rows.step_rows.read", of_rows_alone)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    meter = NoiseScaleMeter(model, every_n_steps=1, small_batch="micro_batch")
    found = []
    for _ in range(2):
        for _ in range(20):
            losses = [(model(torch.randn(4, 3)) - 1).square().mean() for _ in range(2)]
            go(meter, model, *losses, rows=4, weight=4.0)
        with contextlib.suppress(RuntimeError):
            found.append(meter.measured_steps)

    assert found == [20]


@pytest.mark.parametrize("weighted", [False, True])
def test_halves_where_few_rows_have_a_loss_need_the_weights_of_rows(weighted: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    meter = NoiseScaleMeter(model, every_n_steps=1)
    for _ in range(4):
        x, positives = torch.randn(32, 3), (torch.arange(32) < 5).float()
        loss = (model(x).squeeze(1).square() * positives).sum() / positives.sum()
        go(meter, model, loss, rows=32, weight=positives if weighted else None)
    with heard() as told:
        assert meter.measured_steps == (4 if weighted else 0)
    assert ["weight of each row" in text for text in told] == [True] * (not weighted)


def test_weights_of_rows_correct_halves_exactly() -> None:
    """Of every way to halve the batch together, the mean is that of the rows as parts."""
    model = torch.nn.Linear(3, 1, bias=False)
    for rows in (4, 5):
        torch.manual_seed(rows)
        x, weights = torch.randn(rows, 3), torch.tensor([5.0, 0.0, 1.0, 2.0, 1.0][:rows])
        parts = [micro_batch(g.double(), 1, w) for g, w in zip(x, weights.tolist(), strict=True)]
        meter = NoiseScaleMeter(model, window=3000, every_n_steps=1)
        for _ in range(120):
            loss = (model(x).squeeze(1) * weights).sum() / weights.sum()
            go(meter, model, loss, rows=rows, weight=weights)
        signal, trace = over_step(parts, rows)
        assert meter.sums.mean.grad_sq_norm == pytest.approx(signal, rel=0.15, abs=0.02)
        assert meter.sums.mean.noise_trace == pytest.approx(trace, rel=0.15)


@pytest.mark.parametrize(
    ("weights", "said"), [((2.0, None), "1 for 2 passes"), ((torch.ones(7),), "8 rows")]
)
def test_weights_for_some_passes_or_rows_only_are_not_measured(weights: Any, said: str) -> None:
    model, meter = model_and_meter(every_n_steps=1)
    for weight in weights:
        meter.backward(loss_of(model, batch(0)), 8, weight=weight)

    with pytest.warns(UserWarning, match=f"`weight` must .*{said}"):
        meter.step()

    assert meter.not_measured is not None


def test_steps_of_one_micro_batch_are_known_from_the_first_of_them() -> None:
    model = torch.nn.Linear(4, 2)
    meter = NoiseScaleMeter(model, small_batch="micro_batch")
    seen = []

    for micro_batches in (2, 1, 1, 2):
        losses = [model(torch.randn(8, 4)).square().mean() for _ in range(micro_batches)]
        go(meter, model, *losses)
        seen.append((meter.measured_steps, meter.skipped_steps, meter.unmeasurable_since))

    assert seen == [(1, 0, None), (1, 1, 2), (1, 2, 2), (2, 2, None)]
    restored = NoiseScaleMeter(model)
    restored.load_state_dict(meter.state_dict())
    assert restored.measured_steps == 2


@pytest.mark.parametrize("small_batch", ["micro_batch", "half"])
def test_steps_that_are_not_measured_have_no_hooks_on_parameters(small_batch: Any) -> None:
    """They cost 1.5 % of a step of 40 ms."""
    model, meter = model_and_meter(small_batch=small_batch, every_n_steps=3)
    hooked = []
    for step in range(6):
        for part in range(2):
            loss = loss_of(model, batch(2 * step + part)) / 2
            meter.before_backward(loss, 8, last=part == 1)
            hooked.append(sum(bool(p._backward_hooks) for p in model.parameters()))
            loss.backward()
        meter.step()
        model.zero_grad()

    assert hooked == [4, 4, 0, 0, 0, 0] * 2
    assert meter.measured_steps == 2
    meter.close()
    assert not any(p._backward_hooks for p in model.parameters())
    with pytest.raises(RuntimeError, match="meter is closed"):
        meter.step()


def test_passes_that_do_not_count_do_not_in_a_step_that_is_not_measured_either() -> None:
    """Gradients that are dropped before the step is taken, and another optimizer's turn."""
    model, meter = model_and_meter(small_batch="half", every_n_steps=3)

    for step in range(4):
        if step == 1:
            meter.backward(loss_of(model, batch(0)), 1000)
        model.zero_grad()
        meter.backward(loss_of(model, batch(0)), 8)
        if step == 2:
            model.requires_grad_(False)
            meter.before_backward(torch.ones((), requires_grad=True), 1000)
            model.requires_grad_(True)
        meter.step()

    assert (meter.measured_steps, meter.examples) == (2, 4 * 8)


def test_measured_steps_are_at_their_places_in_the_run_also_after_one_is_left_out() -> None:
    """Every third step is measured, the second of them is not finite; now is two steps later."""
    model, meter = model_and_meter(small_batch="half", every_n_steps=3)
    for step in range(18):
        go(meter, model, loss_of(model, batch(step)) * (math.nan if step == 3 else 1))
    recent = RecentSteps()
    recent.load_state_dict(meter.state_dict()["estimates"]["whole"]["recent"])
    at = [int(row[0]) for row in recent.state_dict()["steps"]]

    assert at == [7, 10, 13, 16]  # the first only sets the level
    assert meter.noise_scale == recent.estimate(18) != recent.estimate(16)
    assert meter.noise_scale_at(0.5) == recent.estimate(18, confidence=0.5)


@pytest.mark.parametrize("groups", [None, ROWS_OF_GROUPS])
def test_equal_weights_of_rows_change_nothing(groups: list[int] | None) -> None:
    """Nor whether a mean over rows is called a mean of means, where a step has one batch."""
    shown = []
    for weight, mean_of_means in ((None, False), (torch.ones(8), False), (torch.ones(8), True)):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        meter = NoiseScaleMeter(model, every_n_steps=1)
        for _ in range(3):
            loss = model(torch.randn(8, 3)).square().mean()
            options = {"weight": weight, "mean_of_means": mean_of_means, "row_groups": groups}
            go(meter, model, loss, **options)
        shown.append(meter.sums.mean)
    assert shown[1] == pytest.approx(shown[0])
    assert shown[2] == pytest.approx(shown[0])


@pytest.mark.parametrize("changed", [{"unit": "rows"}, {"window": 50}])
def test_averages_that_begin_anew_do_so_in_the_middle_of_the_run(changed: dict[str, Any]) -> None:
    """As if they began at step 1 every step would be old, and the interval wide."""
    model, first = model_and_meter(every_n_steps=1)
    second = NoiseScaleMeter(model, every_n_steps=1, **changed)
    train(first, model, range(20))

    with refused(*changed):
        second.load_state_dict(first.state_dict())
    first.close()
    train(second, model, range(5))

    rows = second.state_dict()["estimates"]["whole"]["recent"]["steps"]
    assert [int(row[0]) for row in rows] == [22, 23, 24, 25]


def test_weights_of_the_terms_of_each_row_are_summed_over_the_row() -> None:
    """Of labels, say: else every term would count as a part."""
    model = torch.nn.Linear(3, 1, bias=False)
    x, terms = torch.randn(4, 3), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]])
    found = []
    for weight in (terms, terms.sum(1)):
        meter = NoiseScaleMeter(model, every_n_steps=1)
        for _ in range(4):
            loss = (model(x).squeeze(1) * terms.sum(1)).sum() / terms.sum()
            go(meter, model, loss, rows=4, weight=weight)
        found.append(meter.sums.mean)
        meter.close()

    assert found[0] == found[1]


def test_the_noise_scale_is_known_from_the_log_step_with_a_narrow_interval() -> None:
    """And ranks go by it from the next one on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 1)
    meter = NoiseScaleMeter(model, log_every_n_steps=20)
    known, agreed = [], []
    for _ in range(20 * 8):
        losses = [(model(torch.randn(8, 30)) + 1).square().mean() / 4 for _ in range(4)]
        go(meter, model, *losses)
        if meter.steps % 20 == 0:
            now = meter.noise_scale
            known.append(0 < now.high <= 3 * now.low)
            agreed.append(meter._pace.known_at)
    meter.close()

    first = known.index(True)
    assert agreed == [0.0] * (first + 1) + [20.0 * (first + 1)] * (7 - first)
    assert 0 < first < 6


def test_the_learning_rates_of_measured_steps_and_of_now_count() -> None:
    """The rate falls after the measured steps, as on a schedule."""
    ends = []
    for last in (0.1, 0.001):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter = NoiseScaleMeter(model, optimizer=optimizer, every_n_steps=1)
        for _ in range(20):
            model.zero_grad()
            meter.backward(model(torch.randn(8, 3)).square().mean(), 8)
            meter.step()
        optimizer.param_groups[0]["lr"] = last
        ends.append(meter.noise_scale.low)
        meter.close()

    assert ends[1] < ends[0] / 4
