# SPDX-License-Identifier: Apache-2.0
"""Losses that are a mean over the tokens of a step: the noise scale against brute force.

A Llama from a config stands still. Its rows have 2 to 64 tokens. The truth is the variance of the
gradients of independent steps. Compared are

- Hugging Face's Trainer, with 16 rows in each step, in 1, 2, 4, 8 and 16 micro-batches;
- loops with a `NoiseScaleMeter` whose micro-batches each have rows of one length ("bucketed"):
  accumulation, DistributedDataParallel and FSDP2, without weights and with them.

    python benchmarks/accuracy/weights.py --out weights.json

The results in `results/` are those of before and after weights were heeded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.ranks import on_ranks
from noisescale import NoiseScaleMeter

ROWS = 16
"""Rows in each step."""
VOCABULARY, LONGEST, SHORTEST = 64, 64, 2
BUCKETS = (2, 4, 8, 16, 32, 64)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, pad_token_id=0, **size)
    )


def row(generator: torch.Generator, length: int) -> Tensor:
    """Token ids; each row prefers tokens of its own, so that its tokens are correlated."""
    common = 1 / torch.arange(1, VOCABULARY, dtype=torch.float32)
    own = torch.rand(VOCABULARY - 1, generator=generator) < 0.2
    weights = common * (1 + 4 * own)
    return 1 + torch.multinomial(weights, length, replacement=True, generator=generator)


def any_length(generator: torch.Generator) -> int:
    low, high = torch.tensor([float(SHORTEST), LONGEST + 1.0]).log().tolist()
    drawn = torch.rand((), generator=generator).item()
    return min(int(torch.tensor(low + (high - low) * drawn).exp()), LONGEST)


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([one["input_ids"] for one in rows], batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gradient_of_step(model: nn.Module, rows: list[Tensor]) -> Tensor:
    """The gradient of the mean loss over all predicted tokens of some rows."""
    batch = padded([{"input_ids": one} for one in rows])
    model.zero_grad()
    model(**batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def noise_scale_of(gradients: list[Tensor], batch_size: int) -> float:
    """From the gradients of independent steps."""
    g = torch.stack(gradients)
    variance = g.var(0).sum()
    return (batch_size * variance / (g.mean(0).square().sum() - variance / len(g))).item()


class Rows(IterableDataset[dict[str, Tensor]]):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield {"input_ids": row(generator, any_length(generator))}


def trainer(micro_batches: int, steps: int) -> dict[str, float]:
    """What Hugging Face's Trainer and the callback say."""
    from transformers import Trainer, TrainingArguments

    from noisescale.hugging_face import NoiseScaleCallback

    callback = NoiseScaleCallback(window=100_000, every_n_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=0.0,
            per_device_train_batch_size=ROWS // micro_batches,
            gradient_accumulation_steps=micro_batches,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        Trainer(
            llama(),
            arguments,
            train_dataset=Rows(1),
            data_collator=padded,
            callbacks=[callback],
        ).train()
    return said(callback.noise_scale)


def said(scale: Any) -> dict[str, float]:
    return {"noise_scale": scale.value, "low": scale.low, "high": scale.high, "steps": scale.steps}


PARTS = 4
"""Micro-batches, of all ranks together, in a bucketed step."""


def bucketed(generator: torch.Generator) -> list[Tensor]:
    """The rows of one micro-batch, all of one length."""
    length = BUCKETS[int(torch.randint(len(BUCKETS), (), generator=generator))]
    return [row(generator, length) for _ in range(ROWS // PARTS)]


def loop(way: str, weighted: bool, steps: int) -> dict[str, float]:
    """Take steps of `PARTS` micro-batches, on one rank of a way of training."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = llama()
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    meter = NoiseScaleMeter(model, window=100_000, every_n_steps=1)
    generator = torch.Generator().manual_seed(7)
    micro = PARTS // ranks
    for _ in range(steps):
        parts = [bucketed(generator) for _ in range(PARTS)]  # the same on all ranks
        tokens = [sum(len(one) - 1 for one in part) for part in parts]
        model.zero_grad()
        for k in range(micro):
            which = rank * micro + k
            batch = padded([{"input_ids": one} for one in parts[which]])
            last = k == micro - 1
            with model.no_sync() if way == "ddp" and not last else nullcontext():
                mean = model(**batch).loss
                loss = mean * tokens[which] / sum(tokens) * ranks
                weight = {"weight": float(tokens[which])} if weighted else {}
                meter.before_backward(loss, ROWS // PARTS, **weight)
                loss.backward()
        meter.step(**({} if weighted else {"loss_divisor": micro}))
    return said(meter.noise_scale)


def loops(steps: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for way, ranks in (("accumulation", 1), ("ddp", 2), ("fsdp2", 2)):
        for weighted in (False, True):
            name = f"bucketed, {way}, {'with' if weighted else 'without'} weights"
            try:
                results[name] = on_ranks(ranks, loop, way, weighted, steps)[0]
            except Exception as error:
                results[name] = {"refused": str(error).strip().splitlines()[-1]}
            print(name, results[name], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--truth", type=int, default=3000, help="steps that the truth is made of")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--without-loops", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("once")
    model, generator = llama(), torch.Generator().manual_seed(99)
    any_lengths = [
        gradient_of_step(model, [row(generator, any_length(generator)) for _ in range(ROWS)])
        for _ in range(options.truth)
    ]
    results: dict[str, Any] = {"truth": noise_scale_of(any_lengths, ROWS)}
    print(results, flush=True)
    for micro_batches in options.micro_batches:
        name = f"Trainer, {micro_batches} x {ROWS // micro_batches}"
        results[name] = trainer(micro_batches, options.steps)
        print(name, results[name], flush=True)
    if not options.without_loops:
        steps = [
            gradient_of_step(model, [one for _ in range(PARTS) for one in bucketed(generator)])
            for _ in range(options.truth)
        ]
        results["truth, bucketed"] = noise_scale_of(steps, ROWS)
        print(results["truth, bucketed"], flush=True)
        results |= loops(2 * options.steps)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
