# SPDX-License-Identifier: Apache-2.0
"""Measure the gradient noise scale in a plain torch loop, as of nanoGPT.

    python examples/plain_loop.py [--steps 300] [--log-to runs/plain]

A small transformer learns the characters of Python's own standard library on one device. Each step
accumulates two micro-batches of 16 sequences. Six lines measure and log: the meter, `backward`,
`step`, `pause` before an evaluation, `log` and `close`. Run it again with another `--log-to`, then
compare both: `noisescale compare runs --goal "val_loss<=2.5"`.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from noisescale import NoiseScaleMeter

CONTEXT, WIDTH = 32, 64
MICRO_BATCH, ACCUMULATED = 16, 2
EVERY = 50


class Model(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", 1e-5, True, True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(CONTEXT, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--log-to", type=Path, default=Path("runs/plain"))
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(source.read_text(errors="ignore") for source in sources)[:1_000_000]
    alphabet = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text], device=device)
    train, held_out = codes[: -len(codes) // 10], codes[-len(codes) // 10 :]

    def get_batch(of: Tensor, size: int) -> Tensor:
        starts = torch.randint(len(of) - CONTEXT, (size, 1), device=device)
        return of[starts + torch.arange(CONTEXT + 1, device=device)]

    def loss_of(batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    model = Model(len(alphabet)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = NoiseScaleMeter(
        model,
        optimizer=optimizer,
        unit="sequences",
        log_to=arguments.log_to,
        log_every_n_steps=10,
    )
    for step in range(1, arguments.steps + 1):
        for _ in range(ACCUMULATED):
            batch = get_batch(train, MICRO_BATCH)
            meter.backward(loss_of(batch) / ACCUMULATED, local_batch_size=len(batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        meter.step()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0 or step == arguments.steps:
            meter.pause()
            with torch.no_grad():
                val_loss = loss_of(get_batch(held_out, 256)).item()
            meter.resume()
            meter.log(val_loss=val_loss)
            print(f"step {step}: val_loss {val_loss:.3f}, noise scale {meter.noise_scale}")
    meter.close()


if __name__ == "__main__":
    main()
