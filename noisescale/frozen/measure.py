# SPDX-License-Identifier: Apache-2.0
"""`measure`: the noise scale at fixed weights, and how a model can be measured in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from scipy.stats import spearmanr

from noisescale.bounded import Bounded
from noisescale.checks import require_choice
from noisescale.collectors.groups import Groups
from noisescale.estimation.independent_batches import LEAST, BatchProducts, IndependentBatches
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.frozen.comparison import Order, Way, compare
from noisescale.frozen.frozen_fit import BatchStatistics, FitRequest, frozen_fit
from noisescale.frozen.judged_monitor import JudgedMonitor
from noisescale.frozen.measurement import Measurement
from noisescale.frozen.order import (
    can_be_shuffled,
    draws_at_random,
    shuffled_batches,
    with_replacement,
)
from noisescale.frozen.stopping_rule import StoppingRule, comparison_of, say
from noisescale.frozen.targets import data_to_fit, module_and_train_data
from noisescale.frozen.wrapped_network import WrappedNetwork
from noisescale.guard import Guard
from noisescale.history.looks import Look, line_of, record_beside, runs_of
from noisescale.history.optimizers import OptimizerMix, parameters_of
from noisescale.history.reading import read_document
from noisescale.history.record import RECORD, append_whole, cut_half_line
from noisescale.lightning.checkpoints import Checkpoint
from noisescale.refusal import FileRefusal, Refusal
from noisescale.user_code.targets import is_first, refuse_out_of_memory

WIDTH = 2.25
"""The interval of the noise scale that is narrow enough: its upper over its lower end."""

ALLOWANCE = 0.25
"""What reading on in a stream may take more, as a share of the seconds."""

DRIFTS = 1e-4
"""A trend of the noise along the batches that is less likely than this is no chance."""

_AT_RANDOM = "batches are drawn at random, as those compared here were"


def measure(
    target: Any,
    data: Any = None,
    *,
    batches: int | Literal["auto"] = "auto",
    checkpoint: str | PathLike[str] | None = None,
    run: str | PathLike[str] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    width: float = WIDTH,
    seconds: float = 600.0,
    batch_size: int | None = None,
    groups: Groups | None = None,
    batch_size_fn: Callable[[Any], float] | None = None,
    weight_fn: Callable[[Any], Any] | None = None,
    ways: Sequence[Literal["half"]] = ("half",),
    elementwise: bool = False,
    unit: str | None = None,
    confidence: float = 0.95,
    devices: int = 1,
    nodes: int = 1,
    accelerator: str = "auto",
    strategy: Any = "auto",
    precision: Any = None,
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure the noise scale at fixed weights, from independent batches.

    Gradients of batches of the loader are taken in a fit that steps no weight. The scatter of
    whole batches says what the noise is; nothing is taken for granted of loss or model. On the same
    batches the ways that measure in training are tried, and judged by that. The module and the
    global random number generators are left as they were.

    Args:
        target: A LightningModule; a network with a `loss`; the Trainer of transformers; or a
            function that returns one of these, alone or with its data; or a text that names one,
            "file.py:name" or "package.module:name".
        data: A DataLoader, a Dataset with a `batch_size`, a LightningDataModule, or a pair to train
            and to validate on; or a function or a text as for `target`. Default: what the target
            returns, or has.
        batches: How many batches. "auto": until the interval is as narrow as `width`.
        checkpoint: A checkpoint of Lightning or transformers' Trainer, whose weights are measured.
        run: The folder of the checkpoint's run, which gets the noise scale as a look at that step.
            Default: the folder that the checkpoint is in, or the one above.
        loss: A function from the network and a batch to the mean loss of the batch, for a network
            that is no LightningModule.
        width: The upper end of the interval over its lower end that is narrow enough.
        seconds: Most seconds to go on for, with "auto". A quarter more may be taken to read on in a
            stream, to batches far apart.
        batch_size: Examples in a batch of a device, to be used instead of the loader's own number.
        groups: Groups of parameters, as for `NoiseScaleMonitor`.
        batch_size_fn: As for `NoiseScaleMonitor`.
        weight_fn: As for `NoiseScaleMonitor`.
        ways: Ways to judge beside micro-batches: halves, or none. Of several devices, the ranks.
        elementwise: Whether to return mean and variance of each element of the gradient, too. It
            takes a copy of the gradient more.
        unit: What examples are called. Default: "sequences" for transformers' Trainer of a model
            that takes token ids, else "examples".
        confidence: Coverage of the intervals.
        devices: Devices on each node. Their batches together are a batch.
        nodes: Number of nodes.
        accelerator: As in training.
        strategy: As in training.
        precision: As in training. Default: that of transformers' Trainer, if it is the target.
        progress: Called with a sentence now and then, for example `print`.

    Returns:
        The noise scale with its interval, and which ways measure right.

    Raises:
        ValueError: If an argument is out of range, the data have too few batches, the loss is not
            finite, or the module steps its own weights.
        OSError: If the checkpoint cannot be read.

    Examples:
        >>> import torch
        >>> data = torch.utils.data.DataLoader(torch.randn(256, 4), batch_size=16, shuffle=True)
        >>> found = measure(
        ...     torch.nn.Linear(4, 1),
        ...     data,
        ...     loss=lambda network, x: (network(x) - x.sum(1, keepdim=True)).square().mean(),
        ... )
        >>> found.noise_scale.resolved
        True

    References:
        McCandlish et al. 2018, appendix A, for what is measured.
    """
    _check(batches, width, seconds)
    for way in ways:
        require_choice("ways", way, ("half",), "Leave it out, or pass [] to judge none.")
    record = _record(checkpoint, run)
    began = time.monotonic()
    module, examples = module_and_train_data(target, data, loss)
    own_unit: str = unit or str(getattr(module, "own_unit", "examples"))
    judged = [
        JudgedMonitor(name=way, batch_size_fn=batch_size_fn, weight_fn=weight_fn) for way in ways
    ]
    ranks = devices * nodes
    asked = FitRequest(
        groups,
        batch_size_fn,
        weight_fn,
        lambda loader: not draws_at_random(loader),
        elementwise,
        far=lambda loader: batches == "auto" and ranks == 1 and not can_be_shuffled(loader),
        until=began + (1 + ALLOWANCE) * seconds,
    )
    options = {
        **{"accelerator": accelerator, "devices": devices, "num_nodes": nodes},
        **{"strategy": strategy, "use_distributed_sampler": True},
        "precision": precision or getattr(module, "own_precision", None),
    }
    saved = None if checkpoint is None else Checkpoint.read(Path(checkpoint))
    fit = partial(frozen_fit, module, checkpoint=saved, trainer_options=options)
    rule = StoppingRule(batches, width, seconds, confidence, judged, progress)

    def enough(seen: BatchStatistics) -> bool:
        if record is not None and seen.batches <= 1:  # before the time is spent
            runs_of(read_document(record).newest, own_unit, parameters_of(seen.optimizer), record)
        return rule.enough(seen)

    own = partial(fit, data_to_fit(examples, batch_size), asked, judged=judged, enough=enough)
    seen = _own_fit(own)
    random = _shuffled_fit(fit, seen, asked, ranks, rule)
    found = _Found(seen, random, ranks)
    measured = found.measurement(
        *(judged, confidence, own_unit),
        optimizer=module.own_kind
        if isinstance(module, WrappedNetwork)
        else OptimizerMix.of(seen.optimizer),
        seconds=time.monotonic() - began,
        stopped=found.why_unknown or ("all that the loader has" if seen.again else rule.reason),
        batch_size=seen.batch_size,
        left_out=seen.left_out,
        step=None if saved is None else saved.step,
        checkpoint=None if checkpoint is None else str(checkpoint),
        target=target if isinstance(target, str) else "",
    )
    if record is None or not measured.noise_scale.resolved:
        return measured
    _add_look(measured, record, parameters_of(seen.optimizer))
    return replace(measured, added_to=str(record))


def _record(checkpoint: object, run: object) -> Path | None:
    """Return the record of the run that a checkpoint is of, if it is known.

    Raises:
        Refusal: If the run that is given has none, or there is no checkpoint.
    """
    if run is None:
        return None if checkpoint is None else record_beside(Path(str(checkpoint)), RECORD)
    if checkpoint is None:
        raise Refusal("run", "be given with a checkpoint of it", "none", "Give the `checkpoint`.")
    found = Path(str(run))
    found = found if found.name == RECORD else found / RECORD
    if not found.is_file():
        raise FileRefusal(
            "run",
            f"be the folder of a run with {RECORD}",
            f"{run} without it",
            "Name the folder that the run's logger wrote to.",
        )
    return found


def _add_look(found: Measurement, record: Path, parameters: int) -> None:
    """Append a measurement to the record of its run, on rank 0."""
    scale = found.noise_scale
    look = Look(
        float(found.step or 0),
        *(scale.value, scale.low, scale.high, scale.confidence, scale.unit, scale.steps),
        *(str(found.checkpoint), parameters, round(found.seconds, 3)),
    )
    runs = runs_of(read_document(record).newest, scale.unit, parameters, record)
    if is_first():
        cut_half_line(record)
        append_whole(record, "".join(line_of(part, look) for part in runs).encode())


def _own_fit(fit: Callable[[], BatchStatistics]) -> BatchStatistics:
    """Take batches as the loader gives them."""
    with refuse_out_of_memory("batch_size", "Give a smaller `batch_size`."):
        seen = fit()
    if seen.batches < LEAST:
        raise Refusal(
            "data",
            f"have at least {LEAST} different batches",
            seen.batches,
            "Shuffle them, or give a smaller `batch_size`.",
        )
    return seen


def _shuffled_fit(
    fit: Callable[..., BatchStatistics],
    seen: BatchStatistics,
    asked: FitRequest,
    ranks: int,
    rule: StoppingRule,
) -> BatchStatistics | None:
    """Take as many batches again, drawn at random; None if the loader's are, or cannot be."""
    if draws_at_random(seen.loader) or not can_be_shuffled(seen.loader):
        return None
    say(rule.progress, "The loader does not shuffle: taking shuffled batches, too")
    until = max(rule.began + rule.seconds, time.monotonic() + (time.monotonic() - rule.began) / 2)
    with Guard()("Shuffled batches could not be taken, to compare with"):
        return fit(
            shuffled_batches(seen.loader, round(seen.batch_size / ranks)),
            replace(asked, successive=lambda _: False),
            enough=lambda some: (
                some.batches >= seen.batches or (some.batches >= LEAST and time.monotonic() > until)
            ),
        )
    return None


class _Found:
    """What the batches of a loader say, with shuffled ones beside them where it does not shuffle.

    Args:
        seen: Of the loader's own batches.
        random: Of shuffled batches; None if none were taken.
        ranks: Ranks whose batches together are a batch.
    """

    def __init__(self, seen: BatchStatistics, random: BatchStatistics | None, ranks: int) -> None:
        self.ranks = ranks
        self.own = _batches(seen, seen.whole, ranks)
        """The batches as the loader gave them."""
        self.order = _order(self.own, seen, random, ranks)
        self.of = random if random is not None and not self.order.independent else seen
        """The batches that say what the noise scale is."""
        self.whole = _batches(self.of, self.of.whole, ranks)
        trend = spearmanr(self.whole.noise_traces, range(len(self.whole.noise_traces)))
        self.drifts = bool(trend.pvalue < DRIFTS)
        self.why_unknown = ""
        """Why the noise scale is not known; "" if it is."""
        if not self.order.independent and random is None:
            self.why_unknown = "successive batches are alike"
        elif self.drifts:
            self.why_unknown = "the noise changes along the batches"

    def measurement(
        self, judged: Iterable[JudgedMonitor], confidence: float, unit: str, **known: Any
    ) -> Measurement:
        """Return what the batches say, with what is known of the module and the fit."""

        def scale_of(products: list[BatchProducts]) -> NoiseScale:
            if self.why_unknown:
                return NoiseScale.unknown(confidence, unit, self.of.batches)
            return _batches(self.of, products, self.ranks).noise_scale(confidence, unit)

        of, scale = self.of, scale_of(self.of.whole)
        return Measurement(
            noise_scale=scale,
            groups={name: scale_of(of.entries[k]) for k, name in enumerate(of.group_names)},
            ways=tuple(_ways(judged, self, scale)),
            order=self.order,
            products=self.whole,
            drifts=self.drifts,
            mean=of.mean,
            variance=of.variance,
            **known,
        )


def _batches(
    seen: BatchStatistics, products: list[BatchProducts], ranks: int
) -> IndependentBatches:
    return IndependentBatches(with_replacement(products, seen.loader, seen.batch_size, ranks))


def _ways(judged: Iterable[JudgedMonitor], found: _Found, noise_scale: NoiseScale) -> Iterable[Way]:
    scale = Bounded(noise_scale.value, noise_scale.low, noise_scale.high)
    size = found.of.batch_size
    for monitor in judged:
        name = monitor.way(found.ranks)
        if not monitor.noise_traces:
            yield Way(name, None, monitor.reason)
            continue
        beside = comparison_of(monitor.noise_traces, found.own, noise_scale.confidence)
        yield Way(name, beside, shown=beside.noise_scale_ratio(scale, size))
    if found.ranks == 1:
        if (one := found.order.successive) is not None:
            shown = one.noise_scale_ratio(scale, 2 * size)  # it accumulates two
            yield Way("micro_batch", one, shown=shown)
        else:
            yield Way("micro_batch", None, _AT_RANDOM, by_construction=True)


def _order(
    own: IndependentBatches, seen: BatchStatistics, random: BatchStatistics | None, ranks: int
) -> Order:
    if draws_at_random(seen.loader):
        return Order(at_random=True)
    pairs = {k: x for k, x in seen.differences.items() if k - 2 < len(own.deviations)}
    means = [float(own.deviations[max(k - 3, 0) : k - 1].mean()) for k in pairs]
    successive = compare(list(pairs.values()), means)
    if random is None:
        traces = own.noise_traces.tolist()
        first, last = traces[: seen.near - 1], traces[seen.near - 1 :]
        return Order(
            False, successive, near=compare(first, last, of_same=False) if seen.near else None
        )
    others = _batches(random, random.whole, ranks).noise_traces.tolist()
    return Order(False, successive, compare(own.noise_traces.tolist(), others, of_same=False))


def _check(batches: int | Literal["auto"], width: float, seconds: float) -> None:
    if batches != "auto" and (not isinstance(batches, int) or batches < LEAST):
        raise Refusal(
            "batches",
            f'be "auto" or at least {LEAST}',
            repr(batches),
            "The scatter of fewer batches says nothing.",
        )
    if not width > 1:
        raise Refusal("width", "be more than 1", repr(width), f"Give {WIDTH:g}, for instance.")
    if not seconds > 0:
        raise Refusal("seconds", "be positive", repr(seconds), "Give 600, for instance.")
