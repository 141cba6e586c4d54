# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleMeter: a collector and an estimator behind one object, for any torch loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from noisescale.collectors.ddp import DdpCollector
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.collectors.reduced_rows import ReducedRows
from noisescale.collectors.step_norms import StepNorms
from noisescale.estimator import NoiseScale, NoiseScaleEstimator, is_real, is_whole

Collector = DdpCollector | MicroBatchCollector

# Reduced steps wait on the device until somebody asks; this many at most (a few kB).
_MOST_UNREAD = 1024


class NoiseScaleMeter:
    """Measure the gradient noise scale in a torch loop.

    Under DDP every rank's gradient norm is taken just before the gradients are averaged, the norm
    of the average right after; both cross ranks in one small asynchronous all-reduce a step, and
    stay on the device until `noise_scale` is read. In one process the micro-batches of a step are
    compared with their sum: accumulate two or more. Gradients are read only: training is bitwise
    what it is without the meter.

    Args:
        model: The DistributedDataParallel module; in one process any module.
        window: See `NoiseScaleEstimator`.
        confidence: See `NoiseScaleEstimator`.
        unit: See `NoiseScaleEstimator`.
        every_n_steps: Measure one optimizer step in so many. Windows count measured steps.
        parameters: The parameters that are trained; default: all that require a gradient.

    Raises:
        TypeError: If several processes train and `model` is not wrapped.
        ValueError: If an argument is out of its range, or no parameter requires a gradient.

    Example:
        >>> from noisescale import NoiseScaleMeter
        >>> def train(ddp_model, optimizer, batches, loss_function):
        ...     meter = NoiseScaleMeter(ddp_model)
        ...     for x, y in batches:
        ...         optimizer.zero_grad()
        ...         loss = loss_function(ddp_model(x), y)
        ...         meter.backward(loss, local_batch_size=len(x))
        ...         meter.step()
        ...         optimizer.step()
        ...     print(meter.noise_scale)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        window: int | Literal["auto"] = "auto",
        confidence: float = 0.95,
        unit: str = "examples",
        every_n_steps: int = 1,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> None:
        self.every_n_steps = checked_every_n_steps(every_n_steps)
        self._estimator = NoiseScaleEstimator(window, confidence, unit)
        self._collector: Collector | None = _collector(model, parameters)
        self._rows = ReducedRows()
        self._constants: tuple[tuple[float, ...], Tensor] | None = None
        self._window_sizes: list[float] = []
        self._unmeasured_examples = 0.0
        self._warned: set[str] = set()
        self._steps = 0
        self._last_measured_step = 0
        self._skipped_steps = 0
        self._examples = 0.0
        self._batch_size = math.nan

    @property
    def noise_scale(self) -> NoiseScale:
        """The latest estimate. Reads the device: ask when you log, not at every step."""
        self._settle()
        return self._estimator.estimate()

    @property
    def steps(self) -> int:
        """Optimizer steps so far, measured or not."""
        return self._steps

    @property
    def last_measured_step(self) -> int:
        """Optimizer steps up to the last measured one: those whose examples are counted."""
        return self._last_measured_step

    @property
    def skipped_steps(self) -> int:
        """Measured steps left out: a gradient was not finite, or had nothing to compare with."""
        self._settle()
        return self._skipped_steps

    @property
    def examples(self) -> float:
        """Examples processed by all ranks, up to the last measured step."""
        self._settle()
        return self._examples

    @property
    def batch_size(self) -> float:
        """Global batch size of the last measured step, in examples; NaN before it."""
        self._settle()
        return self._batch_size

    def backward(self, loss: Tensor, local_batch_size: float) -> None:
        """Call `loss.backward()` and capture this rank's gradient norm.

        Args:
            loss: The mean over this rank's examples, divided for accumulation as you do it, and
                not scaled: loss scaling (a GradScaler) is not taken out yet. A forward pass
                whose gradients are not to be averaged belongs into `no_sync()` too.
            local_batch_size: This rank's examples in `loss`.
        """
        self.before_backward(loss, local_batch_size)
        loss.backward()

    def before_backward(self, loss: Tensor, local_batch_size: float) -> None:
        """Do what `backward` does, where somebody else calls `loss.backward()` right after."""
        if not is_real(local_batch_size):
            raise TypeError(
                "`local_batch_size` must be a number, got an object of type"
                f" {type(local_batch_size).__name__}. Take `int(...)` of a tensor, on the host:"
                " of one on the device it would wait for it at every step."
            )
        if not 0 <= local_batch_size < math.inf:
            raise ValueError(
                f"`local_batch_size` must be a number of examples, got {local_batch_size!r}."
                " Pass how many examples of this rank are in the loss."
            )
        collector = self._open_collector()
        self._window_sizes.append(local_batch_size)
        if self._steps % self.every_n_steps == 0:
            collector.before_backward(loss)

    def step(self, *, loss_divisor: float | None = None) -> None:
        """Close the step: call it before gradient clipping and `optimizer.step()`.

        Every rank must call it for every optimizer step, also for one without a backward.

        Args:
            loss_divisor: What each loss of this accumulation window was divided by. Default:
                the number of backward passes in the window, which makes the gradient a mean.
                Lightning divides by its full window also when the last one of an epoch is short.
        """
        collector = self._open_collector()
        sizes = self._window_sizes
        measured = self._steps % self.every_n_steps == 0
        self._steps += 1
        if measured:
            self._reduce(collector, sizes, loss_divisor or len(sizes))
            self._unmeasured_examples = 0.0
            self._last_measured_step = self._steps
        else:
            self._unmeasured_examples += sum(sizes)
        self._window_sizes = []
        collector.reset()
        if len(self._rows) >= _MOST_UNREAD:
            self._settle()

    def close(self, *, interrupted: bool = False) -> None:
        """Remove every hook from the model. What was measured can still be read.

        Args:
            interrupted: See `state_dict`.
        """
        try:
            self._settle(alone=interrupted)
        finally:
            self._rows = ReducedRows()
            if self._collector is not None:
                self._collector.close()
                self._collector = None

    def _open_collector(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("This meter is closed. Make a new one and load its `state_dict`.")
        return self._collector

    def _reduce(self, collector: Collector, sizes: list[float], loss_divisor: float) -> None:
        """Sum this step's row over ranks: one collective, unconditional, asynchronous.

        A rank that has nothing comparable reduces NaN, so that all of them leave the step out.
        """
        if collector.averaged_too_often:
            self._warn(
                "Gradients were averaged over ranks more than once in one step, which mixes local"
                " and averaged ones: such steps are not measured. Wrap all but the last backward"
                " of a step in `model.no_sync()`."
            )
        small, big = collector.small_sq_norm(), collector.big_sq_norm()
        if small is None:
            small = torch.full_like(big, math.nan)
        layout = collector.layout(sizes, loss_divisor)
        if layout.small_scale != 1:
            small = small * layout.small_scale
        if layout.big_scale != 1:
            big = big * layout.big_scale
        examples = float(sum(sizes))
        constants = (layout.inverse_sizes, examples, self._unmeasured_examples)
        row = torch.cat([torch.stack([small, big]), self._on_device(constants, big)])
        self._rows.add(row, layout.parts, collector.group)

    def _on_device(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        """Host numbers as a tensor, copied only when they change and never synchronously."""
        if self._constants is None or self._constants[0] != values:
            tensor = torch.tensor(values, dtype=like.dtype)
            if like.device.type == "cuda":
                tensor = tensor.pin_memory().to(like.device, non_blocking=True)
            self._constants = values, tensor.to(like.device)
        return self._constants[1]

    def _settle(self, *, alone: bool = False) -> None:
        """Take in the steps that have been reduced."""
        read = self._rows.read_without_waiting() if alone else self._rows.read()
        for (small, big, inverse_sizes, examples, unmeasured), parts in read:
            self._examples += unmeasured
            mean_small = small / parts if parts else math.nan
            self._absorb(StepNorms(mean_small, big, parts, inverse_sizes, examples))

    def _absorb(self, norms: StepNorms) -> None:
        self._examples += norms.examples
        self._batch_size = norms.examples
        if not norms.comparable:
            self._skipped_steps += 1
            if norms.parts == 1 and self._estimator.estimate().steps == 0:
                self._warn(
                    "A step of one micro-batch in one process has nothing to be compared with: it"
                    " is not measured. Accumulate two or more, or use more devices."
                )
        elif norms.identical_parts:
            self._skipped_steps += 1
            self._warn(
                "All ranks had one and the same gradient: such steps are not measured. Give each"
                " rank its own examples, with a `DistributedSampler`."
            )
        else:
            self._estimator.update(norms.moments(), weight=norms.examples)

    def _warn(self, message: str) -> None:
        if message not in self._warned and not (dist.is_initialized() and dist.get_rank()):
            warnings.warn(message, stacklevel=4)
        self._warned.add(message)

    def state_dict(self, *, interrupted: bool = False) -> dict[str, Any]:
        """Return everything measured so far, in builtins: it loads weights-only.

        Runs no collective, so that one rank can save alone. All of it is alike on all ranks but
        the examples since the last measured step, which are this rank's: with `every_n_steps`
        above 1 and ranks of unequal batches `examples` is off by as many after resuming.

        Args:
            interrupted: Set after an error, when other ranks may be gone: steps that have not
                been read yet are left out where reading them would mean to wait.
        """
        self._settle(alone=interrupted)
        return {
            "estimator": self._estimator.state_dict(),
            "steps": self._steps,
            "last_measured_step": self._last_measured_step,
            "skipped_steps": self._skipped_steps,
            "examples": self._examples,
            "unmeasured_examples": self._unmeasured_examples,
            "batch_size": self._batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, saved with the same `window`."""
        self._estimator.load_state_dict(state["estimator"])
        self._steps = state["steps"]
        self._last_measured_step = state["last_measured_step"]
        self._skipped_steps = state["skipped_steps"]
        self._examples = state["examples"]
        self._unmeasured_examples = state["unmeasured_examples"]
        self._batch_size = state["batch_size"]


def _collector(model: nn.Module, parameters: Iterable[nn.Parameter] | None) -> Collector:
    if isinstance(model, DistributedDataParallel) and dist.get_world_size(model.process_group) > 1:
        return DdpCollector(model, parameters)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise TypeError(
            "`model` must be a DistributedDataParallel module where several processes train, got"
            f" {type(model).__name__}. Wrap it: `DistributedDataParallel(model)`."
        )
    return MicroBatchCollector(model, parameters)


def checked_every_n_steps(value: int) -> int:
    """Return `value`, or raise a ValueError that says what is wrong with it."""
    if not is_whole(value) or value < 1:
        raise ValueError(
            f"`every_n_steps` must be at least 1, got {value!r}. Pass 1 to measure every step."
        )
    return int(value)
