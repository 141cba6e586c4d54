# SPDX-License-Identifier: Apache-2.0
import contextlib
import copy
import math
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from brute_force import expected, micro_batch, over_step
from fits import data, loss_of, network
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

import noisescale.meter.meter as meter_module
from noisescale import NoiseScaleMeter
from noisescale.collectors.ddp import DdpCollector, Phase
from noisescale.collectors.devices import read
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.estimation.recent import RecentSteps


def batch(step: int, size: int = 8) -> list[torch.Tensor]:
    """Another batch for every step and rank."""
    x, y = data(1000).tensors
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    start = (step * ranks + rank) * size
    return [x[start : start + size], y[start : start + size]]


def train(meter: NoiseScaleMeter, model: Any, steps: int, *, same_data: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        examples = data(8).tensors if same_data else batch(step)
        meter.backward(loss_of(model, examples), local_batch_size=8)
        meter.step()
        optimizer.step()


def test_a_torch_loop_measures_the_same_on_all_ranks() -> None:
    def measured() -> tuple[Any, ...]:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model, window=10)
        train(meter, model, 20)
        scale = meter.noise_scale
        meter.close()
        assert meter.noise_scale == scale
        return scale, meter.steps, meter.examples, meter.batch_size, meter.skipped_steps

    first, second = on_ranks(2, measured)

    assert first == second
    scale, *rest = first
    assert rest == [20, 320, 16, 0]
    assert scale.low > 0
    assert scale.steps == pytest.approx(10, rel=0.05)


def test_close_reads_what_is_still_under_way() -> None:
    def measured() -> float:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model)
        train(meter, model, 5)
        meter.close()
        return meter.noise_scale.steps

    assert on_ranks(2, measured) == [4.0] * 2  # the first sets the level


def test_equal_gradients_on_all_ranks_are_left_out_with_a_warning() -> None:
    def warned() -> tuple[list[str], int, float]:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model)
        train(meter, model, 5, same_data=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps = meter.noise_scale.steps
        return [str(w.message) for w in caught], meter.skipped_steps, steps

    on_zero, on_one = on_ranks(2, warned)

    message = (
        "All ranks or micro-batches had the same gradient. Such steps are not measured. Give each"
        " rank (by a `DistributedSampler`) and each micro-batch its own examples. If inputs are"
        " drawn at random, give each rank its own seed."
    )
    assert on_zero == ([message], 5, 0)
    assert on_one == ([], 5, 0)


def test_averaging_more_than_once_a_step_is_left_out_with_a_warning() -> None:
    """Accumulation without `no_sync` leaves a mix of local and averaged gradients."""

    def warned() -> tuple[list[str], int]:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                meter.backward(loss_of(model, batch(step)) / 2, local_batch_size=8)
            meter.step()
        return [str(w.message) for w in caught], meter.skipped_steps

    on_zero, on_one = on_ranks(2, warned)

    assert len(on_zero[0]) == 1
    assert "Wrap all but the last backward of a step in `model.no_sync()`" in on_zero[0][0]
    assert (on_zero[1], on_one) == (1, ([], 1))


def test_a_step_without_backward_on_all_ranks_is_left_out() -> None:
    def measured() -> tuple[int, float, int]:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model)
        train(meter, model, 3)
        meter.step()
        return meter.skipped_steps, meter.noise_scale.steps, meter.steps

    assert on_ranks(2, measured) == [(1, 2.0, 4)] * 2  # the first sets the level


def test_a_rank_that_saves_alone_after_an_error_does_not_wait_for_the_others(
    tmp_path: Path,
) -> None:
    """Rank 1 takes part in the last reduction only when rank 0 has saved: to wait is to hang."""

    def saved() -> tuple[int, float]:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model)
        train(meter, model, 4)
        assert meter.noise_scale.steps == 3
        store = dist.FileStore(str(tmp_path / "flags"), 2)
        if dist.get_rank() == 0:
            meter.step()
            state = meter.state_dict(interrupted=True)
            meter.close(interrupted=True)
            store.set("saved", "")
        else:
            state = meter.state_dict()
            store.wait(["saved"])
            dist.all_reduce(torch.zeros(14, dtype=torch.float64))  # lets rank 0 end its group
        return state["counts"]["steps"], meter.noise_scale.steps

    (steps, measured), _ = on_ranks(2, saved)

    assert steps == 5
    assert measured == 3


def test_rows_not_read_for_long_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noisescale.meter.meter._MOST_UNREAD", 6)

    def pending() -> list[int]:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model)
        waiting = []
        for step in range(8):
            model.zero_grad()
            meter.backward(loss_of(model, batch(step)), local_batch_size=8)
            meter.step()
            waiting.append(len(meter._capture.unread))
        return waiting

    assert on_ranks(2, pending) == [[1, 2, 3, 4, 5, 0, 1, 2]] * 2


def test_unequal_ranks_are_exact() -> None:
    """Ranks of 2 and 30 examples: the estimate of tr(Σ) has no bias, the naive one is 4 x off."""

    def traces() -> Any:
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(20, 1, bias=False))
        meter = NoiseScaleMeter(model, window=100_000)
        size = (2, 30)[dist.get_rank()]
        for _ in range(400):
            model.zero_grad()
            loss = model(torch.randn(size, 20)).mean()  # the gradient is the mean of the inputs
            meter.backward(loss, local_batch_size=size)
            meter.step()
        return meter.sums.mean

    (signal, trace), _ = on_ranks(2, traces)

    assert trace == pytest.approx(20, abs=4 * 20 * (2 / 20 / 400) ** 0.5)
    assert abs(signal) < 1


@pytest.mark.parametrize("small_batch", ["rank", "micro_batch", "example"])
def test_training_within_join_is_not_measured_on_all_ranks_alike(small_batch: Any) -> None:
    """Else the first all-reduce of the meter's ends the processes."""

    def trained() -> tuple[str | None, list[str], bool]:
        rank = dist.get_rank()
        ddp = DistributedDataParallel(network())
        meter = NoiseScaleMeter(ddp, small_batch=small_batch)
        batches = [data(8, seed=seed).tensors for seed in range(2 + 2 * rank)]  # uneven
        with warnings.catch_warnings(record=True) as told, ddp.join():
            warnings.simplefilter("always")
            for batch in batches:
                meter.backward(loss_of(ddp, batch), 8)
                meter.step()
        ours = [str(one.message) for one in told if "NoiseScaleMeter" in str(one.message)]
        return meter.not_measured, ours, meter.steps == len(batches)

    (first, told, all_steps), (second, told_again, all_of_second) = on_ranks(2, trained)

    assert first == second is not None
    assert first.startswith("`model` must not train within its `join()`, got one that does")
    assert ([first in one for one in told], told_again) == ([True], [])
    assert all_steps
    assert all_of_second


def test_a_rank_that_cannot_measure_takes_part_in_the_collectives_of_the_others() -> None:
    """Its steps are left out on all ranks, and it alone warns."""

    def trained() -> tuple[int, int, bool, list[str]]:
        ddp = DistributedDataParallel(network())
        meter = NoiseScaleMeter(ddp, small_batch="example", every_n_steps=1)
        rows_of_one_example = 2 if dist.get_rank() else 1
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for seed in range(4):
                meter.backward(loss_of(ddp, data(8, seed=seed).tensors), 8 / rows_of_one_example)
                meter.step()
                ddp.zero_grad()
            counts = meter.measured_steps, meter.skipped_steps
        ours = [str(one.message) for one in told if "8 rows" in str(one.message)]
        return *counts, meter.measuring, ours

    (*first, silent), (*second, told) = on_ranks(2, trained)

    assert first == second == [0, 4, True]
    assert silent == []
    (message,) = told
    assert "on rank 1" in message
    assert message.endswith("Training goes on.")


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`every_n_steps` must be at least 1, got 0.")):
        NoiseScaleMeter(network(), every_n_steps=0)

    def unwrapped() -> str:
        with pytest.raises(TypeError) as error:
            NoiseScaleMeter(network())
        return str(error.value)

    message = (
        "`model` must be a DistributedDataParallel, FSDP1 or FSDP2 module, or DeepSpeed's engine,"
        " if several processes train, got Sequential. Wrap it: `DistributedDataParallel(model)`. If"
        " the optimizer averages gradients in its step, or each rank steps on its own gradient,"
        " pass `averaged=False`."
    )
    assert on_ranks(2, unwrapped) == [message] * 2


def test_one_process_compares_its_micro_batches() -> None:
    """With unequal micro-batches and a short last window."""
    model = network()
    meter = NoiseScaleMeter(model)
    x, y = data(60).tensors
    noises, signals, weights = [], [], []
    for sizes in ([8, 8, 8], [4, 12, 8], [5, 7]):
        model.zero_grad()
        gradients = []
        for size in sizes:
            plain = copy.deepcopy(model).double()
            plain.zero_grad()
            loss_of(plain, (x[:size].double(), y[:size])).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in plain.parameters()]))
            meter.backward(loss_of(model, (x[:size], y[:size])) / 3, local_batch_size=size)
            x, y = x[size:], y[size:]
        meter.step(loss_divisor=3)
        signal, noise = expected(list(map(micro_batch, gradients, sizes))).moments
        noises.append(noise)
        signals.append(signal)
        weights.append(sum(sizes))

    signal, noise = meter.sums.mean

    assert noise == pytest.approx(np.average(noises, weights=weights), rel=1e-5)
    assert signal == pytest.approx(np.average(signals, weights=weights), rel=1e-5)
    assert (meter.examples, meter.batch_size, meter.skipped_steps) == (60, 12, 0)


def test_one_process_without_accumulation_is_told_once_what_to_do() -> None:
    model = network()
    meter = NoiseScaleMeter(model, small_batch="micro_batch")
    train(meter, model, 3)

    with pytest.warns(
        UserWarning,
        match="Accumulate two or more micro-batches, use more devices, or compare the halves of"
        " each batch",
    ) as warned:
        scale = meter.noise_scale

    assert len(warned) == 1
    assert (scale.steps, meter.skipped_steps) == (0, 3)


def test_a_closed_meter_says_so() -> None:
    def closed() -> str:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model)
        meter.close()
        with pytest.raises(RuntimeError) as error:
            meter.step()
        return str(error.value)

    message = "This meter is closed. Make a new meter and load the `state_dict` of this one."
    assert on_ranks(2, closed) == [message] * 2


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
            plain = copy.deepcopy(model)
            plain.zero_grad()
            loss_of(plain, part).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in plain.parameters()]).double())
            loss = loss_of(model, part) * weight / sum(weights)
            on_device = torch.tensor(weight * factor)
            meter.backward(
                loss,
                size,
                weight=on_device if factor > 1 else weight * factor,
                mean_of_means=mean_of_means,
            )
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
        assert model.weight.grad is not None
        squares += (model.weight.grad.item() - 1) ** 2 / steps

    signal, trace = meter.sums.mean

    assert signal == pytest.approx(1, rel=0.15)
    assert trace == pytest.approx(parts * squares, rel=0.15)


def test_a_restored_meter_goes_on_with_the_mean_share_of_pairs() -> None:
    model = network()

    def measured(meters: list[NoiseScaleMeter]) -> float:
        for step in range(4):
            model.zero_grad()
            for micro in range(2):
                weight = 1.0 + 3 * step * micro
                loss = loss_of(model, batch(2 * step + micro)) * weight / (2 + 3 * step)
                meters[step].backward(loss, 8, weight=weight)
            meters[step].step()
            if step < 3 and meters[step + 1] is not meters[step]:
                meters[step + 1].load_state_dict(meters[step].state_dict())
        return meters[3].sums.mean.grad_sq_norm

    def new() -> NoiseScaleMeter:
        return NoiseScaleMeter(model, every_n_steps=1)

    first, second = new(), new()
    assert measured([first, first, second, second]) == measured([new()] * 4)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("weights", [(1.0, -2.0), (1.0, math.nan), (math.inf, 1.0), (0.0, 0.0)])
def test_a_step_with_weights_that_are_none_is_left_out(
    weights: tuple[float, float], on_device: bool
) -> None:
    model = network()
    meter = NoiseScaleMeter(model, every_n_steps=1)

    def step(*weights: float) -> None:
        model.zero_grad()
        for micro, weight in enumerate(weights):
            loss = loss_of(model, batch(micro)) / 2
            meter.backward(loss, 8, weight=torch.tensor(weight) if on_device else weight)
        meter.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*weights)
        step(*weights)
        assert meter.skipped_steps == 2
    assert len([w for w in caught if "weight" in str(w.message)]) == 1
    step(1.0, 2.0)
    assert (meter.measured_steps, meter.skipped_steps) == (1, 2)


@pytest.mark.parametrize("weights", [(-1.0, 2.0), (math.inf, 2.0), (None, 2.0)])
def test_all_ranks_leave_out_a_step_whose_weight_is_none_on_one(weights: Any) -> None:
    def measured() -> tuple[int, int]:
        model = DistributedDataParallel(network())
        meter = NoiseScaleMeter(model, every_n_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for bad in (True, False):
                model.zero_grad()
                loss = loss_of(model, batch(0)) / 2
                meter.backward(loss, 8, weight=weights[dist.get_rank()] if bad else 2.0)
                meter.step()
            return meter.measured_steps, meter.skipped_steps

    assert on_ranks(2, measured) == [(1, 1), (1, 1)]


def told(
    order: list[int],
    *,
    follow: bool,
    given: bool,
    as_graph: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
) -> str:
    """What is said of a run whose steps have passes of these numbers of tokens."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    meter = NoiseScaleMeter(model, every_n_steps=1, small_batch="micro_batch")
    for step in range(20):
        model.zero_grad()
        turn = step % len(order)
        for tokens in order if order == sorted(order) else order[turn:] + order[:turn]:
            loss = (model(1 + torch.rand(1, 1) / 9).sum() + 2) * (tokens if follow else 1)
            loss = as_graph(loss)
            weight, terms = (tokens, None) if given else (None, torch.tensor(tokens))
            meter.before_backward(loss, 1, weight=weight, terms=terms)
            loss.backward()
        meter.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert meter.measured_steps == 20
    return "".join(str(warning.message) for warning in caught)


def test_losses_that_follow_their_tokens_without_a_weight_are_told() -> None:
    assert "no weight is given" in told([5, 1, 9], follow=True, given=False)
    assert told([5, 1, 9], follow=False, given=False) == ""
    assert told([5, 5, 5], follow=True, given=False) == ""


def test_weights_of_a_loss_that_is_a_mean_of_means_are_told() -> None:
    assert "do not grow with the weights" in told([5, 1, 9], follow=False, given=True)
    assert told([5, 1, 9], follow=True, given=True) == ""


def test_parts_that_are_sorted_by_their_weights_are_told() -> None:
    assert "sorted" in told([1, 5, 9], follow=True, given=True)


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

    assert told([5, 1, 9], follow=True, given=True, as_graph=Graph.apply) == ""


def test_losses_that_cannot_be_read_cost_only_the_steps_that_are_read_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
            model.zero_grad()
            for _ in range(2):
                meter.backward((model(torch.randn(4, 3)) - 1).square().mean(), 4, weight=4.0)
            meter.step()
        with contextlib.suppress(RuntimeError):
            found.append(meter.measured_steps)

    assert found == [20]


@pytest.mark.parametrize("weight", [None, "rows"])
def test_halves_of_a_batch_with_few_rows_that_have_a_loss_need_the_weights_of_rows(
    weight: str | None,
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    meter = NoiseScaleMeter(model, every_n_steps=1)
    for _ in range(4):
        model.zero_grad()
        x, positives = torch.randn(32, 3), (torch.arange(32) < 5).float()
        loss = (model(x).squeeze(1).square() * positives).sum() / positives.sum()
        meter.backward(loss, 32, weight=positives if weight else None)
        meter.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert meter.measured_steps == (4 if weight else 0)
    assert ["weight of each row" in str(w.message) for w in caught] == [True] * (weight is None)


def test_weights_of_rows_correct_halves_exactly() -> None:
    """Of every way to halve the batch together, the mean is that of the rows as parts."""
    model = torch.nn.Linear(3, 1, bias=False)
    for rows in (4, 5):
        torch.manual_seed(rows)
        x, weights = torch.randn(rows, 3), torch.tensor([5.0, 0.0, 1.0, 2.0, 1.0][:rows])
        parts = [micro_batch(g.double(), 1, w) for g, w in zip(x, weights.tolist(), strict=True)]
        meter = NoiseScaleMeter(model, window=3000, every_n_steps=1)
        for _ in range(120):
            model.zero_grad()
            loss = (model(x).squeeze(1) * weights).sum() / weights.sum()
            meter.backward(loss, rows, weight=weights)
            meter.step()
        signal, trace = over_step(parts, rows)
        assert meter.sums.mean.grad_sq_norm == pytest.approx(signal, rel=0.15, abs=0.02)
        assert meter.sums.mean.noise_trace == pytest.approx(trace, rel=0.15)


def test_a_weight_for_some_passes_of_a_step_only_is_not_measured() -> None:
    model = network()
    meter = NoiseScaleMeter(model)
    for weight in (2.0, None):
        meter.before_backward(loss := loss_of(model, batch(0)), 8, weight=weight)
        loss.backward()

    with pytest.warns(UserWarning, match="`weight` must be given"):
        meter.step()

    assert meter.not_measured == (
        "`weight` must be given for all backward passes of a step or for none, got 1 for 2 passes."
        " Pass 1 for passes that count once."
    )


def test_steps_of_unequal_weights_are_kept_whatever_their_sign() -> None:
    """Leaving out those whose small norm is the smaller one would read 0.2 as 0.23."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    meter = NoiseScaleMeter(model, window=4000, small_batch="micro_batch")
    steps, noise = 3000, 0.2
    for _ in range(steps):
        model.zero_grad()
        for _ in range(2):
            weight = 0.1 + 0.9 * torch.rand(()).item()
            example = 1 + noise**0.5 * torch.randn(1, 1)  # |G|² = 1, tr(Σ) = 0.2
            loss = weight * model(example).sum()
            meter.before_backward(loss, 1, weight=weight)
            loss.backward()
        meter.step()

    scale = meter.noise_scale

    assert meter.skipped_steps == 0
    assert scale.low < noise * 1.02
    assert scale.high > noise * 0.98


def test_steps_of_one_micro_batch_are_known_from_the_first_of_them() -> None:
    """Steps of 2, 1, 1 and 2 micro-batches in one process."""
    model = torch.nn.Linear(4, 2)
    meter = NoiseScaleMeter(model, small_batch="micro_batch")
    seen = []

    for micro_batches in (2, 1, 1, 2):
        model.zero_grad()
        for _ in range(micro_batches):
            meter.backward(model(torch.randn(8, 4)).square().mean(), local_batch_size=8)
        meter.step()
        seen.append((meter.measured_steps, meter.skipped_steps, meter.lone_since))

    assert seen == [(1, 0, None), (1, 1, 2), (1, 2, 2), (2, 2, None)]
    restored = NoiseScaleMeter(model)
    restored.load_state_dict(meter.state_dict())
    assert restored.measured_steps == 2


@pytest.mark.parametrize("small_batch", ["micro_batch", "half"])
def test_steps_that_are_not_measured_have_no_hooks_on_parameters(small_batch: Any) -> None:
    """They cost 1.5 % of a step of 40 ms."""
    model = network()
    meter = NoiseScaleMeter(model, small_batch=small_batch, every_n_steps=3)
    hooked = []
    for step in range(6):
        for part in range(2):
            x, y = batch(2 * step + part)
            loss = torch.nn.functional.cross_entropy(model(x), y) / 2
            meter.before_backward(loss, len(x), last=part == 1)
            hooked.append(sum(bool(p._backward_hooks) for p in model.parameters()))
            loss.backward()
        meter.step()
        model.zero_grad()
    all_of_them = len(list(model.parameters()))

    assert hooked == [all_of_them, all_of_them, 0, 0, 0, 0] * 2
    assert meter.measured_steps == 2
    meter.close()
    assert not any(p._backward_hooks for p in model.parameters())


def test_passes_that_do_not_count_do_not_in_a_step_that_is_not_measured_either() -> None:
    """Gradients that are dropped before the step is taken, and another optimizer's turn."""
    model = network()
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=3)
    x, y = batch(0)

    def go_back(examples: int) -> None:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        meter.backward(loss, local_batch_size=examples)

    for step in range(4):
        if step == 1:
            go_back(1000)
        model.zero_grad()
        go_back(len(x))
        if step == 2:
            model.requires_grad_(False)
            meter.before_backward(torch.ones((), requires_grad=True), 1000)
            model.requires_grad_(True)
        meter.step()

    assert (meter.measured_steps, meter.examples) == (2, 4 * len(x))


def test_measured_steps_are_at_their_places_in_the_run_also_after_one_is_left_out() -> None:
    """Every third step is measured, the second of them is not finite; now is two steps later."""
    model = network()
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=3)
    for step in range(18):
        x, y = batch(step)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        meter.backward(loss * math.nan if step == 3 else loss, local_batch_size=len(x))
        meter.step()
        model.zero_grad()
    recent = RecentSteps()
    recent.load_state_dict(meter.state_dict()["estimates"]["whole"]["recent"])
    at = [int(row[0]) for row in recent.state_dict()["steps"]]

    assert at == [7, 10, 13, 16]  # the first only sets the level
    assert meter.noise_scale == recent.estimate(18) != recent.estimate(16)
    assert meter.noise_scale_at(0.5) == recent.estimate(18, confidence=0.5)


@pytest.mark.parametrize("groups", [None, [0, 0, 1, 1, 2, 2, 3, 3]])
def test_equal_weights_of_rows_change_nothing(groups: list[int] | None) -> None:
    """Nor whether a mean over rows is called a mean of means, where a step has one batch."""
    shown = []
    for weight, mean_of_means in ((None, False), (torch.ones(8), False), (torch.ones(8), True)):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        meter = NoiseScaleMeter(model, every_n_steps=1)
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean()
            options: Any = {"weight": weight, "mean_of_means": mean_of_means}
            meter.backward(loss, 8, row_groups=groups, **options)
            meter.step()
        mean = meter.sums.mean
        shown.append((mean.grad_sq_norm, mean.noise_trace))
    assert shown[1] == pytest.approx(shown[0])
    assert shown[2] == pytest.approx(shown[0])


@pytest.mark.parametrize("groups", [None, [0, 0, 1, 1, 2, 2, 3, 3]])
@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan])
def test_a_step_whose_rows_have_an_impossible_weight_is_left_out(
    wrong: float, groups: list[int] | None
) -> None:
    model = torch.nn.Linear(3, 1)
    meter = NoiseScaleMeter(model, every_n_steps=1)
    weight = torch.tensor([wrong] + [2.0] * 7)
    meter.backward(model(torch.randn(8, 3)).square().mean(), 8, weight=weight, row_groups=groups)
    meter.step()
    with pytest.warns(UserWarning, match="weights of a step were all zero, negative or not"):
        assert (meter.measured_steps, meter.skipped_steps) == (0, 1)


@pytest.mark.parametrize("changed", [{"unit": "rows"}, {"window": 50}])
def test_averages_that_begin_anew_do_so_in_the_middle_of_the_run(changed: dict[str, Any]) -> None:
    """As if they began at step 1 every step would be old, and the interval wide."""
    model = network()
    first, second = (
        NoiseScaleMeter(model, small_batch="half", every_n_steps=1, **options)
        for options in ({}, changed)
    )
    train(first, model, 20)

    with pytest.raises(ValueError, match="must be the one that the state was saved with"):
        second.load_state_dict(first.state_dict())
    first.close()
    train(second, model, 5)

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
            model.zero_grad()
            loss = (model(x).squeeze(1) * terms.sum(1)).sum() / terms.sum()
            meter.backward(loss, 4, weight=weight)
            meter.step()
        found.append(meter.sums.mean)
        meter.close()

    assert found[0] == found[1]


def test_as_many_weights_as_rows_are_needed() -> None:
    model = network()
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1)
    x, y = batch(0)
    meter.backward(loss_of(model, (x, y)), len(x), weight=torch.ones(len(x) - 1))

    with pytest.warns(UserWarning, match="`weight` must have one number for each of the 8 rows"):
        meter.step()
    assert not meter.measuring
