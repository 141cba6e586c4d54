# SPDX-License-Identifier: Apache-2.0
"""Measure the gradient noise scale in a loop of one's own on Hugging Face's accelerate, as timm's.

    python examples/accelerate_loop.py [--epochs 10] [--log-to runs/accelerate]

One process learns handwritten digits and accumulates two micro-batches a step. With
`accelerate launch --num-processes 2 examples/accelerate_loop.py` two do. `before_backward` stands
where accelerate runs the backward pass. In fp16 the meter takes `grad_scaler=accelerator.scaler`.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale import NoiseScaleMeter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--log-to", type=Path, default=Path("runs/accelerate"))
    arguments = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(x / 16).float(), torch.tensor(y))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer, batches = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.2),
        DataLoader(digits, batch_size=8, shuffle=True, drop_last=True),
    )

    meter = NoiseScaleMeter(
        model, optimizer=optimizer, log_to=arguments.log_to, log_every_n_steps=10
    )
    for epoch in range(arguments.epochs):
        for images, labels in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                meter.before_backward(loss, local_batch_size=len(images))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    meter.step()
                optimizer.step()
                optimizer.zero_grad()
        meter.log(loss=loss)
        accelerator.print(f"epoch {epoch + 1}: {meter.noise_scale}")
    meter.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
