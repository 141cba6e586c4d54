# SPDX-License-Identifier: Apache-2.0
"""Which losses and networks halves measure, and which not, as rows act on each other."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import slow_but
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
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1, backward_twice=True)
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


def said(loss: Loss, dtype: torch.dtype = torch.float32) -> list[str]:
    model, (x, t) = network().to(dtype), (one.to(dtype) for one in drawn(0))
    return measured(model, lambda: loss(model(x), t))


# Losses whose rows act on each other


def mined_triplets(z: Tensor, t: Tensor) -> Tensor:
    distances = torch.cdist(z.detach(), z.detach())
    same = t.argmax(1)[:, None] == t.argmax(1)
    far, near = (distances - 99 * ~same).argmax(1), (distances + 99 * same).argmin(1)
    return F.triplet_margin_loss(z, z[far], z[near])


def prototypes_of_the_batch(z: Tensor, t: Tensor) -> Tensor:
    prototypes = torch.stack([z[k::CLASSES].mean(0) for k in range(CLASSES)])
    distances = (z[:, None] - prototypes).square().sum(2)
    return F.cross_entropy(-distances, torch.arange(ROWS) % CLASSES)


def ranknet(z: Tensor, t: Tensor) -> Tensor:
    i, j = torch.triu_indices(ROWS, ROWS, 1)
    return F.softplus((z[j, 0] - z[i, 0]) * (t[i, 0] - t[j, 0]).sign()).mean()


def risks(z: Tensor, t: Tensor) -> Tensor:
    """In the order of survival times: a risk set is all that come before."""
    return z[t[:, 0].argsort(descending=True), 0]


def reward_pairs(z: Tensor, t: Tensor) -> Tensor:
    chosen, rejected = z[:, 0].view(-1, 2).unbind(1)
    return -F.logsigmoid(chosen - rejected).mean()


def dice_of(p: Tensor, positive: Tensor, *dim: int, smooth: float = 0) -> Tensor:
    return 1 - 2 * (p * positive).sum(*dim) / (p.sum(*dim) + positive.sum(*dim) + smooth)


def to_means(z: Tensor) -> Tensor:
    return z - z.mean(0)


ACTING: dict[str, Loss] = {
    "Cox": lambda z, t: (risks(z, t).logcumsumexp(0) - risks(z, t)).mean(),
    "Cox by sums": lambda z, t: (risks(z, t).exp().cumsum(0).log() - risks(z, t)).mean(),
    "RankNet": ranknet,
    "siamese, cosine": lambda z, t: -F.cosine_similarity(z[0::2], z[1::2]).mean(),
    "reward pairs, viewed": reward_pairs,
    "mined triplets": mined_triplets,
    "rolled negatives": lambda z, t: F.softplus((z * z.roll(1, 0)).sum(1) - (z * t).sum(1)).mean(),
    "between halves": lambda z, t: F.l1_loss(z[: ROWS // 2], z[ROWS // 2 :]),
    "sorted": lambda z, t: (z[:, 0].sort().values - t[:, 0].sort().values).square().mean(),
    "hardest examples": lambda z, t: (
        F.cross_entropy(z, t.argmax(1), reduction="none").topk(ROWS // 2).values.mean()
    ),
    "largest of the batch": lambda z, t: (z - t).abs().max(),
    "spread": lambda z, t: (2 - z.std(0)).relu().mean(),
    "spread by hand": lambda z, t: (
        (2 - (to_means(z).square().sum(0) / (ROWS - 1) + 1e-4).sqrt()).relu().mean()
    ),
    "dice": lambda z, t: dice_of(z.sigmoid(), (t > 0).float()),
    "entropy of the mean": lambda z, t: z.softmax(1).mean(0).xlogy(z.softmax(1).mean(0)).sum(),
    "prototypes of the batch": prototypes_of_the_batch,
    "relative weights": lambda z, t: (
        (z[:, 0].sigmoid() * (z - t).square().mean(1)).sum() / z[:, 0].sigmoid().sum()
    ),
    "Donsker-Varadhan": lambda z, t: (
        (z[:, 0] * t[:, 0]).mean() - (z[:, 0] * t[:, 1]).exp().mean().log()
    ),
    "correlation": lambda z, t: -F.cosine_similarity(to_means(z[:, 0]), to_means(t[:, 0]), dim=0),
}


IN_SIXTEEN_BITS = ("RankNet", "reward pairs, viewed", "rolled negatives", "spread by hand")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ACTING), *((n, torch.bfloat16) for n in IN_SIXTEEN_BITS)],
)
def test_a_loss_whose_rows_act_on_each_other_is_not_measured(name: str, dtype: torch.dtype) -> None:
    (message,) = said(ACTING[name], dtype)

    assert message.startswith("not measured: The loss must be a mean")


# Losses that must be measured


def losses_of_rows(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.argmax(1), reduction="none")


def focal(z: Tensor, t: Tensor) -> Tensor:
    losses = losses_of_rows(z, t)
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def distilled(z: Tensor, t: Tensor) -> Tensor:
    soft = F.kl_div((z / 2).log_softmax(1), (t / 2).softmax(1), reduction="batchmean")
    return 4 * soft + 0.5 * cross_entropy(z, t)


def clipped_ratio(z: Tensor, t: Tensor) -> Tensor:
    """PPO's, with advantages that no gradient flows through."""
    ratio, advantage = (z[:, 0] - z[:, 0].detach() + 0.1 * t[:, 0]).exp(), t[:, 1]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def in_another_order(z: Tensor, t: Tensor) -> Tensor:
    order = t[:, 0].argsort()
    return F.smooth_l1_loss(z[order], t[order]) + F.l1_loss(z[order][:, :1], z[order][:, 1:2])


def row_by_row(z: Tensor, t: Tensor) -> Tensor:
    return torch.stack([(a - a.roll(1)).abs().sum() for a in (z - t).unbind(0)]).mean()


def cross_entropy(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.argmax(1))


def root_of_the_mean(z: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(z, t).sqrt()


SOUND: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "weighted classes": lambda z, t: (
        F.cross_entropy(z, t.argmax(1), weight=torch.arange(1.0, CLASSES + 1)) * 2.5
    ),
    "smoothed labels": lambda z, t: F.cross_entropy(z, t.argmax(1), label_smoothing=0.1),
    "mean squares": F.mse_loss,
    "absolute": F.l1_loss,
    "Huber": F.huber_loss,
    "hinge": lambda z, t: (1 - z * t.sign()).relu().mean(),
    "quantiles": lambda z, t: torch.maximum(0.9 * (t - z), 0.1 * (z - t)).mean(),
    "binary": lambda z, t: F.binary_cross_entropy_with_logits(
        z, (t > 0).float(), pos_weight=torch.tensor(3.0)
    ),
    "focal": focal,
    "distilled": distilled,
    "Gaussian": lambda z, t: ((z[:, :2] - t[:, :2]).square() / z[:, 2:].exp() + z[:, 2:]).mean(),
    "cosine": lambda z, t: (1 - F.cosine_similarity(z, t)).mean(),
    "dice of rows": lambda z, t: dice_of(z.sigmoid(), (t > 0).float(), 1, smooth=1).mean(),
    "triplets of rows": lambda z, t: F.triplet_margin_loss(z, t, -t),
    "clipped ratio": clipped_ratio,
    "divided by a count": lambda z, t: (
        ((z - t).square() * (t > -0.5)).sum() / (t > -0.5).float().sum()
    ),
    "in another order": in_another_order,
    "row by row": row_by_row,
    "of each other column": lambda z, t: F.softplus(z[:, :1] - z * t).mean(),
    "perplexity": lambda z, t: cross_entropy(z, t).exp(),
    "log of the mean": lambda z, t: 10 * F.mse_loss(z, t).log10(),
    "root of the mean": root_of_the_mean,
    "root and another": lambda z, t: root_of_the_mean(z, t) + cross_entropy(z, t),
    "norm and another": lambda z, t: 0.1 * z.norm() + cross_entropy(z, t),
}


def spread_of_batches(model: nn.Module, loss: Loss, batches: int = 1000) -> float:
    """tr(Σ) by the gradients of independent batches."""
    parameters = dict(model.named_parameters())

    def value(parameters: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, parameters, (x,)), t)

    x, t = drawn(1, batches * ROWS)
    of_batches = torch.func.vmap(torch.func.grad(value), (None, 0, 0))
    gradients = of_batches(parameters, x.view(batches, ROWS, -1), t.view(batches, ROWS, -1))
    return ROWS * sum(float(one.detach().var(0).sum()) for one in gradients.values())


@pytest.mark.parametrize("name", SOUND)
def test_a_loss_that_halves_show_right_is_measured(name: str) -> None:
    assert said(SOUND[name]) == []


@pytest.mark.parametrize("name", slow_but(SOUND, "cross-entropy", "root and another"))
def test_halves_show_the_noise_of_independent_batches(name: str) -> None:
    model, batches, loss = network(), 100, SOUND[name]
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=1, window=batches)
    for seed in range(2, 2 + batches):
        x, t = drawn(seed)
        model.zero_grad()
        meter.backward(loss(model(x), t), ROWS)
        meter.step()
    meter.close()

    assert meter.measured_steps == batches
    assert meter.sums.mean.noise_trace == pytest.approx(spread_of_batches(model, loss), rel=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "name",
    ["cross-entropy", "focal", "perplexity", "root of the mean", "root and another",
     "log of the mean"],
)  # fmt: skip
def test_rounding_is_not_taken_for_other_rows(name: str, dtype: torch.dtype) -> None:
    model, (x, t), loss = network().to(dtype), drawn(0), SOUND[name]

    assert said(loss, dtype) == []
    assert measured(model, lambda: loss(model(x.to(dtype)).float(), t)) == []


# Networks


class Net(nn.Module):
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


def normalized_when_run_again(net: Net, h: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        net.seen += 1
        return (h - h.mean(0)).tanh()

    return checkpoint(block, h, use_reentrant=False)


MIXING: dict[str, Callable[..., Tensor]] = {
    "normalized by hand": lambda net, h: (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt(),
    "normalized when run again": normalized_when_run_again,
    # As in the discriminators of ProGAN and StyleGAN.
    "with its spread over the batch": lambda net, h: h + h.std(0).mean().expand(len(h), 1),
    "attending to the batch": lambda net, h: h + net.attention(h, h, h)[0],
    "with its neighbour": lambda net, h: h + 0.1 * h.roll(1, 0),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_network_that_mixes_rows_is_not_measured(name: str) -> None:
    model, (x, t) = Net(MIXING[name]), drawn(0)

    (message,) = measured(model, lambda: F.mse_loss(model(x), t))

    assert message.startswith("not measured: The rows of a batch must")
    assert "by its derivative: " in message
    # Once in the forward pass, and once in the training's own backward pass.
    assert model.seen == 2 * (name == "normalized when run again")


def with_positions(net: Net, h: Tensor) -> Tensor:
    """As many as there are rows."""
    h = h[:, None] + net.table(torch.arange(ROWS))
    return (h + net.attention(h, h, h)[0]).mean(1)


def with_positions_of_the_users(net: Net, h: Tensor) -> Tensor:
    h = h[:, None] + net.head.weight.sum() * net.table.weight[: len(h)].sin()[None]
    return net.attention(h, h, h)[0].mean(1)


def positions_in_front(net: Net, h: Tensor) -> Tensor:
    """As many as there are rows."""
    return (h + net.table.weight[:, None]).cumsum(0)


def with_a_sum_over_positions(net: Net, h: Tensor) -> Tensor:
    h = positions_in_front(net, h)
    return h.mean(0) + h[-1]


def looked_up(net: Net, h: Tensor) -> Tensor:
    """In as many prototypes as there are rows."""
    keys = F.normalize(net.table.weight, dim=1)
    return (h @ keys.T).softmax(1) @ keys


APART: dict[str, Callable[..., Tensor]] = {
    "in order of a value": lambda net, h: h[h[:, 0].detach().argsort()],
    "with positions": with_positions,
    "with positions of the user's": with_positions_of_the_users,
    "with positions in front": lambda net, h: (
        positions_in_front(net, h).transpose(0, 1).square().mean(1)
    ),
    "with a sum over positions": with_a_sum_over_positions,
    "looked up": looked_up,
    "with classes of rows": lambda net, h: h * net.table(torch.arange(ROWS) % 3),
    "split in groups": lambda net, h: F.group_norm(h, 2).view(-1, 4).tanh().view(-1, 8),
    "dropped": lambda net, h: checkpoint(F.dropout, h, use_reentrant=False),
}


@pytest.mark.parametrize("name", APART)
def test_a_network_that_leaves_rows_apart_is_measured(name: str) -> None:
    model, (x, t) = Net(APART[name]), drawn(0)

    assert measured(model, lambda: F.mse_loss(model(x), t), steps=2) == []


# What is asked of a loss


def test_what_is_made_of_other_tensors_at_the_cut_counts_once() -> None:
    """What a coder gives at the end is made of what it gives in the middle."""
    model, (x, _) = network(), drawn(0)

    def root_of_both() -> Tensor:
        code = model[0](x)
        return (code.square().mean() + model[1:](code).square().mean()).sqrt()

    def acting_in_the_middle() -> Tensor:
        code = model[0](x)
        return (code[0::2] * code[1::2]).mean() + model[1:](code).square().mean()

    def acting_at_the_end() -> Tensor:
        code = model[0](x)
        out = model[1:](code)
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
    assert said(F.mse_loss) == []
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
    assert said(lambda z, t: Scaled.apply(z, 2.0, z.tanh()).sum(1).square().mean()) == []
    (message,) = said(lambda z, t: Scaled.apply(z, 2.0, z.tanh().roll(1, 0)).mean())
    assert message.startswith("not measured: The loss must be a mean")


def test_a_loss_in_a_checkpoint_has_derivatives() -> None:
    def again(loss: Loss) -> Loss:
        return lambda z, t: checkpoint(loss, z, t, use_reentrant=False)

    assert said(again(focal)) == []
    assert "by its second derivative" in said(again(ACTING["reward pairs, viewed"]))[0]


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
