# SPDX-License-Identifier: Apache-2.0
"""Combine four processes by Adasum in a plain torch loop, without DistributedDataParallel.

    torchrun --standalone --nproc-per-node 4 examples/adasum_loop.py [--lamb]

Every process learns handwritten digits from batches of its own, and steps by its own gradient. What
the steps change is combined. The learning rate is not scaled with the number of processes. `--lamb`
steps by LAMB, of `pip install pytorch-optimizer`. Under Lightning one callback does the same:
`Trainer(strategy="ddp", callbacks=[AdasumReduction()])`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from noisescale import AdasumOptimizer, NoiseScaleMeter


def stepping(model: nn.Module, lamb: bool) -> torch.optim.Optimizer:
    """Return the optimizer that each process steps with."""
    if lamb:
        from pytorch_optimizer import Lamb

        return Lamb(model.parameters(), lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lamb", action="store_true", help="step by LAMB")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # the same weights on all processes
    x, y = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(x / 16).float(), torch.tensor(y))
    sampler = DistributedSampler(digits)
    batches = DataLoader(digits, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = AdasumOptimizer(stepping(model, arguments.lamb))

    meter = NoiseScaleMeter(model, averaged=False)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            meter.backward(loss, local_batch_size=len(images))
            meter.step()
            optimizer.step()
        noise_scale = meter.noise_scale
        if dist.get_rank() == 0:
            cosine, orthogonality = (x.mean().item() for x in optimizer.statistics[1:])
            print(f"epoch {epoch + 1}: {noise_scale}")
            print(
                f"  loss {loss.item():.3f}, cosine of two ranks' changes {cosine:.2f},"
                f" orthogonality {orthogonality:.2f}",
                flush=True,
            )
    meter.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
