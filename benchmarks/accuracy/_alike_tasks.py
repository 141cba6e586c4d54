# SPDX-License-Identifier: Apache-2.0
"""Small trainings whose rows are independent draws, and such whose rows share a draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


class Task(NamedTuple):
    """A training: `draw(rows, generator, step)` gives a batch, `loss(model, batch)` its loss."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


CLASSES, FEATURES = 10, 32
_FIXED = torch.Generator().manual_seed(1)
_CENTRES = torch.randn(CLASSES, FEATURES, generator=_FIXED)
_TEACHER = torch.randn(FEATURES, 8, generator=_FIXED) / FEATURES**0.5
_TABLE = torch.randn(200, FEATURES, generator=_FIXED)
_CHAIN = torch.softmax(2 * torch.randn(24, 24, generator=_FIXED), 1)
_STORED = 4096
_STORED_LABELS = torch.randint(CLASSES, (_STORED,), generator=_FIXED)
_STORED_X = _CENTRES[_STORED_LABELS] + 2 * torch.randn(_STORED, FEATURES, generator=_FIXED)


def mlp(inputs: int = FEATURES, outputs: int = CLASSES, drop: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.Tanh(),
        nn.Dropout(drop),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )


def labelled(rows: int, g: torch.Generator, labels: Tensor | None = None) -> Batch:
    if labels is None:
        labels = torch.randint(CLASSES, (rows,), generator=g)
    return _CENTRES[labels] + 2 * torch.randn(rows, FEATURES, generator=g), labels


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def regress(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def of_teacher(rows: int, g: torch.Generator, step: int) -> Batch:
    x = torch.randn(rows, FEATURES, generator=g)
    return x, (x @ _TEACHER).tanh() + 0.3 * torch.randn(rows, 8, generator=g)


def noisy_labels(rows: int, g: torch.Generator, step: int) -> Batch:
    x, labels = labelled(rows, g)
    wrong = torch.rand(rows, generator=g) < 0.3
    return x, torch.where(wrong, torch.randint(CLASSES, (rows,), generator=g), labels)


def stored(rows: int, g: torch.Generator, step: int) -> Batch:
    at = torch.randint(_STORED, (rows,), generator=g)
    return _STORED_X[at], _STORED_LABELS[at]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 8, 5, 2),
            nn.ReLU(), nn.Flatten(), nn.Linear(112, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x[:, None])
        assert isinstance(out, Tensor)
        return out


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(FEATURES, 16), mlp(8, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.encoder(x).chunk(2, 1)
        out = self.decoder(mean + log.exp() * torch.randn_like(mean))
        kl = (mean.square() + (2 * log).exp() - 2 * log - 1).sum(1) / 2
        loss = (out - x).square().sum(1) + kl
        assert isinstance(loss, Tensor)
        return loss.mean()


class Chars(nn.Module):
    """A transformer or an LSTM on a Markov chain of 24 letters."""

    def __init__(self, *, recurrent: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 32)
        self.body: nn.Module = nn.LSTM(32, 32, batch_first=True)
        if not recurrent:
            self.body = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.body, nn.LSTM):
            return self.head(self.body(self.embed(x))[0])  # type: ignore[no-any-return]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.body(self.embed(x), src_mask=mask))  # type: ignore[no-any-return]


def chain(rows: int, g: torch.Generator, step: int) -> Batch:
    letters = [torch.randint(24, (rows,), generator=g)]
    for _ in range(12):
        letters.append(torch.multinomial(_CHAIN[letters[-1]], 1, generator=g)[:, 0])
    words = torch.stack(letters, 1)
    return words[:, :-1], words[:, 1:]


def next_letter(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


def flow(rows: int, g: torch.Generator, step: int) -> Batch:
    """A straight line from noise to data, each row at a time of its own."""
    noise, (data, _) = torch.randn(rows, FEATURES, generator=g), labelled(rows, g)
    return noise, data, torch.rand(rows, 1, generator=g)


def velocity(model: nn.Module, batch: Batch) -> Tensor:
    noise, data, time = batch
    at = torch.cat([(1 - time) * noise + time * data, time.expand(len(noise), 1)], 1)
    return F.mse_loss(model(at), data - noise)


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.contexts = nn.Embedding(200, 16), nn.Embedding(200, 16)

    def forward(self, word: Tensor, near: Tensor, negatives: Tensor) -> Tensor:
        at = self.words(word)
        right = (at * self.contexts(near)).sum(1)
        wrong = torch.einsum("rd,rnd->rn", at, self.contexts(negatives))
        loss = F.softplus(-right) + F.softplus(wrong).sum(1)
        assert isinstance(loss, Tensor)
        return loss.mean()


def pairs_of_words(rows: int, g: torch.Generator, step: int) -> Batch:
    word = torch.randint(200, (rows,), generator=g)
    near = (word + torch.randint(1, 6, (rows,), generator=g)) % 200
    return word, near, torch.randint(200, (rows, 5), generator=g)


def masked(rows: int, g: torch.Generator, step: int) -> Batch:
    x, _ = labelled(rows, g)
    return x, (torch.rand(rows, FEATURES, generator=g) < 0.5).float()


def fill_in(model: nn.Module, batch: Batch) -> Tensor:
    x, mask = batch
    return ((model(x * mask) - x) * (1 - mask)).square().mean()


SOUND = [
    Task("classes", mlp, lambda rows, g, step: labelled(rows, g), classify),
    Task("dropout", lambda: mlp(drop=0.3), lambda rows, g, step: labelled(rows, g), classify),
    Task("noisy labels", mlp, noisy_labels, classify),
    Task("a stored set", mlp, stored, classify),
    Task("linear", lambda: nn.Linear(FEATURES, CLASSES), stored, classify),
    Task("teacher", lambda: mlp(outputs=8), of_teacher, regress),
    Task("convolutions", ConvNet, lambda rows, g, step: labelled(rows, g), classify),
    Task(
        "autoencoder",
        lambda: mlp(outputs=FEATURES),
        lambda r, g, s: (labelled(r, g)[0],) * 2,
        regress,
    ),
    Task("vae", Vae, lambda rows, g, step: labelled(rows, g), lambda m, b: m(b[0])),
    Task("transformer", lambda: Chars(recurrent=False), chain, next_letter),
    Task("lstm", lambda: Chars(recurrent=True), chain, next_letter),
    Task("flow matching", lambda: mlp(FEATURES + 1, FEATURES), flow, velocity),
    Task("skip-gram", SkipGram, pairs_of_words, lambda m, b: m(*b)),
    Task("masked", lambda: mlp(outputs=FEATURES), masked, fill_in),
]


# Rows that share a draw


def one_class(rows: int, g: torch.Generator, step: int) -> Batch:
    return labelled(rows, g, torch.randint(CLASSES, (1,), generator=g).expand(rows).clone())


def chunks(rows: int, g: torch.Generator, step: int) -> Batch:
    """Four neighbours of each example that is drawn, as frames of a video are."""
    x, labels = labelled(max(rows // 4, 1), g)
    x, labels = x.repeat_interleave(4, 0)[:rows], labels.repeat_interleave(4)[:rows]
    return x + 0.3 * torch.randn(x.shape, generator=g), labels


def one_time(rows: int, g: torch.Generator, step: int) -> Batch:
    noise, data, time = flow(rows, g, step)
    return noise, data, time[:1].expand(rows, 1)


def shared_negatives(rows: int, g: torch.Generator, step: int) -> Batch:
    word, near, negatives = pairs_of_words(rows, g, step)
    return word, near, negatives[:1].expand(rows, 5)


def one_mask(rows: int, g: torch.Generator, step: int) -> Batch:
    x, mask = masked(rows, g, step)
    return x, mask[:1].expand(rows, FEATURES)


def mixup(rows: int, g: torch.Generator, step: int) -> Batch:
    x, labels = labelled(rows, g)
    share = float(torch.rand(1, generator=g))
    other = torch.randperm(rows, generator=g)
    target = F.one_hot(labels, CLASSES).float()
    return share * x + (1 - share) * x[other], share * target + (1 - share) * target[other]


class LayerDrop(nn.Module):
    """Leaves half of its layers out, the same for all rows, from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.generator = torch.Generator().manual_seed(int(torch.randint(10**6, ())))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.layers:
            if float(torch.rand(1, generator=self.generator)) < 0.5:
                x = x + layer(x).tanh()
        out = self.last(x)
        assert isinstance(out, Tensor)
        return out


class Slimmable(LayerDrop):
    """Uses a random share of its width, the same for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        width = 8 * int(torch.randint(1, 9, (1,), generator=self.generator))
        hidden = self.first(x)[:, :width].tanh()
        return F.linear(hidden, self.last.weight[:, :width], self.last.bias)


class Buffered:
    """Draws from a shuffle buffer over runs of 512 neighbours of one class."""

    def __init__(self, size: int) -> None:
        self.size, self.kept, self.run = size, [], 0
        self.class_of_run = 0

    def __call__(self, rows: int, g: torch.Generator, step: int) -> Batch:
        if step == 0:
            self.kept, self.run = [], 0
        labels = []
        for _ in range(rows):
            while len(self.kept) < self.size:
                if self.run % 512 == 0:
                    self.class_of_run = int(torch.randint(CLASSES, (1,), generator=g))
                self.run += 1
                self.kept.append(self.class_of_run)
            at = int(torch.randint(self.size, (1,), generator=g))
            labels.append(self.kept[at])
            self.kept[at] = self.kept[-1]
            self.kept.pop()
        return labelled(rows, g, torch.tensor(labels))


def optimal_pairs(rows: int, g: torch.Generator, step: int) -> Batch:
    """Noise and data of a batch are paired so that lines between them are short."""
    noise, data, time = flow(rows, g, step)
    order = []
    distances = torch.cdist(noise, data)
    for row in range(rows):  # greedily
        nearest = int(distances[row].argmin())
        distances[:, nearest] = float("inf")
        order.append(nearest)
    return noise, data[order], time


UNSOUND = [
    Task("one class a batch", mlp, one_class, classify),
    Task("chunks of four", mlp, chunks, classify),
    Task("one time a batch", lambda: mlp(FEATURES + 1, FEATURES), one_time, velocity),
    Task("shared negatives", SkipGram, shared_negatives, lambda m, b: m(*b)),
    Task("one mask a batch", lambda: mlp(outputs=FEATURES), one_mask, fill_in),
    Task("mixup", mlp, mixup, classify),
    Task("layer drop", LayerDrop, lambda rows, g, step: labelled(rows, g), classify),
    Task("slimmable", Slimmable, lambda rows, g, step: labelled(rows, g), classify),
    Task("buffer of 64", mlp, Buffered(64), classify),
    Task("buffer of 1,000", mlp, Buffered(1000), classify),
    Task("optimal pairs", lambda: mlp(FEATURES + 1, FEATURES), optimal_pairs, velocity),
]
