# SPDX-License-Identifier: Apache-2.0
"""Train a fixed number of examples, and compare scheduled batch sizes with the front of fixed ones.

People train a fixed number of examples, with warm-up and decay of the learning rate, and want the
same final loss in fewer serial steps. Fixed batch sizes are trained first, each with its learning
rate searched by factors of 2 and √2 with two seeds, and then with more: the *front* of loss against
steps. Batch sizes are added until the best one has others on both sides. B* is the largest batch
size that loses at most 0.15 %, between those trained. Then each policy starts from B*/8, B*/4, B*
and 4 B*, rounded to powers of two, at the learning rate that was the best there.

    python benchmarks/scheduling/fixed_budget.py [--budget MINUTES] [--only NAME] [--report]

The loss of a scheduled run is compared with that of the best fixed batch size at the same seed: the
same initial weights. Its steps are compared with those of B*, and with those of the front at equal
loss: that is its *regret*. A start is well served within 1 % of the loss and 2.2 times the steps.
Each run is a single one at the scheduler's default budget for measuring. The best of many learning
rates owes its place to luck, too, so batch sizes and policies are compared by seeds that chose
nothing. Results are saved as they come, and a later call goes on from there.

Runs are on one thread, two at a time. The noise scale comes from halves of each batch.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.sweeping import Command, Row
from benchmarks.lib.workloads import (
    CONTEXT,
    DATA,
    WORKLOADS,
    Batch,
    Workload,
    characters,
    convolutions,
)
from noisescale import BatchSizeController, NoiseScale, NoiseScaleMeter, Plan
from noisescale.scheduling import find
from noisescale.scheduling.find import FIRST, Find, blind_batch_size
from noisescale.scheduling.learning_rate import LearningRateScaling
from noisescale.scheduling.policy import Progress, Wanted

NAME = "scheduling/fixed_budget"


def momentum(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)]


def adamw(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
    ]


def muon(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices between layers, AdamW for all others, at rates that go together."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and _is_inner(name)]
    known = {id(p) for p in inner}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(inner, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    ]


def _is_inner(name: str) -> bool:
    return not any(part in name for part in ("tokens", "positions", "head"))


def cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def stable_then_decay(share: float) -> float:
    return min(1.0, (1 - share) / 0.2)


def constant(share: float) -> float:
    return 1.0


def restarted(share: float) -> float:
    """A cosine in the first seventh, another in the next two, and a third in the rest."""
    begins, ends = next((a / 7, b / 7) for a, b in ((3, 7), (1, 3), (0, 1)) if share >= a / 7)
    return cosine((share - begins) / (ends - begins))


WARM_UP = 0.05
"""The share of the budget over which the learning rate rises on a line."""


def rate(schedule: Callable[[float], float], share: float) -> float:
    """The factor on the peak learning rate, at a share of the budget."""
    if share < WARM_UP:
        return share / WARM_UP
    return schedule((share - WARM_UP) / (1 - WARM_UP))


class Reconstruction(Workload):
    """Pixels are restored from fewer numbers; the loss hardly varies from seed to seed."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x, _ = batch
        return nn.functional.binary_cross_entropy_with_logits(model(x), x)


def autoencoder() -> nn.Module:
    """Of an image's 784 pixels, by way of 24 numbers."""
    down = nn.Linear(784, 128), nn.GELU(), nn.Linear(128, 24)
    return nn.Sequential(*down, nn.Linear(24, 128), nn.GELU(), nn.Linear(128, 784))


@cache
def words() -> tuple[Batch, Batch]:
    """Five words or signs of Shakespeare and the next one; the 2,000 commonest have their own."""
    text = (DATA / "tinyshakespeare/input.txt").read_text().lower()
    found = re.findall(r"[a-z']+|[^a-z'\s]", text)
    known = {word: index for index, (word, _) in enumerate(Counter(found).most_common(1_999))}
    windows = torch.tensor([known.get(word, 1_999) for word in found]).unfold(0, 6, 1)
    train, test = windows[: 9 * len(windows) // 10], windows[9 * len(windows) // 10 :]
    return (train[:, :-1], train[:, -1]), (test[::5, :-1], test[::5, -1])


def short_characters() -> tuple[Batch, Batch]:
    """Sequences of 8 characters of Shakespeare; 1,024 of the last tenth to test with."""
    (x, y), (test_x, test_y) = characters()
    return (x[:, :8], y[:, :8]), (test_x.reshape(-1, 8), test_y.reshape(-1, 8))


def small_transformer() -> nn.Module:
    """One layer of width 32."""
    from char_transformer import CharTransformer

    return CharTransformer(65, 8, width=32, layers=1, heads=4)


def larger_transformer() -> nn.Module:
    """Four layers of width 192: 1.8 million parameters."""
    from char_transformer import CharTransformer

    return CharTransformer(65, CONTEXT, width=192, layers=4, heads=6)


def of_words() -> nn.Module:
    """One hidden layer behind the embeddings of five words."""
    return nn.Sequential(
        nn.Embedding(2_000, 32),
        nn.Flatten(),
        nn.Linear(160, 128),
        nn.GELU(),
        nn.Linear(128, 2_000),
    )


class Logits(nn.Module):
    """A language model of transformers that gives its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x, use_cache=False).logits
        return logits


def gpt2() -> nn.Module:
    """The GPT-2 of transformers, with two layers of width 48."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 65, "n_positions": 8, "n_embd": 48, "n_layer": 2, "n_head": 4}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Logits(GPT2LMHeadModel(GPT2Config(**sizes, **none)))


def llama() -> nn.Module:
    """The Llama of transformers, with two layers of width 48."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 65, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2}
    return Logits(LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=8)))


OWN = {
    "words": replace(WORKLOADS["mnist"], name="words", data=words, model=of_words),
    "gpt2": replace(WORKLOADS["characters"], data=short_characters, model=gpt2),
    "llama": replace(WORKLOADS["characters"], data=short_characters, model=llama),
    "1.8M characters": replace(WORKLOADS["characters"], model=larger_transformer),
    "convolutions": replace(WORKLOADS["mnist"], model=convolutions),
    "characters": replace(WORKLOADS["characters"], data=short_characters, model=small_transformer),
    "autoencoder": Reconstruction(**{**vars(WORKLOADS["mnist"]), "model": autoencoder}),
}


SEARCHED, FRESH = 2, 100
"""Seeds that a learning rate is searched with, and the first seed that chooses none."""


@dataclass(frozen=True)
class Budgeted:
    """A training of a fixed number of examples."""

    name: str
    of: str
    """Name in `WORKLOADS` or `OWN`: data and model."""
    optimizers: Callable[[nn.Module, float], list[torch.optim.Optimizer]]
    schedule: Callable[[float], float]
    examples: int
    first_batch_size: int
    """Where the search begins."""
    first_lr: float
    """Where the search begins at the first batch size."""
    kept_out: bool = False
    """Whether nothing was chosen by it."""
    seeds: int = 5
    device: str = "cpu"
    taken_for_best: int | None = None
    """A batch size around which others are tried, where the best one was not searched."""
    scatters: bool = False
    """Whether losses differ by percents from seed to seed, as those of classes of images do."""
    first_judge: int = FRESH
    """The first of the seeds that batch sizes and policies are compared by."""

    @property
    def judges(self) -> range:
        """The seeds that batch sizes are compared by, each at its best learning rate."""
        return range(self.first_judge, self.first_judge + (12 if self.scatters else 5))

    @property
    def scheduled(self) -> range:
        """The seeds that policies are compared by."""
        return self.judges[: 8 if self.scatters else 3]

    @property
    def workload(self) -> Workload:
        return (WORKLOADS | OWN)[self.of]


_MNIST = Budgeted(
    "mnist, momentum",
    "mnist",
    momentum,
    cosine,
    60_000,
    16,
    0.02,
    seeds=10,
    scatters=True,
)
_AUTO = Budgeted("autoencoder, AdamW", "autoencoder", adamw, cosine, 30_000, 16, 0.01)
_CHARACTERS = Budgeted("characters, AdamW", "characters", adamw, cosine, 60_000, 32, 0.01)
BUDGETS = {
    each.name: each
    for each in (
        _CHARACTERS,
        replace(_CHARACTERS, name="characters, AdamW, half", examples=30_000),
        replace(_CHARACTERS, name="characters, AdamW, 4 x", examples=240_000),
        replace(_CHARACTERS, name="characters, AdamW, WSD", schedule=stable_then_decay),
        replace(_CHARACTERS, name="characters, AdamW, constant", schedule=constant),
        replace(_CHARACTERS, name="characters, AdamW, restarts", schedule=restarted, kept_out=True),
        replace(_CHARACTERS, name="characters, Muon", optimizers=muon, kept_out=True),
        _AUTO,
        replace(_AUTO, name="autoencoder, momentum", optimizers=momentum, first_lr=0.5),
        _MNIST,
        replace(_MNIST, name="mnist, momentum, WSD", schedule=stable_then_decay),
        replace(
            _CHARACTERS,
            name="1.8M characters, AdamW",
            of="1.8M characters",
            examples=24_000,
            first_lr=0.003,
            kept_out=True,
            seeds=3,
            device="cuda",  # on two cores of a CPU it takes 15 hours
            taken_for_best=4,  # 8 is level with it, and 2 was trained at one learning rate
            first_judge=0,  # it was trained before seeds were kept apart
        ),
        Budgeted("words, AdamW", "words", adamw, cosine, 120_000, 128, 0.006),
        Budgeted("words, momentum", "words", momentum, cosine, 120_000, 64, 0.2),
        replace(_CHARACTERS, name="characters, momentum", optimizers=momentum, first_lr=0.5),
        replace(_CHARACTERS, name="gpt2, AdamW", of="gpt2"),
        replace(_CHARACTERS, name="llama, AdamW", of="llama", examples=120_000, kept_out=True),
        replace(
            _MNIST,
            name="convolutions, AdamW",
            of="convolutions",
            optimizers=adamw,
            first_lr=0.004,
            seeds=5,
            kept_out=True,
        ),
    )
}
SMOKE = Budgeted("smoke", "digits", momentum, cosine, 1_200, 8, 0.05, seeds=2, taken_for_best=4)


KEPT = "kept"


class BySlopeAlone(Find):
    """What `Find` would be without a noise scale: √E/σ^2.2, and a constant for these workloads."""

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        with patch.object(find, "best_batch_size", lambda e, _, slope: e**0.5 / slope**2.2 / 450):
            return super().__call__(noise_scale, plan, progress)


def megatron_ramp(start: int, examples: int) -> str:
    """The ramp in Megatron-LM's example of GPT-3: in equal parts to the batch size, in 4 %.

    `--rampup-batch-size 16 16 5859375` of 146,484,375 samples, to a batch size of 1,536.
    """
    sizes = (
        [round(start * part / 96) for part in range(1, 97)] if start > 96 else range(1, start + 1)
    )
    ends = 0.04 * examples
    return " ".join(f"{round(ends * n / len(sizes))}:{size}" for n, size in enumerate(sizes))


POLICIES: dict[str, tuple[Callable[[int, int], Any], LearningRateScaling]] = {
    KEPT: (lambda start, examples: None, "none"),
    "auto": (lambda start, examples: "auto", "auto"),
    "by the examples": (lambda start, examples: {0: round(blind_batch_size(examples))}, "auto"),
    "half of that": (
        lambda start, examples: {0: round(FIRST * blind_batch_size(examples))},
        "auto",
    ),
    "slope alone": (lambda start, examples: BySlopeAlone(), "auto"),
    "seesaw": (lambda start, examples: "seesaw", "sqrt"),
    "nanochat": (lambda start, examples: "nanochat", "auto"),
    "megatron": (megatron_ramp, "none"),
}
BLIND = ("by the examples", "half of that")
STARTS = {"B*/8": 1 / 8, "B*/4": 1 / 4, "B*": 1.0, "4 B*": 4.0}
LOST, STEPS = 1.0, 2.2
"""Of a start served well: the loss over the best one, in percent, and the steps over B*'s."""


def budgeted(name: str) -> Budgeted:
    return SMOKE if name == SMOKE.name else BUDGETS[name]


def final_loss(task: tuple[str, str, int, float, int]) -> tuple[float, int, list[list[float]]]:
    """Train a budget; return the held-out loss at its end, the steps, and the moves."""
    name, policy, start, lr, seed = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    budget = budgeted(name)
    workload = budget.workload
    model = workload.seeded_model(seed).to(budget.device)
    optimizers = budget.optimizers(model, lr)
    make, lr_scaling = POLICIES[policy]
    if policy in BLIND and all(isinstance(one, torch.optim.SGD) for one in optimizers):
        lr_scaling = "linear"  # as under "auto"
    controller, meter = None, None
    if policy != KEPT:
        controller = BatchSizeController(
            Plan(start, 1),
            optimizers,
            make(start, budget.examples),
            lr_scaling=lr_scaling,
            min_batch_size=1,
            max_batch_size=budget.examples // 20,
            max_device_batch_size=budget.examples // 20,
        )
        controller.clock.end_with(steps_of_epochs=budget.examples / start)
        if controller.settings.needs_noise_scale:
            meter = NoiseScaleMeter(model, unit=workload.unit)
            meter.follow()
        controller.begin()
    data = workload.data()[0]
    generator = torch.Generator().manual_seed(1000 + seed)
    done, steps = 0, 0
    while done < budget.examples:
        size = start if controller is None else int(controller.plan.batch_size)
        size = min(size, budget.examples - done)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * rate(budget.schedule, done / budget.examples)
            optimizer.zero_grad()
        chosen = torch.randint(len(data[0]), (size,), generator=generator)
        x, y = (part[chosen].to(budget.device) for part in data)
        loss = workload.loss(model, (x, y))
        if controller is not None:
            controller.add_loss(loss, size)
        if meter is None:
            loss.backward()
        else:
            meter.backward(loss, local_batch_size=size)
            meter.step()
        for optimizer in optimizers:
            optimizer.step()
        done, steps = done + size, steps + 1
        if controller is not None:
            controller.clock.advance(size / start)
            controller.update(meter, examples=size)
    found = workload.held_out_loss(model.cpu())
    moves = [] if controller is None else [[m.step, m.after.batch_size] for m in controller.moves]
    return (found if math.isfinite(found) else math.inf), steps, moves[:: len(moves) // 20 + 1]


class Runs:
    """All runs so far, and a pool to make more."""

    def __init__(
        self, rows: list[Row], pool: ProcessPoolExecutor, save: Callable[[], None]
    ) -> None:
        self.rows, self.pool, self.save = rows, pool, save

    def losses(self, name: str, policy: str, start: int, lr: float) -> dict[int, float]:
        """Losses by seed."""
        return {row["seed"]: row["loss"] or math.inf for row in self.of(name, policy, start, lr)}

    def of(self, name: str, policy: str, start: int, lr: float) -> list[Row]:
        wanted = (name, policy, start)
        return [
            row
            for row in self.rows
            if (row["workload"], row["policy"], row["start"]) == wanted
            and math.isclose(row["lr"], lr, rel_tol=1e-6)
        ]

    def make(
        self, name: str, policy: str, start: int, lrs: Sequence[float], seeds: Iterable[int]
    ) -> None:
        """Train what is missing of these learning rates and seeds."""
        tasks = [
            (name, policy, start, lr, seed)
            for lr in lrs
            for seed in seeds
            if seed not in self.losses(name, policy, start, lr)
        ]
        if not tasks:
            return
        for task, (loss, steps, moves) in zip(tasks, self.pool.map(final_loss, tasks), strict=True):
            known = {"loss": round(loss, 6) if math.isfinite(loss) else None, "steps": steps}
            names = ("workload", "policy", "start", "lr", "seed")
            self.rows.append(dict(zip(names, task, strict=True)) | known | {"moves": moves})
        self.save()
        mean = statistics.fmean(self.losses(name, policy, start, lrs[0]).values())
        print(f"{name}: {policy} from {start}, lr {lrs[0]:.3g}: {mean:.4f}", flush=True)

    def tried(self, name: str, size: int) -> dict[float, float]:
        """Mean loss of each learning rate of a fixed batch size, by the seeds that choose."""
        rates = {
            r["lr"]
            for r in self.rows
            if (r["workload"], r["policy"], r["start"]) == (name, KEPT, size)
        }
        found = {lr: self.losses(name, KEPT, size, lr) for lr in sorted(rates)}
        return {
            lr: statistics.fmean(loss for seed, loss in losses.items() if seed < FRESH)
            for lr, losses in found.items()
        }

    def best_rate(self, name: str, size: int) -> float | None:
        """The best learning rate of a fixed batch size, if it lies between worse ones."""
        tried = self.tried(name, size)
        if not tried:
            return None
        best = min(tried, key=lambda lr: tried[lr])
        return best if min(tried) < best < max(tried) else None

    def front(self, budget: Budgeted) -> dict[int, float]:
        """The mean loss of each fixed batch size at its best learning rate, where it is known."""
        sizes = {row["start"] for row in self.rows if row["workload"] == budget.name}
        rates = {size: self.best_rate(budget.name, size) for size in sorted(sizes)}
        judged = {
            size: self.judged(budget, KEPT, size, lr)
            for size, lr in rates.items()
            if lr is not None
        }
        return {
            size: statistics.fmean(losses.values()) for size, losses in judged.items() if losses
        }

    def judged(self, budget: Budgeted, policy: str, start: int, lr: float) -> dict[int, float]:
        """Losses by seed, of the seeds that batch sizes and policies are compared by."""
        losses = self.losses(budget.name, policy, start, lr)
        return {seed: loss for seed, loss in losses.items() if seed in budget.judges}


def largest_good(front: dict[int, float]) -> float:
    """B*: the largest fixed batch size within 0.15 % of the least loss, between those trained."""
    limit = min(front.values()) * (1 + GOOD / 100)
    size = max(size for size, loss in front.items() if loss <= limit)
    larger = min((other for other in front if other > size), default=None)
    if larger is None:
        return float(size)
    share = (limit - front[size]) / (front[larger] - front[size])
    return float(size * (larger / size) ** share)


def nearest_power(size: float) -> int:
    """The power of two nearest to a batch size."""
    return max(1, round(2 ** round(math.log2(size))))


GOOD = 0.15
"""How much larger than the least one, in percent, the loss of a good batch size may be."""


def untried(runs: Runs, budget: Budgeted, size: int, first_lr: float) -> Iterator[list[float]]:
    """Learning rates to try, by factors of 2 and then of √2, until the best is between others."""
    for factor in (2.0, math.sqrt(2)):
        while True:
            tried = runs.tried(budget.name, size)
            if not tried:
                yield [first_lr]
                continue
            best = min(tried, key=lambda lr: tried[lr])
            around = (best / factor, best * factor)
            wanted = [
                x for x in around if not any(math.isclose(x, lr, rel_tol=1e-6) for lr in tried)
            ]
            if not wanted or max(tried) / min(tried) > 3000:
                break
            yield wanted


def unsearched(runs: Runs, budget: Budgeted) -> Iterator[tuple[int, float]]:
    """Batch sizes to try, each with a learning rate to begin with, that of its neighbour."""
    done: set[int] = set()
    while True:
        front = runs.front(budget)
        if not done:
            wanted = {budget.first_batch_size}
        else:
            best = budget.taken_for_best or min(front, key=lambda size: front[size])
            wanted = {best // 2, best, 2 * best}
            if min(front) < best < max(front):
                largest = nearest_power(largest_good(front))
                wanted |= {round(largest * 2.0**k) for k in range(-3, 4)}
            wanted -= {0}
        missing = sorted(wanted - done)
        if not missing:
            return
        size = min(missing, key=lambda x: min((abs(math.log(x / y)) for y in done), default=0.0))
        done.add(size)
        near = min(front, key=lambda y: abs(math.log(size / y)), default=size)
        yield size, runs.best_rate(budget.name, near) or budget.first_lr


def train(runs: Runs, budget: Budgeted, deadline: float) -> bool:
    """Train what is missing; return whether all is there."""
    for size, first_lr in unsearched(runs, budget):
        complete = False
        while not complete:
            for lrs in untried(runs, budget, size, first_lr):
                if time.monotonic() > deadline:
                    return False
                runs.make(budget.name, KEPT, size, lrs, range(SEARCHED))
            # Two seeds may have flattered a rate: then another one is the best after all seeds.
            lr = runs.best_rate(budget.name, size)
            seeds = {*range(budget.seeds), *budget.judges}
            complete = lr is None or seeds <= {*runs.losses(budget.name, KEPT, size, lr)}
            if lr is not None and not complete:
                runs.make(budget.name, KEPT, size, [lr], range(budget.seeds))
                if runs.best_rate(budget.name, size) == lr:
                    runs.make(budget.name, KEPT, size, [lr], budget.judges)
    for policy in POLICIES:
        for start in starts_of(runs, budget).values():
            if (lr := runs.best_rate(budget.name, start)) is not None:
                if time.monotonic() > deadline:
                    return False
                runs.make(budget.name, policy, start, [lr], budget.scheduled)
    return True


def starts_of(runs: Runs, budget: Budgeted) -> dict[str, int]:
    """The batch sizes that scheduled runs start from, as far as they were searched."""
    front = runs.front(budget)
    if not front:
        return {}
    largest = largest_good(front)
    found = {nearest_power(largest * factor): name for name, factor in STARTS.items()}
    return {name: size for size, name in found.items() if runs.best_rate(budget.name, size)}


class Compared(NamedTuple):
    """One scheduled run beside the front."""

    lost: float
    """Loss over that of the best fixed batch size at the same seed, in percent."""
    steps: float
    """Steps over those of B*."""
    regret: float
    """Steps over those of the front at equal loss; over those of B* if none is as good."""

    @property
    def served_well(self) -> bool:
        return self.lost <= LOST and self.steps <= STEPS


def compared(runs: Runs, budget: Budgeted, policy: str, start: int) -> list[Compared]:
    """Each run of a policy from a start, at the learning rate that is the best there."""
    front, lr = runs.front(budget), runs.best_rate(budget.name, start)
    best = min(front, key=lambda size: front[size])
    own = runs.judged(budget, KEPT, best, runs.best_rate(budget.name, best) or 0.0)
    steps = budget.examples / largest_good(front)
    found = []
    for row in runs.of(budget.name, policy, start, lr or 0.0):
        if row["seed"] in own:
            ratio = (row["loss"] or math.inf) / own[row["seed"]]
            of_front = steps_of_front(front, budget.examples, ratio * front[best]) or steps
            lost = 100 * (ratio - 1)
            found.append(Compared(lost, row["steps"] / steps, row["steps"] / of_front))
    return found


def steps_of_front(front: dict[int, float], examples: int, loss: float) -> float | None:
    """The fewest steps in which a fixed batch size has this loss, between those trained."""
    before = None
    for size in sorted(front, reverse=True):
        steps = examples / size
        if front[size] <= loss:
            if before is None:
                return steps
            share = (before[1] - loss) / (before[1] - front[size])
            return float(before[0] * (steps / before[0]) ** share)
        before = steps, front[size]
    return None


def report(runs: Runs, names: Sequence[str], console: Console) -> None:
    """Print the front, each policy beside it from each start, and all starts together."""
    together: dict[str, dict[tuple[str, int], list[Compared]]] = defaultdict(dict)
    for name in names:
        budget = budgeted(name)
        front = runs.front(budget)
        console.print(
            f"\n[bold]{name}[/], {budget.examples:,} examples{', kept out' * budget.kept_out}"
        )
        for size, loss in front.items():
            lr = runs.best_rate(name, size)
            console.print(
                f"  fixed {size:>4}: loss {loss:.4f}, {budget.examples // size} steps, lr {lr:.3g}"
            )
        if not front:
            continue
        console.print(f"  B* {largest_good(front):.3g}; {of_the_best(runs, budget)}")
        table = Table("start", "policy", "runs", "loss, %", "steps, of B*'s", "regret")
        tried = dict.fromkeys(row["policy"] for row in runs.rows if row["workload"] == name)
        for label, start in starts_of(runs, budget).items():
            for policy in dict.fromkeys([*POLICIES, *tried]):
                if found := compared(runs, budget, policy, start):
                    together[policy][name, start] = found
                    lost, steps, regret = (statistics.fmean(x) for x in zip(*found, strict=True))
                    cells = f"{len(found)}", f"{lost:+.2f}", f"{steps:.2f}", f"{regret:.2f}"
                    table.add_row(f"{label}, {start}", policy, *cells)
        console.print(table)
    for kind, of in {
        "All starts": (True, False),
        "Without images, whose losses scatter": (False,),
        "Images": (True,),
    }.items():
        console.print(f"\n{kind}: each start weighs the same")
        console.print(summary(together, of))


def of_the_best(runs: Runs, budget: Budgeted) -> str:
    """Say how much of the best fixed batch size's loss is luck."""
    front = runs.front(budget)
    size = min(front, key=lambda size: front[size])
    rate = runs.best_rate(budget.name, size) or 0.0
    found = [*runs.judged(budget, KEPT, size, rate).values()]
    near = [a <= b * (1 + LOST / 100) for a, b in permutations(found, 2)]
    return (
        f"the best, {size}, had {runs.tried(budget.name, size)[rate]:.4f} by the seeds that chose"
        f" its rate; of two trainings one ends at most {LOST:g} % above the other in"
        f" {statistics.fmean(near):.0%} of the pairs"
    )


def summary(
    together: dict[str, dict[tuple[str, int], list[Compared]]], scatters: Sequence[bool]
) -> Table:
    """All starts of each policy in a row, of workloads whose losses scatter or do not."""
    names = "policy", "starts", "served well", "loss, %", "worst", "steps", "regret", "worst"
    table = Table(*names)
    for policy, of_starts in together.items():
        starts = [
            found for (name, _), found in of_starts.items() if budgeted(name).scatters in scatters
        ]
        if not starts:
            continue
        well = statistics.fmean(sum(x.served_well for x in found) / len(found) for found in starts)
        means = [[statistics.fmean(x) for x in zip(*found, strict=True)] for found in starts]
        lost, steps, regret = ([*x] for x in zip(*means, strict=True))
        table.add_row(
            policy,
            f"{len(starts)}",
            f"{well:.0%}",
            f"{statistics.median(lost):+.2f}",
            f"{max(lost):+.1f}",
            f"{statistics.median(steps):.2f}",
            f"{statistics.median(regret):.2f}",
            f"{max(regret):.1f}",
        )
    return table


def main() -> None:
    command = Command.read(__doc__.splitlines()[0], list(BUDGETS))
    names = [SMOKE.name] if command.smoke else command.names
    rows = [] if command.smoke else saved_rows(NAME)
    console = Console(width=110)
    context = get_context("spawn")

    def save() -> None:
        if not command.smoke:
            write_results(NAME, rows, quiet=True)

    with ProcessPoolExecutor(2, mp_context=context) as pool:
        runs = Runs(rows, pool, save)
        if not command.report:
            for name in names:
                if budgeted(name).device == "cuda" and not torch.cuda.is_available():
                    print(f"{name}: left out, it needs a GPU", flush=True)
                    continue
                train(runs, budgeted(name), command.deadline)
        report(runs, names, console)


if __name__ == "__main__":
    main()
