# SPDX-License-Identifier: Apache-2.0
"""Measure the gradient noise scale in a loop of one's own on Lightning Fabric.

    python examples/fabric_loop.py [--log-to runs/fabric]

Two CPU processes learn handwritten digits and accumulate two micro-batches a step. Four lines
measure: the meter, `before_backward` where Fabric runs the backward pass, `step` and `close`. With
`precision="16-mixed"` the meter takes `grad_scaler=fabric._precision.scaler` besides. With
`pytorch_lightning`, import from `lightning_fabric` instead of `lightning.fabric`.
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale import NoiseScaleMeter

ACCUMULATED = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--log-to", type=Path, default=Path("runs/fabric"))
    arguments = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x, y = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(x / 16).float(), torch.tensor(y))
    batches = fabric.setup_dataloaders(DataLoader(digits, batch_size=8, shuffle=True))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.2))

    meter = NoiseScaleMeter(
        model, optimizer=optimizer, log_to=arguments.log_to, log_every_n_steps=10
    )
    for epoch in range(arguments.epochs):
        for index, (images, labels) in enumerate(batches, start=1):
            steps = index % ACCUMULATED == 0
            with fabric.no_backward_sync(model, enabled=not steps):
                loss = nn.functional.cross_entropy(model(images), labels) / ACCUMULATED
                meter.before_backward(loss, local_batch_size=len(images))
                fabric.backward(loss)
            if steps:
                meter.step()
                fabric.clip_gradients(model, optimizer, max_norm=10.0)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()  # what the epoch left over
        fabric.print(f"epoch {epoch + 1}: {meter.noise_scale}")
    meter.close()
    fabric.barrier()  # gloo ends cleanly where nobody leaves early


if __name__ == "__main__":
    main()
