# SPDX-License-Identifier: Apache-2.0
"""The noise along the gradient as the meter has it, against brute force at frozen weights.

Four models of others (Lightning's demo Transformer; GPT-2, ViT and ResNet of transformers) are
trained for some steps by SGD with momentum and by AdamW. Then weights and momentum m stand still,
and 300 batches of 8 are drawn. Their gradients give b = tr(Σ)/|G|², b_ip = G'ΣG/|G|⁴ (G by one half
of the batches, its noise by the other), and the same along m. A `NoiseScaleMeter` with `momentum`
measures 200 steps of 2 x 8 examples.

    python benchmarks/scheduling/along_gradient.py [--smoke]

Where momentum does not point along the gradient the meter must say that nothing is known.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import write_results
from noisescale import NoiseScaleMeter
from noisescale.methods.inner_product import NoiseAlongGradient

SMALL, BATCHES, MEASURED = 8, 300, 200

Training = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], int]
"""A model, its loss on examples by their indices, and the number of examples."""


def tokens() -> Tensor:
    """Random walks among 50 tokens."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(-2, 3, (4000, 17), generator=generator)
    return (steps.cumsum(1) + torch.randint(0, 50, (4000, 1), generator=generator)) % 50


def pictures() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).float().view(-1, 1, 8, 8), torch.tensor(y)


def demo_transformer() -> Training:
    from pytorch_lightning.demos import Transformer

    text = tokens()

    def loss(net: nn.Module, rows: Tensor) -> Tensor:
        x, y = text[rows, :-1], text[rows, 1:]
        return nn.functional.nll_loss(net(x, y), y.reshape(-1))

    return Transformer(50, ninp=32, nhead=2, nhid=64, nlayers=2), loss, len(text)


def gpt2() -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    text = tokens()
    shape: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    net = GPT2LMHeadModel(GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **shape))
    return net, lambda net, rows: net(text[rows], labels=text[rows]).loss, len(text)


def vit() -> Training:
    from transformers import ViTConfig, ViTForImageClassification

    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 2, "intermediate_size": 64}
    config = ViTConfig(num_channels=1, num_labels=10, **shape, **sizes)
    return ViTForImageClassification(config), *_of_pictures(1)


def resnet() -> Training:
    from transformers import ResNetConfig, ResNetForImageClassification

    shape: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = ResNetConfig(num_channels=1, embedding_size=8, num_labels=10, **shape)
    return ResNetForImageClassification(config), *_of_pictures(4)


def _of_pictures(times: int) -> tuple[Callable[[nn.Module, Tensor], Tensor], int]:
    x, y = pictures()
    x = x.repeat_interleave(times, 2).repeat_interleave(times, 3)
    return lambda net, rows: net(pixel_values=x[rows], labels=y[rows]).loss, len(x)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def row_of(
    make: Callable[[], Training], optimizer_name: str, steps: int, batches: int, measured: int
) -> dict[str, Any]:
    """Train, freeze, and compare."""
    torch.manual_seed(0)
    net, loss, examples = make()
    net.train()
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int) -> Tensor:
        return loss(net, torch.randint(examples, (count,), generator=generator))

    for _ in range(steps):
        optimizer.zero_grad()
        drawn(2 * SMALL).backward()
        optimizer.step()
    gradients = []
    for _ in range(batches):
        optimizer.zero_grad()
        drawn(SMALL).backward()
        gradients.append(_flat([p.grad for p in net.parameters()], net))
    every = torch.stack(gradients)
    state = [optimizer.state.get(p, {}) for p in net.parameters()]
    m = _flat([s.get("momentum_buffer", s.get("exp_avg")) for s in state], net)
    mean, trace = every.mean(0), float(SMALL * every.var(0).sum())
    sq_norm = float(mean @ mean) - trace / SMALL / batches
    half = batches // 2

    meter = NoiseScaleMeter(
        net,
        extra=[NoiseAlongGradient],
        optimizer=optimizer,
        small_batch="micro_batch",
        every_n_steps=1,
    )
    meter.follow()
    for _ in range(measured):
        optimizer.zero_grad()
        for _ in range(2):
            meter.backward(drawn(SMALL) / 2, local_batch_size=SMALL)
        meter.step()
    found = meter.extra_noise_scales["along_gradient"]
    meter.close()
    return {
        "model": make.__name__,
        "optimizer": optimizer_name,
        "steps": steps,
        "b": round(trace / sq_norm, 2),
        "b_ip": round(_ratio(every[half:] @ every[:half].mean(0))[0], 3),
        "along_momentum": round(_ratio(every @ m)[0], 3),
        "alignment": round(_ratio(every @ m)[1] / float(m @ m) / sq_norm, 4),
        "known": found.low > 0,
        "measured": [round(x, 4) for x in (found.value, found.low, found.high)]
        if found.resolved
        else None,
    }


def _flat(parts: list[Tensor | None], net: nn.Module) -> Tensor:
    pairs = zip(parts, net.parameters(), strict=True)
    flat = [(torch.zeros_like(p) if one is None else one).flatten() for one, p in pairs]
    return torch.cat(flat).double()


def _ratio(products: Tensor) -> tuple[float, float]:
    """The noise scale of dot products of batches, and their squared mean, without bias."""
    square = float(products.mean() ** 2 - products.var() / len(products))
    return float(SMALL * products.var()) / square, square


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one model, nothing is saved")
    smoke = parser.parse_args().smoke
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    models = [demo_transformer] if smoke else [demo_transformer, gpt2, vit, resnet]
    rows = []
    for make in models:
        for name in OPTIMIZERS:
            for steps in (10,) if smoke else (60, 120, 240):
                counts = (20, 20) if smoke else (BATCHES, MEASURED)
                rows.append(row_of(make, name, steps, *counts))
                print(rows[-1], flush=True)
    if not smoke:
        write_results(
            "scheduling/along_gradient", rows, small=SMALL, batches=BATCHES, measured=MEASURED
        )


if __name__ == "__main__":
    main()
