# SPDX-License-Identifier: Apache-2.0
"""Train four processes that average with neighbours alone, in a plain torch loop.

    torchrun --standalone --nproc-per-node 4 examples/decentlam_loop.py [--topology ring]

Every process learns handwritten digits from batches of its own. It steps by its own gradient and
averages its weights with those of its neighbours. The mean over processes is swapped in to
validate. Under Lightning one callback does the same:
`Trainer(strategy="ddp", callbacks=[DecentLaMReduction()])`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from noisescale import DecentLaM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--topology", default="ring", choices=["ring", "exponential", "one-peer"])
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # the same weights on all processes
    x, y = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(x / 16).float(), torch.tensor(y))
    training, held_out = torch.utils.data.random_split(digits, [1500, len(digits) - 1500])
    sampler = DistributedSampler(training)
    batches = DataLoader(training, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = DecentLaM(sgd, arguments.topology)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        with optimizer.use_mean() as mean, torch.no_grad():
            images, labels = (torch.stack(column) for column in zip(*held_out, strict=True))
            right = model(images.to(device)).argmax(1) == labels.to(device)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch + 1}: loss {loss.item():.3f}, {right.float().mean():.1%} of the held"
                f" out right, consensus distance {mean.consensus_distance:.1e}",
                flush=True,
            )
    optimizer.average_()  # what is saved now is the mean
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
