# SPDX-License-Identifier: Apache-2.0
"""A sweep over batch sizes: what is trained, to which goal, and which settings are searched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from noisescale.checks import refuse, require_count, require_positive
from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Entry, Job, Record, Task, Training
from noisescale.lab.parameters import LEARNING_RATE, LOG, SWEPT, Parameter, range_parameter
from noisescale.lab.sweep.results import TrialResult, trial_name
from noisescale.lab.sweep.search import Progress, Search, limit_of, progress_of
from noisescale.plan import Plan, plan_for

AROUND = 8.0
"""The learning rate is searched between the module's own divided by this, and times this."""


STREAM = 1_000_000
"""Examples that count as an epoch of a stream, which does not say how long it is."""


OF_A_BATCH = (
    "{} is logged by the training step: it is that of one batch. It scatters most at small batch"
    " sizes, where a lucky batch may have a good one. Log a metric in `validation_step`."
)

FIXED = (
    "The module has a hyperparameter `batch_size` = {}. It stays as it is at all batch sizes. If"
    " the loss or a schedule is made with it, use the size of the batch instead."
)


@dataclass(frozen=True)
class ModuleDefaults:
    """What the module and its data bring along."""

    examples: float
    """The number of training examples; infinite for a stream."""
    batch_size: float | None
    """The batch size of the data loader, over all devices; None without a loader."""
    learning_rate: float
    """The peak of the schedule."""
    beta2: float | None = None
    """The second beta of an Adam."""
    schedules: tuple[str, ...] = ()
    """The kinds of its learning-rate schedules."""
    schedules_fit: bool = False
    """Whether these are known to be as long as the training is."""
    of_a_batch: bool = False
    """Whether the metric of the goal is logged by the training step, and so is that of a batch."""
    met: bool = False
    """Whether a single step has met the goal, by the first batch of the validation."""
    seeded: bool = False
    """Whether the function that makes module and data sets a seed itself."""
    fixed_batch_size: int | None = None
    """`batch_size` among the hyperparameters of the module. It stays as it is."""
    momentum: float | None = None
    """The momentum of an SGD, or the first beta of an Adam."""
    weight_decay: float | None = None
    """Where there is some, else 0."""

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> ModuleDefaults:
        """Return what `asdict` was called on, also if JSON had it."""
        return cls(**{**read, "schedules": tuple(read["schedules"])})

    def steps_of_epoch(self, size: float) -> int:
        """Return the steps of an epoch. A stream has none: a million examples count as one."""
        examples = self.examples if math.isfinite(self.examples) else STREAM
        return max(1, math.floor(examples / size))


def doubts_about_module(own: ModuleDefaults, metric: str) -> list[str]:
    """Return what makes trainings of a module at several batch sizes doubtful."""
    found = [OF_A_BATCH.format(metric)] if own.of_a_batch else []
    if own.fixed_batch_size is not None:
        found.append(FIXED.format(own.fixed_batch_size))
    return found


@dataclass(frozen=True)
class SweepJob(Job):
    """The settings of a sweep. All workers have the same ones."""

    own: ModuleDefaults
    goal: Goal
    batch_sizes: tuple[int, ...]
    search: Search
    epochs: float
    """The most epochs at the smallest batch size."""
    max_device_batch_size: int | None = None

    kind: ClassVar[str] = "sweep"

    def __post_init__(self) -> None:
        """Check that each batch size can be trained."""
        for size in self.batch_sizes:
            self.plan(size)
            if size > self.own.examples:
                refuse(
                    "batch_sizes",
                    f"be at most the number of examples, {self.own.examples:,.0f}",
                    f"{size:,}",
                    "Leave larger ones out.",
                )
        require_positive("epochs", self.epochs, "Give 50, for example.")

    @property
    def smallest(self) -> int:
        """The smallest batch size."""
        return self.batch_sizes[0]

    def plan(self, size: int) -> Plan:
        """Return how a batch is made up, of equal micro-batches.

        Raises:
            ValueError: If the devices cannot share it equally.
        """
        return equal_shares(size, self.training.devices, self.max_device_batch_size or size)

    def most_steps(self, size: int) -> int:
        """Return the steps after which a training ends without its goal.

        A batch k times the smallest may take √k times the epochs: a training beyond its critical
        batch size needs more of them.
        """
        grown = math.sqrt(size / self.smallest)
        return math.ceil(self.epochs * grown * self.own.steps_of_epoch(size))

    def parameters(self, size: int) -> list[Parameter]:
        """Return what is searched at a batch size, with its ranges.

        Without a range for the learning rate, it is searched around the module's own one times
        √(B/B0), where B0 is the batch size of the module's loader. If the rule is far off, the
        best one is at the edge and the range is widened.
        """
        base = self.own.batch_size or self.smallest
        found = list(self.search.parameters)
        if all(p.name != LEARNING_RATE for p in found):
            middle = self.own.learning_rate * math.sqrt(size / base)
            found.insert(0, range_parameter(LEARNING_RATE, middle / AROUND, middle * AROUND, LOG))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON can hold them."""
        found = asdict(self)
        del found["search"]["parameters"]
        found["search"]["dimensions"] = [
            {"name": p.name, "low": p.low, "high": p.high} for p in self.search.parameters
        ]
        return found

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> SweepJob:
        """Return what `as_dict` was called on."""
        search = dict(read["search"])
        search["parameters"] = tuple(
            range_parameter(**each, kind=SWEPT[each["name"]]) for each in search.pop("dimensions")
        )
        return cls(
            Training(**read["training"]),
            ModuleDefaults.from_dict(read["own"]),
            Goal(**read["goal"]),
            tuple(read["batch_sizes"]),
            Search(**search),
            read["epochs"],
            read["max_device_batch_size"],
        )

    def task(self, size: int, point: Mapping[str, float], seed: int) -> Task:
        """Return the task to train a point once."""
        base = self.own.batch_size or self.smallest
        spec = {
            "kind": self.kind,
            "training": asdict(self.training),
            "goal": asdict(self.goal),
            **training_spec(
                self.own, self.plan(size), self.most_steps(size), base, dict(point), seed
            ),
        }
        return Task(trial_name(size, point, seed), spec)

    def progress(self, size: int, results: Sequence[TrialResult]) -> Progress:
        """Return where the search at a batch size stands, from all results at this batch size."""
        return progress_of(self.search, self.parameters(size), results)

    def next_tasks(self, entries: Mapping[str, Entry]) -> list[Task]:
        """Return the tasks that can be trained now, see `Job`.

        Small batch sizes come first: their trainings have the most steps and take longest. Shorter
        ones fill the time of the other workers at the end.
        """
        return [
            self.task(size, point, seed)
            for size in self.batch_sizes
            for point, seed in self.progress(size, results_at(size, entries)).missing
        ]

    def limit_of(self, spec: Record, entries: Mapping[str, Entry]) -> float:
        """Return the steps after which a training cannot win any more."""
        return math.inf if spec["seed"] else limit_of(results_at(spec["batch_size"], entries))


def training_spec(
    own: ModuleDefaults, plan: Plan, steps: int, base: float, hyperparameters: Record, seed: int
) -> dict[str, Any]:
    """Return what each training of a sweep or a search needs to know.

    Args:
        own: What module and data bring along.
        plan: How a batch is made up.
        steps: The most steps.
        base: The batch size of the module's own betas.
        hyperparameters: To set.
        seed: Of the training.
    """
    finite, epoch = math.isfinite(own.examples), own.steps_of_epoch(plan.batch_size)
    return {
        "batch_size": int(plan.batch_size),
        "device_batch_size": int(plan.device_batch_size),
        "accumulation": plan.accumulation,
        "hyperparameters": hyperparameters,
        # The same half-life in examples (Marek et al. 2025).
        "beta2": None if own.beta2 is None else own.beta2 ** (plan.batch_size / base),
        "seed": seed,
        "most_steps": steps,
        "most_epochs": math.ceil(steps / epoch) if finite else -1,
        # Without the rest of an epoch, which would make a smaller step.
        "batches_of_epoch": epoch * plan.accumulation if finite else None,
    }


def results_at(size: int, entries: Mapping[str, Entry]) -> list[TrialResult]:
    """Return the results at a batch size by seed, and then by hyperparameters.

    The order does not depend on who trained what.
    """
    results = [
        TrialResult.of(entry)
        for entry in entries.values()
        if entry.result and entry.spec["batch_size"] == size
    ]
    return sorted(results, key=lambda each: (each.seed, tuple(each.hyperparameters.values())))


def equal_shares(size: int, devices: int, most: int) -> Plan:
    """Return how a batch is made up, of equal micro-batches of at most `most` examples.

    Raises:
        ValueError: If the devices cannot share it equally.
    """
    plan = plan_for(size, devices=devices, max_device_batch_size=most)
    if plan.batch_size != size:
        count = math.ceil(size / (devices * most))
        while size % (devices * count) and count < size:
            count += 1
        if size % (devices * count):
            refuse(
                "batch_sizes",
                f"be multiples of the number of devices, {devices}",
                f"{size}",
                "Give other batch sizes.",
            )
        plan = Plan(size // (devices * count), count, devices)
    return plan


def read_batch_sizes(given: str | Iterable[int]) -> tuple[int, ...]:
    """Return batch sizes in rising order.

    Args:
        given: The batch sizes, or a text: a list, or the first and the last power of two.

    Raises:
        ValueError: If a text has another form, or there are fewer than two batch sizes.

    Examples:
        >>> read_batch_sizes("16..128"), read_batch_sizes("24,96"), read_batch_sizes([96, 24])
        ((16, 32, 64, 128), (24, 96), (24, 96))
    """
    remedy = "Write, for example, 16..2048 or 16,64,256."
    text, dots = (given, ".." in given) if isinstance(given, str) else (list(given), False)
    parts = (text.split("..", 1) if dots else text.split(",")) if isinstance(text, str) else text
    try:
        sizes = [int(part) if isinstance(part, str) else part for part in parts]
    except ValueError:
        refuse("batch_sizes", "be whole numbers", repr(text), remedy)
    for size in sizes:
        require_count("batch_sizes", size, remedy)
    if dots:
        low, high = sizes
        sizes = [low * 2**k for k in range(64) if low * 2**k <= high]
    rising = tuple(sorted({int(size) for size in sizes}))
    if len(rising) < 2:
        why = f", which is {rising[0]} alone" if rising else ""
        why = ", which ends before it begins" if dots and not rising else why
        refuse("batch_sizes", "be two batch sizes or more", f"{text!r}{why}", remedy)
    return rising


def check_goal(text: str) -> Goal:
    """Return a goal that has a side.

    Raises:
        ValueError: If the goal has none, or another form.
    """
    try:
        goal = Goal.read(text)
    except ValueError:
        remedy = "Write, for example, val_loss<=0.15 or val_acc>=0.9."
        refuse("goal", "be a metric's name, <= or >=, and a value", repr(text), remedy)
    if not goal.side:
        refuse(
            "goal",
            "say whether the metric is to fall or to rise",
            repr(text),
            f"Write {goal.metric}<={goal.value:g} or {goal.metric}>={goal.value:g}.",
        )
    return goal
