# SPDX-License-Identifier: Apache-2.0
"""Measure the gradient noise scale in a plain torch loop under DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/torchrun_loop.py [--log-to runs/torchrun]

Every process learns handwritten digits, on a GPU of its own where there is one, and accumulates
two micro-batches a step. Four lines measure: the meter, `backward`, `step` and `close`.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from noisescale import NoiseScaleMeter

ACCUMULATED = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--log-to", type=Path, default=Path("runs/torchrun"))
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(x / 16).float(), torch.tensor(y))
    sampler = DistributedSampler(digits)
    batches = DataLoader(digits, batch_size=8, sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    meter = NoiseScaleMeter(
        model, optimizer=optimizer, log_to=arguments.log_to, log_every_n_steps=10
    )
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for index, (images, labels) in enumerate(batches, start=1):
            steps = index % ACCUMULATED == 0
            with nullcontext() if steps else model.no_sync():
                logits = model(images.to(device))
                loss = nn.functional.cross_entropy(logits, labels.to(device)) / ACCUMULATED
                meter.backward(loss, local_batch_size=len(images))
            if steps:
                meter.step()
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()  # what the epoch left over
        noise_scale = meter.noise_scale
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: {noise_scale}", flush=True)
    meter.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
