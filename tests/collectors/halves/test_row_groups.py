# SPDX-License-Identifier: Apache-2.0
"""Halves of whole groups of rows: what they show, and which rows may act on each other."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from brute_force import micro_batch, over_step
from refused import refused
from tiers import slow
from torch import Tensor, nn
from torch.nn import functional as F

from noisescale import NoiseScaleMeter
from noisescale.batches.row_groups import checked_row_groups

GROUPS, SIZE, WIDTH = 8, 4, 6
ROWS = GROUPS * SIZE
IN_TURN = torch.arange(ROWS) // SIZE
"""Rows of a group next to each other."""
PAIRED = torch.arange(ROWS) % (ROWS // 2)
"""A row of the first half of the batch with one of the second half."""


Loss = Callable[[Tensor], Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def drawn(groups: Tensor, seed: int) -> Tensor:
    """Rows of one group are alike, as two augmented copies are."""
    generator = torch.Generator().manual_seed(seed)
    count = int(groups.max()) + 1
    common = torch.randn(count, WIDTH, generator=generator)
    return common[groups] + 0.5 * torch.randn(len(groups), WIDTH, generator=generator) + 0.4


# What halves show


@pytest.mark.parametrize(
    ("groups", "weighted"),
    [
        ([0, 0, 0, 1, 2, 2, 3, 3], False),
        ([4, 4, 9, 9, 9, 7, 7, 4, 3, 1], True),
        slow([0, 0, 0, 1, 2, 2, 3, 3], True),
        slow([4, 4, 9, 9, 9, 7, 7, 4, 3, 1], False),
    ],
)
def test_whole_groups_are_parts_exactly(groups: list[int], weighted: bool) -> None:
    """Of every way to halve them together, the mean is that of the groups as parts."""
    torch.manual_seed(len(groups))
    model, x = nn.Linear(3, 1, bias=False), torch.randn(len(groups), 3)
    weights = torch.rand(len(groups)) if weighted else torch.ones(len(groups))
    parts = []
    for group in sorted(set(groups)):
        chosen = torch.tensor([one == group for one in groups])
        total = weights[chosen].sum()
        mean = (weights[chosen, None] * x[chosen]).sum(0) / total
        parts.append(micro_batch(mean.double(), 1, total.item()))
    meter = NoiseScaleMeter(model, window=3000, every_n_steps=1)

    for _ in range(150):
        model.zero_grad()
        loss = (model(x).squeeze(1) * weights).sum() / weights.sum()
        meter.backward(loss, len(groups), row_groups=groups, weight=weights if weighted else None)
        meter.step()

    signal, trace = over_step(parts, len(groups))
    assert meter.measured_steps == 150
    assert meter.sums.mean.grad_sq_norm == pytest.approx(signal, rel=0.15, abs=0.02)
    assert meter.sums.mean.noise_trace == pytest.approx(trace, rel=0.15)


def truth(groups: Tensor, loss: Loss) -> tuple[float, float]:
    """tr(Σ) and B_simple in rows, by independent batches."""
    model = network()
    parameters = dict(model.named_parameters())

    def value(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, parameters, (x,)))

    batches = torch.stack([drawn(groups, seed) for seed in range(1500)])
    found = torch.func.vmap(torch.func.grad(value), (None, 0))(parameters, batches)
    of_batches = torch.cat([g.detach().flatten(1) for g in found.values()], 1).double()
    noise = of_batches.var(0).sum().item()
    signal = of_batches.mean(0).square().sum().item() - noise / len(batches)
    return len(groups) * noise, len(groups) * noise / signal


def by_halves(
    groups: Tensor, loss: Loss, *, given: bool = True, size: int = 0, steps: int = 300
) -> NoiseScaleMeter:
    model = network()
    meter = NoiseScaleMeter(model, window=3000, every_n_steps=1, small_batch="half")
    for seed in range(steps):
        model.zero_grad()
        value = loss(model(drawn(groups, 5000 + seed)))
        meter.backward(value, size or len(groups), row_groups=groups if given else None)
        meter.step()
    return meter


def advantages(z: Tensor) -> Tensor:
    """GRPO's: rewards normalized within each group, without gradient."""
    logp = z.log_softmax(1)[:, 0]
    reward = (z[:, 1] + z[:, 2].square()).detach().view(GROUPS, SIZE)
    centred = reward - reward.mean(1, keepdim=True)
    return -(centred / (reward.std(1, keepdim=True) + 0.1)).flatten().mul(logp).mean()


def reward_pairs(z: Tensor) -> Tensor:
    chosen, rejected = z[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected - 0.5).mean()


def siamese(z: Tensor) -> Tensor:
    return F.relu(1.5 - (z[0::2] - z[1::2]).norm(dim=1)).square().mean()


def plain(z: Tensor) -> Tensor:
    return z.square().mean()


PAIRS_IN_TURN = torch.arange(ROWS) // 2
UNEQUAL = torch.tensor([0] * 9 + [1] * 2 + [2] * 6 + [3] * 3 + [4] * 8 + [5] * 4)


@pytest.mark.parametrize(
    ("loss", "groups"),
    [
        (advantages, IN_TURN),
        (plain, UNEQUAL),
        slow(reward_pairs, PAIRED),
        slow(siamese, PAIRS_IN_TURN),
        slow(plain, IN_TURN),
    ],
)
def test_halves_of_whole_groups_agree_with_independent_batches(loss: Loss, groups: Tensor) -> None:
    trace, noise_scale = truth(groups, loss)

    meter = by_halves(groups, loss)

    assert meter.measured_steps == 300
    assert meter.sums.mean.noise_trace == pytest.approx(trace, rel=0.12)
    found = meter.noise_scale
    assert found.low < noise_scale < found.high


def test_the_noise_scale_is_in_what_is_counted() -> None:
    """Without their groups, rows that are alike are found to be so."""
    rows = by_halves(IN_TURN, plain, steps=105)
    groups = by_halves(IN_TURN, plain, size=GROUPS, steps=105)
    with pytest.warns(UserWarning, match="The rows of a batch are alike.* `group_fn`"):
        alone = by_halves(IN_TURN, plain, given=False, steps=105).noise_scale

    assert rows.noise_scale.value == pytest.approx(SIZE * groups.noise_scale.value)
    assert (rows.examples, groups.examples) == (105 * ROWS, 105 * GROUPS)
    assert not alone.resolved


@pytest.mark.parametrize("groups", [None, [0, 0, 0, 1, 2, 2, 3, 3]])
def test_what_a_loss_was_divided_by_is_taken_out(groups: list[int] | None) -> None:
    """As in the short last window of an epoch."""
    shown = []
    for divisor in (1.0, 4.0):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        meter = NoiseScaleMeter(model, every_n_steps=1)
        meter.backward(model(torch.randn(8, 3)).square().mean() / divisor, 8, row_groups=groups)
        meter.step(loss_divisor=divisor)
        shown.append((meter.sums.mean.grad_sq_norm, meter.sums.mean.noise_trace))
    assert shown[1] == pytest.approx(shown[0])


# Which rows may act on each other


def said(loss: Loss, groups: Any, model: nn.Module | None = None) -> str:
    model = model or network()
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(2):
            model.zero_grad()
            meter.backward(loss(model(drawn(IN_TURN, seed))), ROWS, row_groups=groups)
            meter.step()
    assert meter.measured_steps == (2 if meter.not_measured is None else 0)
    return "".join(str(one.message) for one in told)


def margin_of_parts(z: Tensor) -> Tensor:
    better, worse = z[:, 0].chunk(2)
    return F.margin_ranking_loss(better, worse, torch.ones_like(better), 0.5)


def attention_within(z: Tensor) -> Tensor:
    z = z.view(GROUPS, SIZE, -1)
    return ((z @ z.transpose(1, 2)).softmax(-1) @ z).square().mean()


IN_PAIRS = torch.arange(ROWS).view(-1, 2)
ACTING: dict[str, tuple[Loss, Tensor, Tensor]] = {
    "reward pairs": (reward_pairs, PAIRED, IN_TURN),
    "margin of parts": (margin_of_parts, PAIRED, IN_TURN),
    "siamese": (siamese, PAIRS_IN_TURN, PAIRED),
    # Piecewise linear: no derivative shows it.
    "margin": (lambda z: F.relu(1 - (z[0::2] - z[1::2])[:, 0]).mean(), IN_TURN, PAIRED),
    "margin of chosen": (
        lambda z: (z[IN_PAIRS[:, 0]] - z[IN_PAIRS[:, 1]]).abs().mean(), IN_TURN, PAIRED,
    ),
    "attention within": (attention_within, IN_TURN, PAIRED),
    "best of group": (
        lambda z: z[:, 0].view(GROUPS, SIZE).softmax(1).square().mean(), IN_TURN, PAIRS_IN_TURN,
    ),
}  # fmt: skip


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = network(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).view(GROUPS, SIZE, 3)
        return self.last(z + z.mean(1, keepdim=True)).flatten(0, 1)


ACTING["in the network"] = (plain, IN_TURN, PAIRED)


@pytest.mark.parametrize("name", ACTING)
def test_rows_may_act_on_each_other_within_groups_alone(name: str) -> None:
    loss, within, across = ACTING[name]
    make = Mixing if name == "in the network" else network

    assert said(loss, within, make()) == ""
    assert "nothing to measure" in said(loss, across, make())
    assert "nothing to measure" in said(loss, None, make())


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: F.cross_entropy(z @ z.T, torch.arange(ROWS)),
        lambda z: (z[:, 0].exp().cumsum(0).log() - z[:, 0]).mean(),
        lambda z: ((z - z.mean(0)) / z.std(0)).pow(4).mean(),
    ],
    ids=["contrastive", "Cox", "normalized over the batch"],
)
def test_groups_that_act_on_each_other_are_not_measured(loss: Loss) -> None:
    assert "nothing to measure" in said(loss, IN_TURN)


def test_what_holds_for_groups_is_not_taken_for_rows() -> None:
    """A graph that was proved with groups is proved again without them."""
    model = network()
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for groups in (PAIRED, None, None):  # the second looks for another cut
            model.zero_grad()
            meter.backward(reward_pairs(model(drawn(IN_TURN, 0))), ROWS, row_groups=groups)
            meter.step()
        assert meter.measured_steps == 1
    assert "rows that do not act on one another" in str(told[0].message)


# Bad groups


@pytest.mark.parametrize(("counted", "measured"), [(3, 0), (7, 1)])
def test_groups_without_a_loss_leave_a_step_out(counted: int, measured: int) -> None:
    model = network()
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1)
    loss = (model(drawn(IN_TURN, 0)).square().mean(1) * (counted > IN_TURN)).mean()
    meter.backward(loss, ROWS, row_groups=IN_TURN)
    meter.step()
    with nullcontext() if measured else pytest.warns(UserWarning, match="have no loss"):
        assert meter.measured_steps == measured


def test_groups_that_have_no_halves_are_not_measured() -> None:
    """Of another number of rows, or one group alone."""
    assert "one group for each of the 32 rows" in said(plain, [0, 1, 2])
    model = network()
    meter = NoiseScaleMeter(model, every_n_steps=1)
    meter.backward(plain(model(drawn(IN_TURN, 0))), ROWS, row_groups=["a"] * ROWS)
    with pytest.warns(UserWarning, match="A batch of one group"):
        meter.step()
    assert meter.measured_steps == 0


def test_what_is_no_group_for_each_row_is_refused() -> None:
    for groups in (3, torch.tensor(1), torch.zeros(4, 2), [[1]], [1.0, math.nan], ["a", None]):
        with refused("row_groups", requirement="one group for each row"):
            NoiseScaleMeter(network()).backward(torch.ones(()), 4, row_groups=groups)
    meter = NoiseScaleMeter(network(), small_batch="micro_batch")
    with refused("row_groups", requirement='None with `small_batch="micro_batch"`'):
        meter.backward(torch.ones(()), 4, row_groups=[0, 0, 1, 1])


def test_groups_are_told_apart_by_any_names() -> None:
    for groups in ([7, 7, 2, 2], ["b", "b", "a", "a"], torch.tensor([1, 1, 0, 0])):
        found = checked_row_groups(groups)
        assert (found.of_rows.tolist(), found.number) == ([0, 0, 1, 1], 2)
