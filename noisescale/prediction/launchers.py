# SPDX-License-Identifier: Apache-2.0
"""A ramp of batch sizes in the words of the programs that train language models.

Read in Megatron-LM and torchtitan of August 2026, in nanochat of July 2026, and in Lightning 2.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from noisescale.refusal import Refusal

LAUNCHERS = {
    "megatron": "Megatron-LM",
    "torchtitan": "torchtitan",
    "nanochat": "nanochat",
    "lightning": "Lightning",
}
"""The names of launchers, and how they are written."""


class Stage(NamedTuple):
    """A batch size, and where in the run it begins."""

    start: float
    """The amount of the run before it, in the unit of the run."""
    batch_size: int


Written = tuple[Sequence[str], Sequence[str]]
"""The lines that a launcher reads, and what a user has to know of them."""


@dataclass(frozen=True)
class _Counts:
    """The ramp in sequences and in tokens."""

    launcher: str
    stages: Sequence[Stage]
    examples: float
    unit: str
    sequence_length: int | None

    @property
    def length(self) -> int:
        """Tokens of a sequence; refused if it was not given."""
        if self.sequence_length is None:
            raise Refusal(
                "sequence_length",
                f"be given for {LAUNCHERS[self.launcher]}, which counts tokens in sequences",
                f"none, for a run that counts {self.unit}",
                "Give the tokens of a sequence.",
            )
        return self.sequence_length

    def tokens(self, amount: float) -> int:
        """Return an amount of the run's unit in tokens."""
        return round(amount) if self.unit == "tokens" else round(amount) * self.length

    def sequences(self, amount: float) -> int:
        """Return an amount of the run's unit in sequences."""
        return round(amount / self.length) if self.unit == "tokens" else round(amount)


def lines_for(
    launcher: str,
    stages: Sequence[Stage],
    examples: float,
    unit: str,
    sequence_length: int | None,
) -> Written:
    """Return a ramp as a launcher reads it.

    Args:
        launcher: One of `LAUNCHERS`.
        stages: Batch sizes, by rising starts from 0 on.
        examples: Of the whole run, in its unit.
        unit: What the run counts: "tokens", "sequences" or another name of examples.
        sequence_length: Tokens of a sequence; None if it was not given.

    Raises:
        ValueError: If the launcher counts other than the run, and no length was given.

    Examples:
        >>> stages = [Stage(0, 16), Stage(4000, 32)]
        >>> lines, _ = lines_for("lightning", stages, 64_000, "examples", None)
        >>> print(*lines)
        BatchSizeScheduler("0:16 4000:32", max_examples=64000)
        >>> lines, _ = lines_for("megatron", stages, 64_000, "sequences", 2048)
        >>> print(*lines)
        --step-batch-size-schedule "0:16 8192000:32" --train-samples 64000 --seq-length 2048
    """
    write = _WRITE[launcher]
    return write(_Counts(launcher, stages, examples, unit, sequence_length))


def _megatron(ramp: _Counts) -> Written:
    sizes = [ramp.sequences(stage.batch_size) for stage in ramp.stages]
    starts = [ramp.sequences(stage.start) for stage in ramp.stages]
    schedule = " ".join(
        f"{start * ramp.length}:{size}" for start, size in zip(starts, sizes, strict=True)
    )
    rest = f"--train-samples {ramp.sequences(ramp.examples)} --seq-length {ramp.length}"
    notes = [
        "The schedule is `tokens:sequences`. Leave `--global-batch-size` out: Megatron-LM refuses"
        " both. Each batch size has to be a multiple of `--micro-batch-size` times the"
        " data-parallel size.",
        "Megatron-LM changes no learning rate with the batch size.",
    ]
    if len(sizes) > 1:
        increment = math.gcd(*(size - sizes[0] for size in sizes[1:]))
        way = "the same" if len(sizes) == 2 and increment else "equal parts in place of these"
        notes.insert(
            1,
            f"Until April 2026 it had no such schedule, but: --global-batch-size {sizes[-1]}"
            f" --rampup-batch-size {sizes[0]} {increment} {starts[-1]} ({way}). Later versions"
            " ignore that one.",
        )
    return [f'--step-batch-size-schedule "{schedule}" {rest}'], notes


def _torchtitan(ramp: _Counts) -> Written:
    sizes = [ramp.tokens(stage.batch_size) for stage in ramp.stages]
    starts = [ramp.tokens(stage.start) for stage in ramp.stages]
    ends = [*starts[1:], ramp.tokens(ramp.examples)]
    steps: list[int] = []
    for start, end, size in zip(starts, ends, sizes, strict=True):
        steps.append((steps[-1] if steps else 0) + max(1, round((end - start) / size)))
    lines, notes = [], []
    if len(sizes) > 1:
        lines = [
            f"config.lr_scheduler.total_steps = {steps[-1]}",
            "config.checkpoint.enable = True",
            "config.checkpoint.last_save_model_only = False",
        ]
        notes = [
            "torchtitan has no ramp: one number of tokens holds for a whole training. Train"
            f" {len(sizes)} times in the same `dump_folder`: each training goes on from the last"
            " checkpoint. The learning-rate schedule counts steps: it does not follow the tokens."
        ]
    for k, (size, last) in enumerate(zip(sizes, steps, strict=True), 1):
        lines += [f"# {k} of {len(sizes)}: from the last checkpoint"] * (k > 1)
        lines += [
            f"config.training.num_tokens_per_train_step = {size}",
            f"config.training.steps = {last}",
        ]
    notes.append(
        "A number of tokens has to be a multiple of `num_tokens_per_microbatch_per_dp_rank` times"
        " the data-parallel degree and the pipeline's micro-batches."
    )
    if ramp.sequence_length is not None:
        old = ", ".join(str(ramp.sequences(stage.batch_size)) for stage in ramp.stages)
        notes.append(f"Up to version 0.2.2 set `training.global_batch_size`, in sequences: {old}.")
    return lines, notes


def _nanochat(ramp: _Counts) -> Written:
    top = ramp.tokens(ramp.stages[-1].batch_size)
    counts = "`--total-batch-size` counts tokens. {} has to be a multiple of `--device-batch-size`"
    counts += " times `--max-seq-len` times the devices."
    if len(ramp.stages) == 1:
        return [f"--total-batch-size={top}"], [counts.format("It")]
    own = ", ".join(
        f"{ramp.tokens(stage.batch_size)} from {100 * stage.start / ramp.examples:.3g} % on"
        for stage in ramp.stages
    )
    return [f"--total-batch-size={top} --batch-ramp=1"], [
        "nanochat itself has no ramp. `--batch-ramp` is of its pull request 851, which was open in"
        " September 2026. Without it leave `--batch-ramp=1` out: the batch size is then constant."
        " The learning rate of each part goes with the square root of its batch size there.",
        "That ramp is fixed: a quarter of the batch up to 3 % of the tokens, half of it up to 10 %."
        f" The ramp of this run cannot be written in it: {own}.",
        counts.format("A quarter of it"),
    ]


def _lightning(ramp: _Counts) -> Written:
    schedule = " ".join(f"{round(stage.start)}:{stage.batch_size}" for stage in ramp.stages)
    return [f'BatchSizeScheduler("{schedule}", max_examples={round(ramp.examples)})'], [
        f"Both numbers count {ramp.unit}, as this run did. The learning rate goes with the square"
        " root of the batch size: `lr_scaling` changes that.",
        "Lightning's own GradientAccumulationScheduler changes the batch size between epochs"
        " alone. The record of a run does not have its epochs, so this ramp is not written in it.",
    ]


_WRITE: dict[str, Callable[[_Counts], Written]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "nanochat": _nanochat,
    "lightning": _lightning,
}
