# SPDX-License-Identifier: Apache-2.0
"""Models for stacked trainings: ours, and two of transformers', which nobody here wrote."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from benchmarks.lib.stacked import Problem, cross_entropy, reconstruction
from benchmarks.lib.workloads import (
    CONTEXT,
    Batch,
    characters,
    convolutions,
    digits,
    mnist,
    perceptron,
    transformer,
)


def images() -> tuple[Batch, Batch]:
    """MNIST's 20,000 images to train on, 1,000 to test with."""
    train, (x, y) = mnist()
    return train, (x[:1000], y[:1000])


def autoencoder() -> nn.Module:
    """Of an image's 784 pixels, by way of 24 numbers."""
    down = nn.Linear(784, 128), nn.GELU(), nn.Linear(128, 24)
    return nn.Sequential(*down, nn.Linear(24, 128), nn.GELU(), nn.Linear(128, 784))


class Logits(nn.Module):
    """A model of transformers' that takes its input by position and returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def llama() -> nn.Module:
    """Transformers' Llama, two layers of width 64 over 65 characters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=65,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        attn_implementation="eager",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Logits(LlamaForCausalLM(config))


class LogitsOfImages(Logits):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (1, 28, 28)))


def vision_transformer() -> nn.Module:
    """Transformers' ViT, two layers of width 48 over 16 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return LogitsOfImages(ViTForImageClassification(config))


_DIGITS = Problem("digits", "examples", digits, lambda: perceptron(64, 64), cross_entropy, ("2",))
_MNIST = Problem("mnist", "examples", images, lambda: perceptron(784, 64), cross_entropy, ("2",))
_CHARACTERS = Problem(
    "characters",
    "sequences",
    characters,
    transformer,
    cross_entropy,
    ("tokens", "positions", "head"),
    most_rows=8_192,
)
PROBLEMS = {
    problem.name: problem
    for problem in (
        _DIGITS,
        _MNIST,
        replace(_MNIST, name="convolutions", model=convolutions, outer=("6",)),
        replace(
            _MNIST, name="autoencoder", model=autoencoder, loss=reconstruction, outer=("0", "5")
        ),
        _CHARACTERS,
        replace(_CHARACTERS, name="llama", model=llama, outer=("embed", "lm_head")),
        replace(
            _MNIST,
            name="vit",
            model=vision_transformer,
            outer=("embeddings", "classifier"),
            most_rows=16_384,
        ),
    )
}
