# SPDX-License-Identifier: Apache-2.0
"""Trainings of other people's models, recorded: what each step measures, and the truth at looks.

At every step the two halves of the batch are compared, as `small_batch="half"` does. At a look the
noise scale of the last 40 steps is taken from independent batches at the weights of each of them.
Batches are drawn with replacement, so that tr(Σ)/|G|² is that of the data itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.lib.workloads import DATA, digits, mnist

BATCH_SIZE = 64
AVERAGED = 40
"""Steps before a look whose noise scale is the truth there."""
TRUTH_BATCH_SIZE = 32
"""Of each of the independent batches that give the exact moments at the weights of one step."""
LOOKS = {1_500: (200, 400, 800, 1_500), 6_000: (3_200, 4_500, 6_000)}
"""Steps of a run -> the steps after which it is looked at. The last look is the run's end."""


@dataclass(frozen=True)
class Recorded:
    """A run: its steps, and the exact moments around its looks."""

    noise_trace: NDArray[np.float64]
    """tr(Σ) of each step, from halves; may be negative. Shape (steps,)."""
    grad_sq_norm: NDArray[np.float64]
    """|G|² of each step, from halves; may be negative. Shape (steps,)."""
    truth: NDArray[np.float64]
    """At each look tr(Σ)/|G|² of its last 40 steps. Shape (looks,)."""
    truth_error: NDArray[np.float64]
    """Standard errors of the truth, relative. Shape (looks,)."""


@dataclass(frozen=True)
class Workload:
    name: str
    origin: str
    """Whose model and settings these are."""
    data: Callable[[], tuple[Tensor, Tensor]]
    """All rows: inputs and targets."""
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """The mean over the rows of a batch."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    cosine: bool = False
    """Whether the learning rate falls to zero on a cosine; else it is constant."""
    lengths: tuple[int, ...] = (1_500,)
    """Steps of its runs."""
    truth_batches: int = 32
    """Independent batches at the weights of one step."""


def record(workload: Workload, steps: int, seed: int) -> Recorded:
    """Train once, and record."""
    torch.manual_seed(seed)
    model = workload.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = workload.optimizer(parameters)
    schedule = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if workload.cosine else None
    )
    inputs, targets = workload.data()
    generator = torch.Generator().manual_seed(1_000 + seed)

    def gradient(rows: int) -> Tensor:
        chosen = torch.randint(len(inputs), (rows,), generator=generator)
        loss = workload.loss(model, inputs[chosen], targets[chosen])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    moments = np.empty((steps, 2))
    exact: list[tuple[float, float, float]] = []
    truths = []
    for step in range(1, steps + 1):
        if any(0 <= look - step < AVERAGED for look in LOOKS[steps]):
            exact.append(exact_moments(gradient, workload.truth_batches))
        halves = [gradient(BATCH_SIZE // 2) for _ in range(2)]
        of_noise = sq_norm(halves[0] - halves[1]) / 4
        mean = (halves[0] + halves[1]) / 2
        moments[step - 1] = BATCH_SIZE * of_noise, sq_norm(mean) - of_noise
        for p, g in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if step in LOOKS[steps]:
            truths.append(averaged(exact))
            exact = []
    of_looks = np.array(truths)
    return Recorded(*moments.T, *of_looks.T)


def exact_moments(gradient: Callable[[int], Tensor], batches: int) -> tuple[float, float, float]:
    """tr(Σ), |G|² and the variance of |G|², from independent batches at one step's weights.

    With mₖ the mean of the first k gradients, |G|² is a mean of uncorrelated terms gₖ·mₖ₋₁.
    """
    mean, spread, dots = gradient(TRUTH_BATCH_SIZE), 0.0, []
    for k in range(2, batches + 1):
        g = gradient(TRUTH_BATCH_SIZE)
        dots.append(float(torch.dot(g.double(), mean.double())))
        spread += sq_norm(g - mean) * (k - 1) / k
        mean = mean + (g - mean) / k
    weight = np.arange(1, batches)
    weight = weight / weight.sum()
    signal = float(weight @ dots)
    variance = float(weight**2 @ (np.array(dots) - signal) ** 2)
    return TRUTH_BATCH_SIZE * spread / (batches - 1), signal, variance


def averaged(exact: list[tuple[float, float, float]]) -> tuple[float, float]:
    """The ratio of the moments' means over steps, and its relative standard error."""
    noise, signal, variance = np.array(exact).T
    return noise.sum() / signal.sum(), math.sqrt(variance.sum()) / abs(signal.sum())


def sq_norm(x: Tensor) -> float:
    return float(x.double().square().sum())


# --- other people's models -----------------------------------------------------------------------


@cache
def words() -> tuple[Tensor, Tensor]:
    """Sequences of 16 of Shakespeare's words and the words that follow them; rare words are one."""
    text = (DATA / "tinyshakespeare/input.txt").read_text().split()
    counts: dict[str, int] = {}
    for word in text:
        counts[word] = counts.get(word, 0) + 1
    known = sorted(counts, key=lambda word: -counts[word])[:999]
    code = {word: index + 1 for index, word in enumerate(known)}
    codes = torch.tensor([code.get(word, 0) for word in text])
    windows = codes.unfold(0, 17, 1)
    return windows[:, :-1], windows[:, 1:]


@cache
def characters() -> tuple[Tensor, Tensor]:
    """Sequences of 32 of Shakespeare's characters and the characters that follow them."""
    text = (DATA / "tinyshakespeare/input.txt").read_text()
    code = {character: index for index, character in enumerate(sorted(set(text)))}
    windows = torch.tensor([code[character] for character in text]).unfold(0, 33, 1)
    return windows[:, :-1], windows[:, 1:]


@cache
def letters() -> tuple[Tensor, Tensor]:
    """Three letters of one of Shakespeare's words and the letter that follows; 0 is no letter."""
    text = (DATA / "tinyshakespeare/input.txt").read_text().lower().split()
    rows = []
    for word in sorted({word for word in text if word.isascii() and word.isalpha()}):
        before = [0, 0, 0]
        for letter in [*(ord(c) - 96 for c in word), 0]:
            rows.append((*before, letter))
            before = [*before[1:], letter]
    table = torch.tensor(rows)
    return table[:, :3], table[:, 3]


def lightning_transformer() -> nn.Module:
    from lightning.pytorch.demos import Transformer

    return Transformer(vocab_size=1_000, ninp=64, nhid=64, dropout=0.0)


def loss_of_lightning_transformer(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.nll_loss(model(x, y), y.flatten())


def pytorch_tutorial_net() -> nn.Module:
    """For images of 28 x 28 pixels with one channel: 256 features where the tutorial has 400."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def makemore_mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Embedding(27, 10), nn.Flatten()),
        *(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 27)),
    )


def hugging_face_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 65, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout))


def loss_of_hugging_face(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


def lightning_backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10), nn.ReLU())


def lightning_autoencoder() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 3)),
        *(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 784)),
    )


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def reconstruction(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), x)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "words",
            "Lightning's demo Transformer, AdamW",
            words,
            lightning_transformer,
            loss_of_lightning_transformer,
            lambda p: torch.optim.AdamW(p, lr=1e-3),
            truth_batches=12,
        ),
        Workload(
            "cnn",
            "PyTorch's tutorial network, SGD with momentum",
            lambda: mnist()[0],
            pytorch_tutorial_net,
            cross_entropy,
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            lengths=(1_500, 6_000),
        ),
        Workload(
            "letters",
            "makemore's MLP, SGD",
            letters,
            makemore_mlp,
            cross_entropy,
            lambda p: torch.optim.SGD(p, lr=0.1),
            lengths=(1_500, 6_000),
        ),
        Workload(
            "characters",
            "Hugging Face's GPT-2, AdamW, cosine",
            characters,
            hugging_face_gpt2,
            loss_of_hugging_face,
            lambda p: torch.optim.AdamW(p, lr=1e-3),
            cosine=True,
            truth_batches=12,
        ),
        Workload(
            "autoencoder",
            "Lightning's autoencoder, Adam, cosine",
            lambda: mnist()[0],
            lightning_autoencoder,
            reconstruction,
            lambda p: torch.optim.Adam(p, lr=1e-3),
            cosine=True,
            lengths=(1_500, 6_000),
        ),
        Workload(
            "digits",
            "Lightning's backbone classifier on scikit-learn's digits, SGD with momentum, cosine",
            lambda: digits()[0],
            lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
            cross_entropy,
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            cosine=True,
            lengths=(1_500, 6_000),
        ),
        Workload(
            "backbone",
            "Lightning's backbone classifier, Adam",
            lambda: mnist()[0],
            lightning_backbone,
            cross_entropy,
            lambda p: torch.optim.Adam(p, lr=1e-3),
        ),
    )
}
