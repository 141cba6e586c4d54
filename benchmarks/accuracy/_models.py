# SPDX-License-Identifier: Apache-2.0
"""Small models that nobody here wrote, or that are trained in ways which trip up measuring.

Each is made by a function without arguments, from a fixed seed. Data are drawn from a generator,
so that batches are independent and every training is repeated exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = Any


@dataclass(frozen=True)
class Setup:
    """A model, and how it is trained."""

    model: nn.Module
    loss: Callable[[Batch], Tensor]
    """Mean over a batch."""
    draw: Callable[[torch.Generator], Batch]
    batch_size: int
    trained: nn.Module | None = None
    """What the optimizer has, where that is not all of the model."""
    left_out: tuple[str, ...] = ()
    """Names of parameters that are not measured."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in (self.trained or self.model).parameters() if p.requires_grad]


def sequences(generator: torch.Generator, batch_size: int, length: int, tokens: int = 64) -> Tensor:
    """A Markov chain's, shape (batch_size, length)."""
    following = torch.softmax(torch.randn(tokens, tokens, generator=seeded(5)) * 2, dim=1)
    x = torch.randint(tokens, (batch_size, 1), generator=generator)
    for _ in range(length - 1):
        x = torch.cat([x, torch.multinomial(following[x[:, -1]], 1, generator=generator)], dim=1)
    return x


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), activation()]
    return nn.Sequential(*layers[:-1])


def tied_gpt2(
    batch_size: int = 16, *, width: int = 32, layers: int = 2, length: int = 24, tokens: int = 64
) -> Setup:
    """Hugging Face's GPT-2: tied embeddings, Conv1D, the loss inside the model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=tokens, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    return Setup(
        model,
        lambda x: model(input_ids=x, labels=x).loss,
        lambda g: sequences(g, batch_size, length, tokens),
        batch_size,
    )


def many_words(batch_size: int) -> Setup:
    """A language model with as many words as GPT-2 has, whose logits are most of what it holds."""
    words, length = 50_257, 32
    model = nn.Sequential(
        nn.Embedding(words, 64),
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
        nn.Linear(64, words, bias=False),
    )
    return Setup(
        model,
        lambda x: F.cross_entropy(model(x).view(-1, words), x.view(-1)),
        lambda g: torch.randint(words, (batch_size, length), generator=g),
        batch_size,
    )


def lightning_transformer(batch_size: int = 16) -> Setup:
    """Lightning's demo: attention modules, and a target that the model reads, too."""
    from pytorch_lightning.demos import Transformer

    model = Transformer(vocab_size=50, ninp=32, nhead=2, nhid=32, nlayers=2, dropout=0.0)

    def loss(x: Tensor) -> Tensor:
        output = model(x[:, :-1], x[:, 1:])
        return F.nll_loss(output.view(-1, 50), x[:, 1:].reshape(-1))

    return Setup(model, loss, lambda g: sequences(g, batch_size, 18, tokens=50), batch_size)


def lstm(batch_size: int = 64) -> Setup:
    """A recurrent one, in which weights are used at each position."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)[0][:, -1])

    def draw(g: torch.Generator) -> Batch:
        x = torch.randn(batch_size, 6, 8, generator=g)
        x[..., :4] += 2 * F.one_hot(torch.randint(4, (batch_size, 1), generator=g), 4)
        return x, x[..., :4].mean(dim=1).argmax(dim=1)

    model = Last()
    return Setup(model, lambda b: F.cross_entropy(model(b[0]), b[1]), draw, batch_size)


def batch_norm(batch_size: int, *, checkpointed: bool = False) -> Setup:
    """Convolutions and BatchNorm: rows of a batch act on each other."""
    body = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    )  # fmt: skip
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    patterns = torch.randn(4, 1, 8, 8, generator=seeded(1))

    def draw(g: torch.Generator) -> Batch:
        y = torch.randint(4, (batch_size,), generator=g)
        return patterns[y] + torch.randn(batch_size, 1, 8, 8, generator=g), y

    def loss(batch: Batch) -> Tensor:
        x, y = batch
        x = checkpoint(body, x, use_reentrant=False) if checkpointed else body(x)
        return F.cross_entropy(head(x), y)

    return Setup(nn.Sequential(body, head), loss, draw, batch_size)


def discriminator(batch_size: int = 32) -> Setup:
    """A GAN's: called twice a step, beside a generator that is not trained then."""
    generator, judge = mlp(8, 32, 16), mlp(16, 32, 1, activation=nn.LeakyReLU)

    def draw(g: torch.Generator) -> Batch:
        real = torch.randn(batch_size, 16, generator=g) + 0.5
        return real, torch.randn(batch_size, 8, generator=g)

    def loss(batch: Batch) -> Tensor:
        real, fake = judge(batch[0]), judge(generator(batch[1]).detach())
        judged = F.binary_cross_entropy_with_logits
        return (judged(real, torch.ones_like(real)) + judged(fake, torch.zeros_like(fake))) / 2

    return Setup(nn.ModuleList([generator, judge]), loss, draw, batch_size, trained=judge)


def two_towers(batch_size: int = 64) -> Setup:
    """A contrastive loss, with a temperature."""
    model = nn.ModuleDict({"one": mlp(20, 32, 16), "other": mlp(20, 32, 16)})
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))

    def draw(g: torch.Generator) -> Batch:
        z = torch.randn(batch_size, 20, generator=g)
        return [z + torch.randn(batch_size, 20, generator=g) for _ in range(2)]

    def loss(batch: Batch) -> Tensor:
        u, v = (F.normalize(model[k](x), dim=1) for k, x in zip(model, batch, strict=True))
        logits = model.get_parameter("scale").exp() * u @ v.T
        right = torch.arange(batch_size)
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2

    return Setup(model, loss, draw, batch_size, left_out=("scale",))


def vae(batch_size: int = 32) -> Setup:
    """An encoder whose output goes into the loss and through a decoder."""
    encoder, decoder = mlp(16, 32, 8), mlp(4, 32, 16)

    def draw(g: torch.Generator) -> Batch:
        common = torch.randn(batch_size, 4, generator=g) @ torch.ones(4, 16)
        x = common + 0.5 * torch.randn(batch_size, 16, generator=g)
        return x, torch.randn(batch_size, 4, generator=g)

    def loss(batch: Batch) -> Tensor:
        x, noise = batch
        mean, log_variance = encoder(x).chunk(2, dim=1)
        decoded = decoder(mean + (log_variance / 2).exp() * noise)
        prior = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        return ((decoded - x).square().sum(dim=1) + prior).mean()

    return Setup(nn.ModuleList([encoder, decoder]), loss, draw, batch_size)


def encoder_and_decoder(batch_size: int = 32) -> Setup:
    """Both called by the loss: outputs within outputs."""
    encoder, decoder = mlp(16, 32, 8), mlp(8, 32, 16)
    return Setup(
        nn.ModuleList([encoder, decoder]),
        lambda x: F.mse_loss(decoder(encoder(x)), x),
        lambda g: torch.randn(batch_size, 16, generator=g),
        batch_size,
    )


def classified(batch_size: int, extra: Callable[[Tensor, Tensor], Tensor]) -> Setup:
    """A classifier with something more in its loss, that its features go into."""
    body, head = mlp(16, 32, 8), nn.Linear(8, 3)

    def draw(g: torch.Generator) -> Batch:
        x = torch.randn(batch_size, 16, generator=g)
        return x, (x[:, :3] + torch.randn(batch_size, 3, generator=g)).argmax(dim=1)

    def loss(batch: Batch) -> Tensor:
        features = body(batch[0])
        return F.cross_entropy(head(features), batch[1]) + extra(features, batch[0])

    return Setup(nn.ModuleList([body, head]), loss, draw, batch_size)


def activation_penalty() -> Setup:
    return classified(32, lambda z, x: 0.1 * z.norm(dim=1).mean())


def distillation() -> Setup:
    teacher = mlp(16, 32, 8).requires_grad_(False)
    return classified(32, lambda z, x: F.mse_loss(z, teacher(x)))


def mixtral(batch_size: int = 16) -> Setup:
    """Hugging Face's: experts, and a loss of the router over all tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True, max_position_embeddings=32,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    return Setup(
        model,
        lambda x: model(input_ids=x, labels=x).loss,
        lambda g: sequences(g, batch_size, 16),
        batch_size,
    )


def clip(batch_size: int = 32) -> Setup:
    """Hugging Face's: the similarities are made, and judged, inside the model."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    of_both: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "projection_dim": 16,
    }  # fmt: skip
    text = CLIPTextConfig(
        vocab_size=50, max_position_embeddings=8, bos_token_id=0, eos_token_id=49,
        pad_token_id=1, **of_both,
    )  # fmt: skip
    vision = CLIPVisionConfig(image_size=16, patch_size=8, **of_both)
    model = CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    )
    patterns = torch.randn(48, 3, 16, 16, generator=seeded(1))

    def draw(g: torch.Generator) -> Batch:
        words = torch.randint(2, 48, (batch_size, 6), generator=g)
        pixels = patterns[words[:, 0]] + torch.randn(batch_size, 3, 16, 16, generator=g) / 2
        return torch.cat([words, torch.full((batch_size, 1), 49)], dim=1), pixels

    return Setup(
        model,
        lambda b: model(input_ids=b[0], pixel_values=b[1], return_loss=True).loss,
        draw,
        batch_size,
        left_out=("logit_scale",),
    )


def watched_by_wandb() -> Setup:
    """With Weights & Biases' hooks on gradients, which see each backward pass."""
    import wandb

    setup = classified(32, lambda z, x: z.new_zeros(()))
    run = wandb.init(mode="offline", dir="/tmp", settings=wandb.Settings(silent=True))
    run.watch(setup.model, log="gradients", log_freq=10)
    return setup


def soft_dice() -> Setup:
    """A quotient of two sums over the batch, as segmentation is trained with."""
    net = mlp(16, 32, 1)

    def draw(g: torch.Generator) -> Batch:
        x = torch.randn(32, 16, generator=g)
        return x, (x[:, :1] + torch.randn(32, 1, generator=g) > 0.5).float()

    def loss(batch: Batch) -> Tensor:
        p, y = net(batch[0]).sigmoid(), batch[1]
        return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())

    return Setup(net, loss, draw, 32)


def denoiser(batch_size: int = 32) -> Setup:
    """BatchNorm where the statistics depend on which pictures are in the batch."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 1, 1),
    )  # fmt: skip

    def draw(g: torch.Generator) -> Batch:
        one = (batch_size, 1, 1, 1)
        noise = torch.randn(batch_size, 1, 12, 12, generator=g)
        clean = F.avg_pool2d(noise, 5, 1, 2) * 4 * torch.rand(one, generator=g)
        clean = clean + torch.randn(one, generator=g)
        return clean + 0.5 * torch.randn(clean.shape, generator=g), clean

    return Setup(net, lambda b: F.mse_loss(net(b[0]), b[1]), draw, batch_size)


class _OverwritesWhatItSaved(torch.autograd.Function):
    """As losses do that keep their gradient in place of the logits (Liger's, say)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        chance = logits.softmax(dim=1)
        loss = -chance.gather(1, labels[:, None]).log().mean()
        gradient = (chance - F.one_hot(labels, logits.shape[1])) / len(logits)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        gradient.data.mul_(grad)
        result = gradient.clone()
        gradient.data.zero_()
        return result, None


def overwriting_loss(batch_size: int = 32) -> Setup:
    model = mlp(16, 32, 3)

    def draw(g: torch.Generator) -> Batch:
        x = torch.randn(batch_size, 16, generator=g)
        return x, (x[:, :3] + torch.randn(batch_size, 3, generator=g)).argmax(dim=1)

    return Setup(model, lambda b: _OverwritesWhatItSaved.apply(model(b[0]), b[1]), draw, batch_size)


def reentrant_peft(batch_size: int = 16) -> Setup:
    """LoRA on GPT-2 by PEFT, with the reentrant checkpointing that its recipe needs."""
    from peft import LoraConfig, get_peft_model

    plain = tied_gpt2(batch_size)
    plain.model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    plain.model.enable_input_require_grads()  # type: ignore[operator]
    model = get_peft_model(
        plain.model,  # type: ignore[arg-type]
        LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False, lora_dropout=0.0),
    )
    return Setup(model, lambda x: model(input_ids=x, labels=x).loss, plain.draw, batch_size)


def convnext(batch_size: int = 32) -> Setup:
    """Hugging Face's ConvNeXt, small, for pictures of 32 x 32."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    model = ConvNextForImageClassification(
        ConvNextConfig(patch_size=2, depths=[2, 2, 4, 2], hidden_sizes=[48, 96, 192, 384])
    )

    def draw(g: torch.Generator) -> Batch:
        pixels = torch.randn(batch_size, 3, 32, 32, generator=g)
        return pixels, torch.randint(2, (batch_size,), generator=g)

    return Setup(model, lambda b: model(pixel_values=b[0], labels=b[1]).loss, draw, batch_size)


LARGER: dict[str, Callable[[], Setup]] = {
    "GPT-2 of 5 M": lambda: tied_gpt2(8, width=256, layers=6, length=128, tokens=1000),
    "ConvNeXt of 6 M": convnext,
    "50,257 words, 13 M logits": lambda: many_words(8),
    "50,257 words, 26 M logits": lambda: many_words(16),
}
"""For the price of a step alone."""

MODELS: dict[str, Callable[[], Setup]] = {
    "GPT-2, tied": tied_gpt2,
    "Lightning's Transformer": lightning_transformer,
    "LSTM": lstm,
    "BatchNorm, batch 16": lambda: batch_norm(16),
    "BatchNorm, batch 128": lambda: batch_norm(128),
    "discriminator": discriminator,
    "two towers": two_towers,
    "VAE": vae,
    "encoder + decoder": encoder_and_decoder,
    "activation penalty": activation_penalty,
    "distillation": distillation,
    "Mixtral": mixtral,
    "CLIP": clip,
    "wandb.watch": watched_by_wandb,
    "denoiser with BatchNorm": denoiser,
    "soft Dice": soft_dice,
    "BatchNorm, checkpointed": lambda: batch_norm(16, checkpointed=True),
    "overwriting loss": overwriting_loss,
    "PEFT, reentrant": reentrant_peft,
}
