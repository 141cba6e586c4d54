# SPDX-License-Identifier: Apache-2.0
"""How well the inner-product test can be measured, without keeping a gradient.

The inner-product test of Bollapragada et al. (2018, arXiv:1710.11258) wants B >= b_ip/θ², with
b_ip = G'ΣG/|G|⁴, the noise along the gradient. (The orthogonality test wants (b - b_ip)/ν².) This
script takes the gradients of all examples at frozen weights, which gives b_ip, and draws measured
steps from them. Each way below sees what it would see in training, over 32 measured steps:

- `scatter`: the variance of |G|² over steps. With parts of n examples, W of them, each step's
  estimate of |G|² is the mean of gᵢ·gⱼ over pairs, and whatever the distribution is its variance is
  4·G'ΣG/B + 2·W/(W-1)·tr(Σ²)/B². All ways of measuring have it at no cost.
- `scatter - T`: the same, less tr(Σ²), taken from the variance of the estimate of tr(Σ) over steps
  as if gradients were normal.
- `plug-in`: as in the paper, the variance of gᵢ·g over |g|⁴, with the step's own g for G.
- `momentum`: the variance over ranks of gᵢ·v, over the mean of (gᵢ·v)(gⱼ·v) over pairs, v being
  the mean of 19 earlier batches at the same weights. This is what `NoiseScaleMeter` has with
  `momentum`; along_gradient.py tries it where the weights have moved.
- `running dots`: the products of gⱼ·(g₁ + ... + gⱼ₋₁) of eight micro-batches of B/8 examples. It
  would be one more reading of `p.grad` for each micro-batch.

    python benchmarks/scheduling/inner_product.py [--repetitions 60]

Saved are the 10 %, 50 % and 90 % points of measured over true b_ip.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import write_results

STEPS, MICRO_BATCHES = 32, 8

Array = NDArray[np.float64]


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).float(), torch.tensor(y)


def perceptron() -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    """The digits' perceptron of the other benchmarks."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return net, lambda x, y: nn.functional.cross_entropy(net(x), y), *digits()


def vision_transformer() -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    """ViT of transformers on digits."""
    from transformers import ViTConfig, ViTForImageClassification

    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    net = ViTForImageClassification(ViTConfig(**shape, **sizes, **dropout, intermediate_size=64))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = net(x.view(-1, 1, 8, 8), interpolate_pos_encoding=False)
        return nn.functional.cross_entropy(out.logits, y)

    return net, loss, *digits()


def language_model() -> tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]:
    """GPT-2 of transformers on the bytes of a module of Python."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with open(argparse.__file__, "rb") as source:
        text = torch.tensor(list(source.read())).clamp(max=127)
    rows = text[: len(text) // 32 * 32].view(-1, 32)
    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    net = GPT2LMHeadModel(config)
    return net, lambda x, y: net(x, labels=x).loss, rows, rows


def products(make: Callable[[], Any], steps: int, seed: int = 0) -> tuple[Array, dict[str, float]]:
    """Dot products of all examples' gradients after some steps of training, and the truth."""
    torch.manual_seed(seed)
    net, loss, x, y = make()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        some = torch.randint(len(x), (32,), generator=generator)
        optimizer.zero_grad()
        loss(x[some], y[some]).backward()
        optimizer.step()
    rows = []
    for i in torch.randperm(len(x), generator=generator)[:800].tolist():
        net.zero_grad()
        loss(x[i : i + 1], y[i : i + 1]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    gradients = torch.stack(rows).double().numpy()
    gram = gradients @ gradients.T
    along = gram.mean(1)  # gᵢ·G
    sq_norm = float(along.mean())
    trace = float(np.trace(gram) / len(gram) - sq_norm)
    truth = {"b": trace / sq_norm, "b_ip": float(along.var()) / sq_norm**2}
    return gram, truth


def measured(gram: Array, n: int, parts: int, random: np.random.Generator) -> dict[str, float]:
    """What each way makes of some measured steps, in examples."""
    batch = n * parts
    earlier = gram[:, random.integers(len(gram), size=19 * batch)].mean(1)  # gᵢ·v
    signal, trace, plug_in, spread, along, running = (np.empty(STEPS) for _ in range(6))
    small = batch // MICRO_BATCHES
    for step in range(STEPS):
        drawn = random.integers(len(gram), size=batch)
        among = gram[np.ix_(drawn, drawn)]
        dots = _between(among, parts)
        mean_small, big = np.trace(dots) / parts, dots.mean()
        signal[step] = (parts * big - mean_small) / (parts - 1)
        trace[step] = (mean_small - big) / (1 / n - 1 / batch)
        plug_in[step] = dots.mean(0).var(ddof=1) * n / big**2
        of_rank = earlier[drawn].reshape(parts, n).mean(1)
        spread[step] = of_rank.var(ddof=1) * n
        along[step] = of_rank.mean() ** 2 - of_rank.var(ddof=1) / parts
        running[step] = _of_running_dots(_between(among, MICRO_BATCHES)) if small else math.nan
    mean = signal.mean()
    scatter = batch / 4 * (np.diff(signal) ** 2).mean() / 2
    of_squares = (parts - 1) / 2 * (np.diff(trace) ** 2).mean() / 2
    less = parts / (parts - 1) / (2 * batch) * of_squares
    fourth = (signal[1:] * signal[:-1]).mean()
    j = np.arange(1, MICRO_BATCHES)
    others = np.mean([k for i in j for k in j if k > i])
    return {
        "scatter": scatter / mean**2,
        "scatter - T": (scatter - less) / mean**2,
        "plug-in": float(np.median(plug_in)),
        "momentum": spread.mean() / along.mean(),
        "running dots": small * (running.mean() - others * fourth) / 2 / fourth,
    }


def _between(among: Array, parts: int) -> Array:
    """Dot products of the mean gradients of parts."""
    n = len(among) // parts
    return np.asarray(among.reshape(parts, n, parts, n).mean((1, 3)))


def _of_running_dots(dots: Array) -> float:
    """The mean over j < k of dⱼ·dₖ/(j - 1), whose expectation is (k - 1)·|G|⁴ + 2·G'ΣG/n."""
    d = np.array([dots[:j, j].sum() for j in range(1, len(dots))])  # of the first j micro-batches
    pairs = [d[i] * d[k] / (i + 1) for i in range(len(d)) for k in range(i + 1, len(d))]
    return float(np.mean(pairs))


def rows(models: Iterable[Callable[[], Any]], repetitions: int) -> Iterator[dict[str, Any]]:
    for make in models:
        for steps in (0, 300):
            gram, truth = products(make, steps)
            for n, parts in ((8, 2), (8, 8), (64, 2)):
                random = np.random.default_rng(0)
                every = [measured(gram, n, parts, random) for _ in range(repetitions)]
                for way in every[0]:
                    found = np.array([one[way] for one in every]) / truth["b_ip"]
                    low, median, high = np.quantile(found, (0.1, 0.5, 0.9)).tolist()
                    yield {
                        "model": make.__name__,
                        "steps": steps,
                        "b": round(truth["b"], 2),
                        "b_ip": round(truth["b_ip"], 3),
                        "n": n,
                        "parts": parts,
                        "way": way,
                        "low": round(low, 2),
                        "median": round(median, 2),
                        "high": round(high, 2),
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--smoke", action="store_true", help="one model, nothing is saved")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    models = [perceptron] if arguments.smoke else [perceptron, vision_transformer, language_model]
    for row in rows(models, 2 if arguments.smoke else arguments.repetitions):
        found.append(row)
        print(
            f"{row['model']:20} {row['steps']:4} steps, b {row['b']:8.1f}, b_ip {row['b_ip']:7.2f},"
            f" {row['parts']} x {row['n']:2}: {row['way']:12} {row['median']:8.2f}"
            f" ({row['low']:.2f} to {row['high']:.2f})",
            flush=True,
        )
    if not arguments.smoke:
        write_results("scheduling/inner_product", found, measured_steps=STEPS)


if __name__ == "__main__":
    main()
