# SPDX-License-Identifier: Apache-2.0
"""Which losses and networks halves measure, and which not, as rows act on each other."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from noisescale import NoiseScaleMeter
from noisescale.collectors.halves import apart, loss_derivative
from noisescale.collectors.halves.cut import find_cut
from noisescale.collectors.halves.derivatives import LARGEST_SHARE
from noisescale.collectors.halves.graph import Graph
from noisescale.collectors.halves.loss_derivative import share_in_loss

ROWS, WIDTH, CLASSES = 16, 5, 4

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of the model's output, shape (rows, classes), and of targets of the same shape."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def drawn(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, x[:, :CLASSES] + torch.randn(rows, CLASSES, generator=generator)


def measured(model: nn.Module, loss: Callable[[], Tensor], steps: int = 1) -> list[str]:
    """What is said of a few steps, all measured, or why they are not."""
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            meter.backward(loss(), ROWS)
            meter.step()
        if meter.not_measured is not None:
            return [f"not measured: {meter.not_measured}"]
        assert meter.measured_steps == steps
        meter.close()
    return [str(one.message) for one in told]


def said(loss: Loss) -> list[str]:
    model, (x, t) = network(), drawn(0)
    return measured(model, lambda: loss(model(x), t))


# Losses whose rows act on each other


def cox(z: Tensor, t: Tensor) -> Tensor:
    """The partial likelihood of survival times: a risk set for each event."""
    risk = z[t[:, 0].argsort(descending=True), 0]
    events = (t[:, 1] > -1).float()
    return ((risk.logcumsumexp(0) - risk) * events).sum() / events.sum()


def cox_by_sums(z: Tensor, t: Tensor) -> Tensor:
    risk = z[t[:, 0].argsort(descending=True), 0]
    return (risk.exp().cumsum(0).log() - risk).mean()


def ranknet(z: Tensor, t: Tensor) -> Tensor:
    i, j = torch.triu_indices(ROWS, ROWS, 1)
    return F.softplus((z[j, 0] - z[i, 0]) * (t[i, 0] - t[j, 0]).sign()).mean()


def siamese(z: Tensor, t: Tensor) -> Tensor:
    return (F.pairwise_distance(z[0::2], z[1::2]) - 1).square().mean()


def siamese_cosine(z: Tensor, t: Tensor) -> Tensor:
    return -F.cosine_similarity(z[0::2], z[1::2]).mean()


def reward_pairs(z: Tensor, t: Tensor) -> Tensor:
    chosen, rejected = z[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def reward_pairs_viewed(z: Tensor, t: Tensor) -> Tensor:
    chosen, rejected = z[:, 0].view(-1, 2).unbind(1)
    return -F.logsigmoid(chosen - rejected).mean()


def mined_triplets(z: Tensor, t: Tensor) -> Tensor:
    distances = torch.cdist(z.detach(), z.detach())
    same = t.argmax(1)[:, None] == t.argmax(1)
    far, near = (distances - 99 * ~same).argmax(1), (distances + 99 * same).argmin(1)
    return F.triplet_margin_loss(z, z[far], z[near])


def rolled_negatives(z: Tensor, t: Tensor) -> Tensor:
    return F.softplus((z * z.roll(1, 0)).sum(1) - (z * t).sum(1)).mean()


def margin_ranking(z: Tensor, t: Tensor) -> Tensor:
    return F.margin_ranking_loss(z[0::2, 0], z[1::2, 0], torch.ones(ROWS // 2), margin=0.5)


def between_halves(z: Tensor, t: Tensor) -> Tensor:
    return F.l1_loss(z[: ROWS // 2], z[ROWS // 2 :])


def sorted_values(z: Tensor, t: Tensor) -> Tensor:
    return (z[:, 0].sort().values - t[:, 0].sort().values).square().mean()


def hardest_examples(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.argmax(1), reduction="none").topk(ROWS // 2).values.mean()


def largest_of_the_batch(z: Tensor, t: Tensor) -> Tensor:
    return (z - t).abs().max()


def spread(z: Tensor, t: Tensor) -> Tensor:
    return (2 - z.std(0)).relu().mean()


def spread_by_hand(z: Tensor, t: Tensor) -> Tensor:
    centred = z - z.mean(0)
    return (2 - (centred.square().sum(0) / (ROWS - 1) + 1e-4).sqrt()).relu().mean()


def simclr(z: Tensor, t: Tensor) -> Tensor:
    z = F.normalize(z)
    return F.cross_entropy((z @ z.T).fill_diagonal_(-9), torch.arange(ROWS).roll(ROWS // 2))


def dice(z: Tensor, t: Tensor) -> Tensor:
    p, positive = z.sigmoid(), (t > 0).float()
    return 1 - 2 * (p * positive).sum() / (p.sum() + positive.sum())


def entropy_of_the_mean(z: Tensor, t: Tensor) -> Tensor:
    mean = z.softmax(1).mean(0)
    return (mean * mean.log()).sum()


def prototypes_of_the_batch(z: Tensor, t: Tensor) -> Tensor:
    prototypes = torch.stack([z[k::CLASSES].mean(0) for k in range(CLASSES)])
    distances = (z[:, None] - prototypes).square().sum(2)
    return F.cross_entropy(-distances, torch.arange(ROWS) % CLASSES)


def difference_of_means(z: Tensor, t: Tensor) -> Tensor:
    return (z[t[:, 0] > 0].mean(0) - z[t[:, 0] <= 0].mean(0)).square().sum()


def relative_weights(z: Tensor, t: Tensor) -> Tensor:
    weights = z[:, 0].sigmoid()
    return (weights * (z - t).square().mean(1)).sum() / weights.sum()


def donsker_varadhan(z: Tensor, t: Tensor) -> Tensor:
    return (z[:, 0] * t[:, 0]).mean() - (z[:, 0] * t[:, 1]).exp().mean().log()


def correlation(z: Tensor, t: Tensor) -> Tensor:
    return -F.cosine_similarity(z[:, 0] - z[:, 0].mean(), t[:, 0] - t[:, 0].mean(), dim=0)


ACTING = [
    cox, cox_by_sums, ranknet, siamese, siamese_cosine, reward_pairs, reward_pairs_viewed,
    mined_triplets, rolled_negatives, margin_ranking, between_halves, sorted_values,
    hardest_examples, largest_of_the_batch, spread, spread_by_hand, simclr, dice,
    entropy_of_the_mean, prototypes_of_the_batch, difference_of_means, relative_weights,
    donsker_varadhan, correlation,
]  # fmt: skip


@pytest.mark.parametrize("loss", ACTING)
def test_a_loss_whose_rows_act_on_each_other_is_not_measured(loss: Loss) -> None:
    (message,) = said(loss)

    assert message.startswith("not measured: The loss must be a mean over rows that do not act")
    assert "Accumulate two or more micro-batches" in message


# Losses that must be measured


def cross_entropy(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.argmax(1))


def weighted_classes(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.argmax(1), weight=torch.arange(1.0, CLASSES + 1)) * 2.5


def smoothed_labels(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.argmax(1), label_smoothing=0.1)


def mean_squares(z: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(z, t)


def absolute(z: Tensor, t: Tensor) -> Tensor:
    return F.l1_loss(z, t)


def huber(z: Tensor, t: Tensor) -> Tensor:
    return F.huber_loss(z, t)


def log_cosh(z: Tensor, t: Tensor) -> Tensor:
    return (z - t).cosh().log().mean()


def hinge(z: Tensor, t: Tensor) -> Tensor:
    return (1 - z * t.sign()).relu().mean()


def quantiles(z: Tensor, t: Tensor) -> Tensor:
    return torch.maximum(0.9 * (t - z), 0.1 * (z - t)).mean()


def binary(z: Tensor, t: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, (t > 0).float(), pos_weight=torch.tensor(3.0))


def focal(z: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(z, t.argmax(1), reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def distilled(z: Tensor, t: Tensor) -> Tensor:
    hard = F.cross_entropy(z, t.argmax(1))
    soft = F.kl_div((z / 2).log_softmax(1), (t / 2).softmax(1), reduction="batchmean")
    return 4 * soft + 0.5 * hard


def gaussian(z: Tensor, t: Tensor) -> Tensor:
    return ((z[:, :2] - t[:, :2]).square() / z[:, 2:].exp() + z[:, 2:]).mean()


def cosine(z: Tensor, t: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(z, t)).mean()


def dice_of_rows(z: Tensor, t: Tensor) -> Tensor:
    p, positive = z.sigmoid(), (t > 0).float()
    return (1 - 2 * (p * positive).sum(1) / (p.sum(1) + positive.sum(1) + 1)).mean()


def triplets_of_rows(z: Tensor, t: Tensor) -> Tensor:
    return F.triplet_margin_loss(z, t, -t)


def clipped_ratio(z: Tensor, t: Tensor) -> Tensor:
    """PPO's, with advantages that no gradient flows through."""
    ratio, advantage = (z[:, 0] - z[:, 0].detach() + 0.1 * t[:, 0]).exp(), t[:, 1]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def divided_by_a_count(z: Tensor, t: Tensor) -> Tensor:
    mask = (t > -0.5).float()
    return ((z - t).square() * mask).sum() / mask.sum()


def in_another_order(z: Tensor, t: Tensor) -> Tensor:
    order = t[:, 0].argsort()
    return F.smooth_l1_loss(z[order], t[order]) + F.l1_loss(z[order][:, :1], z[order][:, 1:2])


def row_by_row(z: Tensor, t: Tensor) -> Tensor:
    return torch.stack([(a - a.roll(1)).abs().sum() for a in (z - t).unbind(0)]).mean()


def of_each_other_column(z: Tensor, t: Tensor) -> Tensor:
    return F.softplus(z[:, :1] - z * t).mean()


def perplexity(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.argmax(1)).exp()


def log_of_the_mean(z: Tensor, t: Tensor) -> Tensor:
    return 10 * F.mse_loss(z, t).log10()


def root_of_the_mean(z: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(z, t).sqrt()


def root_and_another(z: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(z, t).sqrt() + F.cross_entropy(z, t.argmax(1))


def norm_and_another(z: Tensor, t: Tensor) -> Tensor:
    return 0.1 * z.norm() + F.cross_entropy(z, t.argmax(1))


SOUND = [
    cross_entropy, weighted_classes, smoothed_labels, mean_squares, absolute, huber, log_cosh,
    hinge, quantiles, binary, focal, distilled, gaussian, cosine, dice_of_rows, triplets_of_rows,
    clipped_ratio, divided_by_a_count, in_another_order, row_by_row, of_each_other_column,
    perplexity, log_of_the_mean, root_of_the_mean, root_and_another, norm_and_another,
]  # fmt: skip


def spread_of_batches(model: nn.Module, loss: Loss, batches: int = 1000) -> float:
    """tr(Σ) by the gradients of independent batches."""
    parameters = dict(model.named_parameters())

    def value(parameters: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, parameters, (x,)), t)

    x, t = drawn(1, batches * ROWS)
    of_batches = torch.func.vmap(torch.func.grad(value), (None, 0, 0))
    gradients = of_batches(parameters, x.view(batches, ROWS, -1), t.view(batches, ROWS, -1))
    return ROWS * sum(float(one.detach().var(0).sum()) for one in gradients.values())


@pytest.mark.parametrize("loss", SOUND)
def test_a_loss_that_halves_show_right_is_measured(loss: Loss) -> None:
    model, batches = network(), 100
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1, window=batches)
    for seed in range(2, 2 + batches):
        x, t = drawn(seed)
        model.zero_grad()
        meter.backward(loss(model(x), t), ROWS)
        meter.step()
    meter.close()
    moments = meter.average_moments

    assert meter.measured_steps == batches
    assert moments is not None
    assert moments.noise_trace == pytest.approx(spread_of_batches(model, loss), rel=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "loss", [cross_entropy, focal, perplexity, root_of_the_mean, root_and_another, log_of_the_mean]
)
def test_rounding_is_not_taken_for_other_rows(loss: Loss, dtype: torch.dtype) -> None:
    model, (x, t) = network().to(dtype), drawn(0)

    assert measured(model, lambda: loss(model(x.to(dtype)), t.to(dtype))) == []
    assert measured(model, lambda: loss(model(x.to(dtype)).float(), t)) == []


@pytest.mark.parametrize("loss", [ranknet, reward_pairs_viewed, rolled_negatives, spread_by_hand])
def test_rows_that_act_on_each_other_are_found_in_sixteen_bits(loss: Loss) -> None:
    model, (x, t) = network().to(torch.bfloat16), drawn(0)

    (message,) = measured(model, lambda: loss(model(x.to(torch.bfloat16)), t.to(torch.bfloat16)))

    assert message.startswith("not measured: The loss")


# Networks


class Net(nn.Module):
    """A layer, something in the middle, and a head."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.table = nn.Embedding(ROWS, 8)
        self.middle = middle
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self, self.first(x).tanh()))


def normalized_by_hand(net: Net, h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt()


def normalized_when_run_again(net: Net, h: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        net.seen += 1
        return (h - h.mean(0)).tanh()

    return checkpoint(block, h, use_reentrant=False)


def with_its_spread_over_the_batch(net: Net, h: Tensor) -> Tensor:
    """As in the discriminators of ProGAN and StyleGAN."""
    return h + h.std(0).mean().expand(len(h), 1)


def attending_to_the_batch(net: Net, h: Tensor) -> Tensor:
    return h + net.attention(h, h, h)[0]


def with_its_neighbour(net: Net, h: Tensor) -> Tensor:
    return h + 0.1 * h.roll(1, 0)


@pytest.mark.parametrize(
    "middle",
    [
        normalized_by_hand,
        normalized_when_run_again,
        with_its_spread_over_the_batch,
        attending_to_the_batch,
        with_its_neighbour,
    ],
)
def test_a_network_that_mixes_rows_is_not_measured(middle: Callable[..., Tensor]) -> None:
    model, (x, t) = Net(middle), drawn(0)

    (message,) = measured(model, lambda: F.mse_loss(model(x), t))

    assert message.startswith("not measured: The rows of a batch must not act on one another in ")
    assert "by its derivative: " in message
    # Once in the forward pass, and once in the training's own backward pass.
    assert model.seen == 2 * (middle is normalized_when_run_again)


def in_order_of_a_value(net: Net, h: Tensor) -> Tensor:
    order = h[:, 0].detach().argsort()
    return h[order]


def with_positions(net: Net, h: Tensor) -> Tensor:
    """As many as there are rows."""
    h = h[:, None] + net.table(torch.arange(ROWS))
    return (h + net.attention(h, h, h)[0]).mean(1)


def with_positions_of_the_users(net: Net, h: Tensor) -> Tensor:
    h = h[:, None] + net.head.weight.sum() * net.table.weight[: len(h)].sin()[None]
    return net.attention(h, h, h)[0].mean(1)


def with_positions_in_front(net: Net, h: Tensor) -> Tensor:
    """For a while. As many as there are rows."""
    h = (h + net.table.weight[:, None]).cumsum(0)
    return h.transpose(0, 1).square().mean(1)


def with_a_sum_over_positions(net: Net, h: Tensor) -> Tensor:
    h = (h + net.table.weight[:, None]).cumsum(0)
    return h.mean(0) + h[-1]


def looked_up(net: Net, h: Tensor) -> Tensor:
    """In as many prototypes as there are rows."""
    keys = F.normalize(net.table.weight, dim=1)
    return (h @ keys.T).softmax(1) @ keys


def with_classes_of_rows(net: Net, h: Tensor) -> Tensor:
    return h * net.table(torch.arange(ROWS) % 3)


def split_in_groups(net: Net, h: Tensor) -> Tensor:
    return F.group_norm(h, 2).view(-1, 4).tanh().view(-1, 8)


def dropped(net: Net, h: Tensor) -> Tensor:
    return checkpoint(F.dropout, h, use_reentrant=False)


@pytest.mark.parametrize(
    "middle",
    [
        in_order_of_a_value,
        with_positions,
        with_positions_of_the_users,
        with_positions_in_front,
        with_a_sum_over_positions,
        looked_up,
        with_classes_of_rows,
        split_in_groups,
        dropped,
    ],
)
def test_a_network_that_leaves_rows_apart_is_measured(middle: Callable[..., Tensor]) -> None:
    model, (x, t) = Net(middle), drawn(0)

    assert measured(model, lambda: F.mse_loss(model(x), t), steps=2) == []


# What is asked of a loss


class Coder(nn.Module):
    """What it gives at the end is made of what it gives in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(WIDTH, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def test_what_is_made_of_other_tensors_at_the_cut_counts_once() -> None:
    model, (x, _) = Coder(), drawn(0)

    def root_of_both() -> Tensor:
        code = model.encode(x)
        return (code.square().mean() + model.decode(code).square().mean()).sqrt()

    def acting_in_the_middle() -> Tensor:
        code = model.encode(x)
        return (code[0::2] * code[1::2]).mean() + model.decode(code).square().mean()

    def acting_at_the_end() -> Tensor:
        code = model.encode(x)
        out = model.decode(code)
        return code.square().mean() + (out[0::2] * out[1::2]).mean()

    assert measured(model, root_of_both) == []
    for loss in (acting_in_the_middle, acting_at_the_end):
        assert "(by its second derivative: " in measured(model, loss)[0]


def test_two_rows_that_act_on_each_other_in_a_batch_are_found() -> None:
    """Of few rows each pair is in different parts at least once."""
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, 1), torch.randn(8, WIDTH)
    for i in range(8):
        for j in range(i):
            z = model(x)
            graph = Graph(get_gradient_edge(z.square().mean() + 0.1 * (z[i] * z[j]).sum()))
            outputs = {(z.grad_fn, 0): 0}
            cut = find_cut(graph, 8, outputs, {id(p): k for k, p in enumerate(model.parameters())})

            assert share_in_loss(graph, cut, torch.ones(()), 8) > LARGEST_SHARE


def test_without_a_second_derivative_the_names_of_operations_decide() -> None:
    model, (x, _) = network(), drawn(0)

    def ctc(root: bool) -> Tensor:
        spoken = model(x)[None].expand(3, -1, -1).log_softmax(2)
        words, ones = torch.ones(ROWS, 1).long(), torch.ones(ROWS).long()
        loss = F.ctc_loss(spoken, words, 3 * ones, ones)
        return loss.sqrt() if root else loss.exp()

    (told,) = measured(model, lambda: ctc(root=True))
    (reason,) = measured(model, lambda: ctc(root=False))

    assert "in the names of its operations alone" in told
    assert "_ctc_loss_backward is not implemented" in told
    assert reason.startswith("not measured: The loss must be")
    assert "(Exp of shape ())" in reason


def test_of_too_many_numbers_there_is_no_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain, such as a cross-entropy over many words, is left to names without a word."""
    monkeypatch.setattr(loss_derivative, "MOST_NUMBERS", ROWS * CLASSES - 1)
    monkeypatch.setattr(loss_derivative, "_share_in_loss", None)

    assert said(cross_entropy) == []
    assert said(mean_squares) == []
    (told,) = said(focal)
    assert "alone, without derivatives: it is computed from 64 numbers" in told


class Scaled(torch.autograd.Function):
    """With an argument that is no tensor between two that are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return factor * x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        x, y = ctx.saved_tensors
        return ctx.factor * gradient * y, None, ctx.factor * gradient * x


def test_functions_written_in_python_have_derivatives() -> None:
    def apart_by_hand(z: Tensor, t: Tensor) -> Tensor:
        return Scaled.apply(z, 2.0, z.tanh()).sum(1).square().mean()

    def acting_by_hand(z: Tensor, t: Tensor) -> Tensor:
        return Scaled.apply(z, 2.0, z.tanh().roll(1, 0)).mean()

    assert said(apart_by_hand) == []
    assert "not measured: The loss must be a mean over rows" in said(acting_by_hand)[0]


def test_a_loss_in_a_checkpoint_has_derivatives() -> None:
    def again(loss: Loss) -> Loss:
        return lambda z, t: checkpoint(loss, z, t, use_reentrant=False)

    assert said(again(focal)) == []
    assert "by its second derivative" in said(again(reward_pairs_viewed))[0]


def test_too_little_memory_for_a_second_derivative_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loss_derivative, "_share_in_loss", fails)
    model, (x, t) = network(), drawn(0)

    (told,) = measured(model, lambda: F.mse_loss(model(x), t), steps=2)

    assert "they take too much memory" in told


def test_the_derivatives_of_a_graph_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def counted(*args: Any) -> float:
        taken.append(args)
        return share_in_loss(*args)

    monkeypatch.setattr(apart, "share_in_loss", counted)
    model, (x, t) = network(), drawn(0)

    def past_the_cut() -> Tensor:
        """A penalty whose weight is zero yet, so that every step has to be proved."""
        return F.mse_loss(model(x), t) + 0 * model[0].weight.square().sum()

    assert measured(model, past_the_cut, steps=3) == []
    assert len(taken) == 1
