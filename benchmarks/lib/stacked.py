# SPDX-License-Identifier: Apache-2.0
"""Many trainings of one model as one: learning rates and seeds side by side, by `torch.func.vmap`.

A GPU trains forty small models in the time of one. Each training has its own weights, learning rate
and, by its seed, its own start and batches; the batches of one seed are the same at all learning
rates. Optimizers are written for such stacks and are compared with torch's own in
tests/benchmarks/test_stacked.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.lib.workloads import Batch

Parameters = dict[str, Tensor]
"""By their names; in a stack each has a first dimension for the trainings."""


@dataclass(frozen=True)
class Problem:
    """A model and its data."""

    name: str
    unit: str
    data: Callable[[], tuple[Batch, Batch]]
    """To train on and to test with."""
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Batch], Tensor]
    """Of the model's output and a batch."""
    outer: tuple[str, ...] = ()
    """Parts of the names of matrices that Muon leaves to AdamW: of the first and last layers."""
    most_rows: int = 2**62
    """Rows that are trained on at once, over all trainings of a stack."""

    @cached_property
    def template(self) -> nn.Module:
        return self.model()

    def loss_at(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one training's parameters."""
        return self.loss(functional_call(self.template, parameters, (x,)), (x, y))

    def inner(self, parameters: Mapping[str, Tensor]) -> set[str]:
        """Names of the matrices between layers, of a stack."""
        return {
            name
            for name, p in parameters.items()
            if p.dim() == 3 and not any(part in name for part in self.outer)
        }


def use_plain_attention() -> None:
    """Let attention be computed by its formula, on CPUs too: `vmap` has no rule for fused ones."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def reconstruction(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, batch[0])


class Stepper:
    """An optimizer of a stack, which it changes in place."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.steps = 0

    def evaluated_at(self) -> Parameters:
        """The parameters that a trained model has, where they are not those that are stepped."""
        return self.parameters

    def step(self, gradients: Parameters, lr: Tensor) -> None:
        self.steps += 1
        for name, p in self.parameters.items():
            rate = lr.view(-1, *(1,) * (p.dim() - 1))
            self.change(name, p, gradients[name], rate)

    def change(self, name: str, p: Tensor, g: Tensor, rate: Tensor) -> None:
        raise NotImplementedError


class Sgd(Stepper):
    def __init__(
        self, parameters: Parameters, momentum: float = 0.0, nesterov: bool = False
    ) -> None:
        super().__init__(parameters)
        self.momentum, self.nesterov = momentum, nesterov
        self.buffers = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def change(self, name: str, p: Tensor, g: Tensor, rate: Tensor) -> None:
        buffer = self.buffers[name].mul_(self.momentum).add_(g)
        p.sub_(rate * (g + self.momentum * buffer if self.nesterov else buffer))


class AdamW(Stepper):
    def __init__(
        self, parameters: Parameters, betas: tuple[float, float], weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters)
        self.betas, self.weight_decay = betas, weight_decay
        self.means = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.squares = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def root(self, name: str) -> Tensor:
        """√v̂."""
        return (self.squares[name] / (1 - self.betas[1] ** max(self.steps, 1))).sqrt()

    def change(self, name: str, p: Tensor, g: Tensor, rate: Tensor) -> None:
        one, two = self.betas
        self.means[name].lerp_(g, 1 - one)
        self.squares[name].mul_(two).addcmul_(g, g, value=1 - two)
        p.mul_(1 - rate * self.weight_decay)
        p.sub_(rate * self.means[name] / (1 - one**self.steps) / (self.root(name) + 1e-8))


class Signum(Stepper):
    """Bernstein et al. 2018 (arXiv:1802.04434)."""

    def __init__(self, parameters: Parameters, beta: float = 0.9) -> None:
        super().__init__(parameters)
        self.beta = beta
        self.means = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def change(self, name: str, p: Tensor, g: Tensor, rate: Tensor) -> None:
        p.sub_(rate * self.means[name].lerp_(g, 1 - self.beta).sign())


class Lion(Stepper):
    """Chen et al. 2023 (arXiv:2302.06675), without weight decay."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.means = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def change(self, name: str, p: Tensor, g: Tensor, rate: Tensor) -> None:
        p.sub_(rate * self.means[name].lerp(g, 0.1).sign())
        self.means[name].lerp_(g, 0.01)


class Muon(AdamW):
    """Jordan et al. 2024, as torch.optim.Muon with `match_rms_adamw`; AdamW for the others."""

    def __init__(self, parameters: Parameters, inner: set[str], betas: tuple[float, float]) -> None:
        super().__init__(parameters, betas)
        self.inner = inner

    def change(self, name: str, p: Tensor, g: Tensor, rate: Tensor) -> None:
        if name not in self.inner:
            super().change(name, p, g, rate)
            return
        mean = self.means[name].lerp_(g, 0.05)
        p.mul_(1 - rate * self.weight_decay)
        p.sub_(rate * scale_of(p.shape[-2:]) * orthogonalized(g.lerp(mean, 0.95)))


def scale_of(shape: Sequence[int]) -> float:
    """What a matrix's orthogonal change is multiplied by, to be as large as AdamW's."""
    return 0.2 * math.sqrt(max(shape))


def orthogonalized(matrices: Tensor) -> Tensor:
    """U V' of each matrix, nearly, by five iterations of Newton and Schulz."""
    wide = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if wide else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if wide else x


class ScheduleFree(Stepper):
    """AdamW of Defazio et al. 2024 (arXiv:2405.15682), without warm-up and weight decay."""

    def __init__(self, parameters: Parameters, beta2: float) -> None:
        super().__init__(parameters)
        self.beta2 = beta2
        self.z = {name: p.clone() for name, p in parameters.items()}
        self.average = {name: p.clone() for name, p in parameters.items()}
        self.squares = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def evaluated_at(self) -> Parameters:
        return self.average

    def change(self, name: str, p: Tensor, g: Tensor, rate: Tensor) -> None:
        squares, z = self.squares[name], self.z[name]
        squares.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        z.sub_(rate * g / ((squares / (1 - self.beta2**self.steps)).sqrt() + 1e-8))
        self.average[name].lerp_(z, 1 / self.steps)
        p.copy_(self.average[name].lerp(z, 0.1))


KINDS: dict[str, tuple[str, ...]] = {
    "sgd": ("SGD",),
    "momentum": ("momentum", "momentum 0.97", "Nesterov"),
    "adam": ("AdamW",),
    "sign": ("Signum", "Lion"),
    "spectral": ("Muon",),
    "schedule-free": ("schedule-free",),
}


def kind_of(optimizer: str) -> str:
    return next(kind for kind, names in KINDS.items() if optimizer in names)


def stepper_of(
    optimizer: str, problem: Problem, parameters: Parameters, batch_size: int, smallest: int
) -> Stepper:
    """An optimizer by its name; Adam's β₂ has one half-life in examples at all batch sizes."""
    beta2 = 0.999 ** (batch_size / smallest)
    match optimizer:
        case "SGD":
            return Sgd(parameters)
        case "momentum":
            return Sgd(parameters, 0.9)
        case "momentum 0.97":
            return Sgd(parameters, 0.97)
        case "Nesterov":
            return Sgd(parameters, 0.9, nesterov=True)
        case "AdamW":
            return AdamW(parameters, (0.9, beta2))
        case "Signum":
            return Signum(parameters)
        case "Lion":
            return Lion(parameters)
        case "Muon":
            return Muon(parameters, problem.inner(parameters), (0.9, beta2))
        case "schedule-free":
            return ScheduleFree(parameters, beta2)
    raise ValueError(f"optimizer must be one of {KINDS}, got {optimizer!r}")


@dataclass(frozen=True)
class Training:
    """One of a stack."""

    lr: float
    seed: int
    horizon: int | None = None
    """Steps over which the learning rate falls to zero on a line; None: it stays."""


class Stack:
    """Trainings of one problem at one batch size, side by side."""

    def __init__(
        self,
        problem: Problem,
        optimizer: str,
        batch_size: int,
        trainings: Sequence[Training],
        *,
        smallest: int,
        device: str = "cpu",
    ) -> None:
        self.problem, self.batch_size, self.device = problem, batch_size, device
        self.trainings = list(trainings)
        train, test = problem.data()
        self.train = tuple(part.to(device) for part in train)
        self.test = tuple(part.to(device) for part in test)
        self.seeds = sorted({each.seed for each in trainings})
        starts = {seed: _start(problem, seed) for seed in self.seeds}
        parameters = {
            name: torch.stack([starts[each.seed][name] for each in trainings]).to(device)
            for name in starts[self.seeds[0]]
        }
        problem.template.to(device)
        self.stepper = stepper_of(optimizer, problem, parameters, batch_size, smallest)
        self._draws = {seed: torch.Generator().manual_seed(1000 + seed) for seed in self.seeds}
        self._place = torch.tensor([self.seeds.index(each.seed) for each in trainings])
        self._lr = torch.tensor([each.lr for each in trainings], device=device)
        self._horizons = torch.tensor(
            [each.horizon or math.inf for each in trainings], device=device
        )
        self._gradient = vmap(grad(problem.loss_at))
        self._loss = vmap(problem.loss_at, in_dims=(0, None, None))

    def gradients(self) -> Parameters:
        """Draw a batch for each seed; the gradients of all trainings on theirs."""
        n = len(self.train[0])
        drawn = torch.stack(
            [torch.randint(n, (self.batch_size,), generator=self._draws[s]) for s in self.seeds]
        )[self._place].to(self.device)
        p = self.stepper.parameters
        pieces = [
            self._gradient(
                {name: p[name][some] for name in p}, *(x[drawn[some]] for x in self.train)
            )
            for some in self._parts(self.batch_size)
        ]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in p}

    def step(self, gradients: Parameters | None = None) -> None:
        """Take one step in all trainings, by gradients of a new batch or by these."""
        left = (1 - self.stepper.steps / self._horizons).clamp(min=0)
        self.stepper.step(gradients or self.gradients(), self._lr * left)

    @torch.no_grad()
    def losses(self) -> list[float]:
        """The loss of each training on the data to test with."""
        p = self.stepper.evaluated_at()
        pieces = [
            self._loss({name: p[name][some] for name in p}, *self.test)
            for some in self._parts(len(self.test[0]))
        ]
        return [float(x) for piece in pieces for x in piece.tolist()]

    def _parts(self, rows: int) -> list[slice]:
        """Trainings that are computed at once, where each has so many rows."""
        at_once = max(1, self.problem.most_rows // rows)
        return [slice(k, k + at_once) for k in range(0, len(self.trainings), at_once)]


def _start(problem: Problem, seed: int) -> Parameters:
    torch.manual_seed(seed)
    return {name: p.detach() for name, p in problem.model().named_parameters()}


def steps_to_goal(stack: Stack, goal: float, most_steps: int, hopeless: float = 1.6) -> list[float]:
    """The steps of each training to a loss; infinite where it is given up.

    The loss is evaluated after every 2 % more steps, and its logarithm taken to be linear between
    two evaluations. All is given up after so many times the steps of the best learning rate.
    """
    found = [math.inf] * len(stack.trainings)
    before: list[tuple[int, float]] | None = None
    step, due = 0, 5
    while step < most_steps:
        stack.step()
        step += 1
        if step < due:
            continue
        due = step + max(1, step // 50)
        losses = stack.losses()
        for k, loss in enumerate(losses):
            if loss < goal and found[k] == math.inf:
                if before is None:
                    raise RuntimeError(f"{stack.problem.name} is at its goal from the start.")
                last, above = before[k]
                share = 1.0
                if math.isfinite(above):
                    share = math.log(above / goal) / math.log(above / loss)
                found[k] = last + share * (step - last)
        before = [(step, loss) for loss in losses]
        medians = _medians(stack, found)
        if step > hopeless * min(medians.values()) or all(map(math.isfinite, found)):
            break
        if not any(map(math.isfinite, losses)):
            break
    return found


def _medians(stack: Stack, steps: Sequence[float]) -> dict[float, float]:
    """For each learning rate the median over seeds."""
    of: dict[float, list[float]] = {}
    for each, count in zip(stack.trainings, steps, strict=True):
        of.setdefault(each.lr, []).append(count)
    return {lr: upper_median(counts) for lr, counts in of.items()}


def upper_median(counts: Sequence[float]) -> float:
    """The median, and the larger one of two."""
    return sorted(counts)[len(counts) // 2]
