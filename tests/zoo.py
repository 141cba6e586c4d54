# SPDX-License-Identifier: Apache-2.0
"""Models, batches and Trainers of all kinds, each with what the monitor should make of it.

An entry that was once wrong stays. A new one needs a module, what its batches are unless they are
(x, y), and what is expected of each way of training.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from fits import CLASSES, FEATURES, data
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos import Transformer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

EXAMPLES, BATCH_SIZE, EPOCHS = 40, 4, 2
WORDS, LENGTH, WIDTH = 11, 5, 8


@dataclass(frozen=True)
class Expected:
    """What the monitor should make of a fit."""

    measures: bool | None = True
    """Whether steps enter the averages; None: those of some optimizers do."""
    left_out: int | None = 0
    """Steps of each optimizer that do not; None: any number."""
    warns: tuple[str, ...] = ()
    """A regular expression for each of its warnings, of which there are no others."""


MEASURED = Expected()
ALONE = "one micro-batch in one process has nothing to be compared with: it is not measured"
THAWED = "Parameters have been unfrozen since the fit started"


def told(reason: str) -> Expected:
    """Nothing is measured: one warning says so and why."""
    return Expected(False, None, (f"has nothing to measure.*{reason}",))


def everywhere(expected: Expected) -> dict[str, Any]:
    return dict.fromkeys(("halves", "accumulated"), expected)


@dataclass(frozen=True)
class Entry:
    """A model, its data and its Trainer."""

    module: Callable[[], Any]
    loader: Callable[[], DataLoader[Any]] = field(default_factory=lambda: loader)
    options: Callable[[Path], dict[str, Any]] = field(default_factory=lambda: lambda folder: {})
    """Of the Trainer; the folder is an empty one."""
    halves: Expected = MEASURED
    """In one process, where the halves of each batch are: by default."""
    accumulated: Expected | None = MEASURED
    """In one process that accumulates two batches; None: the module does not let Lightning."""
    ranks: Expected | None = None
    """On two ranks of DDP; None: not tried, to save time."""
    exact: bool = True
    """Whether `p.grad` shows the norms of the micro-batches, without a loss scale."""


class Module(L.LightningModule):
    """Classifies; keeps what it answers in validation."""

    def __init__(self, net: nn.Module | None = None, lr: float = 0.1, logs: bool = True) -> None:
        super().__init__()
        self.net, self.lr, self.logs = net, lr, logs
        self.answers: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.answer(batch), batch[1])

    def answer(self, batch: Any) -> Tensor:
        return self.net(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.logs:
            self.log("loss", loss, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.logs:
            self.log("val_loss", self.loss(batch), batch_size=1)
        return self.answer(batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.answers.append(outputs.detach().clone())

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)


def loader(
    examples: int = EXAMPLES, batch_size: int = BATCH_SIZE, collate: Any = None
) -> DataLoader[Any]:
    """Batches of (x, y), or of what `collate` makes of them."""
    made = None if collate is None else lambda pairs: collate(*default_collate(pairs))
    return DataLoader(data(examples), batch_size, collate_fn=made)


def batches_of(collate: Callable[[Tensor, Tensor], Any]) -> Callable[[], DataLoader[Any]]:
    return lambda: loader(collate=collate)


def with_words(x: Tensor, y: Tensor) -> list[Tensor]:
    """Words for each example, shape (batch, length), and its class."""
    return [(x[:, :LENGTH] * 1e3).long() % WORDS, y]


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), *between, nn.Tanh(), nn.Linear(16, CLASSES))


def of(make: Callable[[], nn.Module], **options: Any) -> Callable[[], Module]:
    return lambda: Module(make(), **options)


# Layers


class Fourier(nn.Module):
    """Complex weights on the frequencies of the input, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = FEATURES // 2 + 1
        self.weight = nn.Parameter(torch.randn(frequencies, dtype=torch.cfloat))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=FEATURES))


class ReZero(nn.Module):
    """A branch behind a gate that starts at zero (Bachlechner et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gate * self.branch(x).tanh())


class Adapter(nn.Module):
    """A frozen linear map plus a trained one of low rank (Hu et al. 2021)."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(features_in, features_out).requires_grad_(False)
        self.down = nn.Linear(features_in, 2, bias=False)
        self.up = nn.Linear(2, features_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora() -> nn.Module:
    layers = Adapter(FEATURES, 16), nn.Tanh(), Adapter(16, CLASSES)
    for layer in (layers[0], layers[2]):
        nn.init.zeros_(layer.up.weight)
    return nn.Sequential(*layers)


def zero_head() -> nn.Module:
    net = mlp()
    nn.init.zeros_(net[-1].weight)
    nn.init.zeros_(net[-1].bias)
    return net


class SparseWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1).tanh() + self.bag(x))


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES)
        self.decode = nn.Linear(FEATURES, FEATURES)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decode(self.encode(x).tanh()))


class Reused(nn.Module):
    """The only layer's weight is used a second time, which only the gradient itself shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.linear(x), self.linear.weight[:CLASSES])


class PartlyUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Recurrent(nn.Module):
    """Over words, packed to different lengths or not."""

    def __init__(self, kind: Any, packed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        sequences: Any = self.embedding(x)
        if self.packed:
            lengths = 1 + x[:, 0] % LENGTH
            sequences = pack_padded_sequence(
                sequences, lengths, batch_first=True, enforce_sorted=False
            )
        _, last = self.recurrent(sequences)
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


class Attention(nn.Module):
    """Over words: torch's module, or queries, keys and values of one's own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = None if own else nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if own else None
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        if self.qkv is not None:
            h = nn.functional.scaled_dot_product_attention(*self.qkv(h).chunk(3, -1))
        else:
            h, _ = self.attention(h, h, h)
        return self.head(h.mean(1))


class Encoder(nn.Module):
    """torch's encoder, which takes a fast path in validation where nothing is hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


class Checkpointed(nn.Module):
    """Its block is run again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, self.first(x).tanh(), use_reentrant=self.reentrant)
        return self.head(h)


class Nested(nn.Module):
    """Layers that give lists of dicts."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)

        def forward(self, x: Tensor) -> list[Any]:
            return [{"a": self.a(x)}, [[self.b(x)], None]]

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = Nested.Parts(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first, ((second,), _) = self.parts(x)
        return self.head(torch.cat([first["a"], second], 1))


class Scripted(nn.Module):
    """Partly TorchScript, which is not optimized: that depends on what ran before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh()))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.jit.optimized_execution(False):
            return self.head(self.first(x))


# Batches


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class ReadsPairs(Module):
    """From whatever the batch is."""

    def loss(self, batch: Any) -> Tensor:
        x, y = self.pair(batch)
        return cross_entropy(self.net(x), y)

    def answer(self, batch: Any) -> Tensor:
        return self.net(self.pair(batch)[0])

    @staticmethod
    def pair(batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Pair):
            return batch.x, batch.y
        if isinstance(batch[0], dict):
            return tuple(torch.stack([one[key] for one in batch]) for key in ("x", "y"))
        return torch.stack(batch[0]), torch.stack(batch[1])


# Losses and steps


class Contrastive(Module):
    """Two views of every example are found in each other among all others (InfoNCE)."""

    def loss(self, batch: Any) -> Tensor:
        z = nn.functional.normalize(self.net(torch.cat([batch[0], batch[1]])), dim=1)
        n = len(batch[0])
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        return cross_entropy(logits, torch.arange(2 * n).roll(n))


class Regression(Module):
    """Diverges at a large learning rate: nothing bounds its gradient."""

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) - batch[1].to(batch[0])[:, None]).square().mean()


class SometimesNothing(Module):
    """One batch of an epoch has no loss, and one a constant."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            return None
        if batch_idx == 5:
            return torch.zeros((), requires_grad=True)
        return self.loss(batch)


class Thaws(Module):
    """Its first layer is frozen in the first epoch, its second one after it."""

    def __init__(self) -> None:
        super().__init__(mlp(nn.Linear(16, 16)))
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.net[0].requires_grad_(True)
            self.net[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Untrained(Module):
    """Nothing to train, no optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.loss(batch).detach())

    def configure_optimizers(self) -> Any:
        return None


class Scheduled(Module):
    """By steps, by epochs and by what is validated."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=9.0)
        return [optimizer], [
            {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.95), "interval": "step"},
            {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.8), "interval": "epoch"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


class Gan(Module):
    """As in Lightning's own example: the discriminator runs twice in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def answer(self, batch: Any) -> Tensor:
        return self.discriminator(self.generator(batch[0][:, :4]))

    def loss(self, batch: Any) -> Tensor:
        return softplus(-self.answer(batch)).mean()

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)  # each rank draws its own noise

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, z = batch[0], torch.randn(len(batch[0]), 4)

        def of_generator() -> Tensor:
            return softplus(-self.discriminator(self.generator(z))).mean()

        def of_discriminator() -> Tensor:
            of_real, of_fake = map(self.discriminator, (x, self.generator(z).detach()))
            return (softplus(-of_real).mean() + softplus(of_fake).mean()) / 2

        losses = of_generator, of_discriminator
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(n.parameters(), lr=1e-3, betas=(0.5, 0.9)) for n in networks], []


# Language models


class Language(Module):
    """The loss is the model's own, over shifted words."""

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    def answer(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch[0]).logits


def gpt2() -> Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 1, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return Language(GPT2LMHeadModel(GPT2Config(**sizes, **tokens, loss_type="ForCausalLM")))


def llama() -> Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=WORDS, num_attention_heads=2, **sizes)
    return Language(LlamaForCausalLM(config))


class Demo(Module):
    """Lightning's own, over words and the words that follow."""

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.nll_loss(self.answer(batch), batch[0][:, 1:].flatten())

    def answer(self, batch: Any) -> Tensor:
        answers = self.net(batch[0][:, :-1], batch[0][:, 1:])
        return answers.reshape(-1, WORDS)


def demo() -> Module:
    return Demo(Transformer(vocab_size=WORDS, ninp=WIDTH, nhead=2, nhid=16, nlayers=1))


def averaging() -> L.Callback:
    """A moving average of the weights, which validation uses; from Lightning 2.6 on."""
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    kind = getattr(callbacks, "WeightAveraging", None)
    return L.Callback() if kind is None else kind(multi_avg_fn=get_ema_multi_avg_fn(0.9))


def stops_and_saves(folder: Path) -> dict[str, Any]:
    save = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
    stop = EarlyStopping("val_loss", patience=0, mode="max")  # it falls: the fit ends early
    return {"callbacks": [save, stop], "enable_checkpointing": True, "max_epochs": 4}


def scaled(folder: Path) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def given(**options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: dict(options)


TEXT = batches_of(with_words)

ZOO: dict[str, Entry] = {
    # Layers
    "plain": Entry(of(mlp), ranks=MEASURED),
    "complex": Entry(of(Fourier), ranks=MEASURED),
    "rezero": Entry(of(ReZero)),
    "lora": Entry(of(lora), ranks=MEASURED),
    "zero head": Entry(of(zero_head)),
    "sparse embeddings": Entry(of(SparseWords), TEXT, ranks=MEASURED),
    "tied": Entry(of(Tied), ranks=MEASURED),
    "reused": Entry(of(Reused)),
    "unused": Entry(of(PartlyUnused), ranks=MEASURED),
    "lstm": Entry(of(lambda: Recurrent(nn.LSTM, packed=False)), TEXT),
    "packed gru": Entry(of(lambda: Recurrent(nn.GRU, packed=True)), TEXT, ranks=MEASURED),
    "attention": Entry(of(lambda: Attention(own=False)), TEXT),
    "own attention": Entry(of(lambda: Attention(own=True)), TEXT),
    "encoder": Entry(of(Encoder), TEXT),
    "batch normalization": Entry(
        of(lambda: mlp(nn.BatchNorm1d(16))),
        halves=told("got a BatchNorm that normalizes over the batch"),
        ranks=MEASURED,
    ),
    "group normalization": Entry(of(lambda: mlp(nn.GroupNorm(2, 16)))),
    "dropout": Entry(of(lambda: mlp(nn.Dropout(0.2))), ranks=MEASURED),
    "checkpointed": Entry(of(lambda: Checkpointed(reentrant=False)), ranks=MEASURED),
    "checkpointed, reentrant": Entry(
        of(lambda: Checkpointed(reentrant=True)), halves=told("use_reentrant=False")
    ),
    "nested outputs": Entry(of(Nested)),
    "scripted": Entry(of(Scripted)),
    "compiled part": Entry(of(lambda: torch.compile(mlp(), backend="eager")), ranks=MEASURED),
    "compiled": Entry(  # with its loss; Lightning 2.6.6 cannot log there (its #21836)
        lambda: torch.compile(Module(mlp(), logs=False), backend="aot_eager"),
        halves=told("got none between the loss and the parameters"),
    ),
    # Language models
    "gpt2": Entry(gpt2, TEXT),
    "llama": Entry(llama, TEXT, ranks=MEASURED),
    "lightning's transformer": Entry(demo, TEXT),
    # Batches
    "list of examples": Entry(
        lambda: ReadsPairs(mlp()),
        batches_of(lambda x, y: [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]),
    ),
    "lists of columns": Entry(
        lambda: ReadsPairs(mlp()),
        batches_of(lambda x, y: [list(x), list(y)]),
        **everywhere(told("`batch_size_fn` must be given")),
    ),
    "dataclass": Entry(lambda: ReadsPairs(mlp()), batches_of(Pair), ranks=MEASURED),
    "one example": Entry(
        of(mlp),
        lambda: loader(20, 1),
        halves=Expected(False, 40, ("A batch of 1 has no halves to compare",)),
        ranks=MEASURED,
    ),
    "short last batch": Entry(of(mlp), lambda: loader(42)),
    # Losses and steps
    "contrastive": Entry(
        lambda: Contrastive(mlp()),
        batches_of(lambda x, y: [x, x + 0.1]),
        halves=told("got none between the loss and the parameters"),
        ranks=MEASURED,
    ),
    "sometimes nothing": Entry(
        lambda: SometimesNothing(mlp()),
        halves=Expected(left_out=4),
        accumulated=Expected(left_out=None),
    ),
    "gan": Entry(
        Gan,
        halves=Expected(None, None, ("not measure the gradients of optimizer 0: .* BatchNorm",)),
        accumulated=None,
        ranks=MEASURED,
    ),
    "thaws": Entry(
        Thaws,
        options=given(max_epochs=3),
        halves=Expected(warns=(THAWED,)),
        accumulated=Expected(warns=(THAWED,)),
    ),
    "nothing to train": Entry(
        lambda: Untrained(mlp()),
        **everywhere(Expected(False, warns=("must return the optimizers that step, got none",))),
    ),
    "schedulers": Entry(lambda: Scheduled(mlp()), ranks=MEASURED),
    "averaged weights": Entry(
        of(mlp), options=lambda folder: {"callbacks": [averaging()]}, ranks=MEASURED
    ),
    "clipping": Entry(of(mlp), options=given(gradient_clip_val=0.05), ranks=MEASURED),
    "stops and saves": Entry(of(mlp), options=stops_and_saves),
    # Precision
    "float64": Entry(of(mlp), options=given(precision="64-true")),
    "diverging in float64": Entry(
        lambda: Regression(nn.Linear(FEATURES, 1), lr=1e12),
        options=given(precision="64-true"),
        **everywhere(Expected(left_out=None)),
    ),
    "diverging": Entry(
        lambda: Regression(nn.Linear(FEATURES, 1), lr=1e4),
        halves=Expected(left_out=15),
        accumulated=Expected(left_out=5),
        ranks=Expected(left_out=5),
    ),
    "bf16-mixed": Entry(of(mlp), options=given(precision="bf16-mixed")),
    "16-mixed": Entry(
        of(mlp),
        options=scaled,
        halves=Expected(left_out=8),
        accumulated=Expected(left_out=3),
        ranks=Expected(left_out=4),
        exact=False,
    ),
}
