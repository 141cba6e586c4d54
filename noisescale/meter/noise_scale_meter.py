# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleMeter: measure the gradient noise scale in any torch loop, and log it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from noisescale.checks import require_count
from noisescale.collectives import rank
from noisescale.collectors.groups import Groups
from noisescale.extras import is_installed, need
from noisescale.guard import NotMeasured
from noisescale.history.event_file import EventFile
from noisescale.history.history import History
from noisescale.meter.extra import Extra
from noisescale.meter.meter import Meter
from noisescale.meter.options import MeterOptions, SmallBatch
from noisescale.meter.run_log import RunLog, last_row_of, warning_of_folder
from noisescale.printable import arguments
from noisescale.refusal import Refusal, TypeRefusal


class NoiseScaleMeter(Meter):
    """Measure the gradient noise scale in a torch loop.

    The meter compares the gradients of small batches with the gradient of the whole step. What a
    small batch is depends on the way of training:

    | `small_batch` | compared with the step's gradient | needs |
    |---|---|---|
    | `"rank"` | each rank's gradient, before it is averaged | DDP or FSDP, two ranks or more |
    | `"micro_batch"` | the gradient of each micro-batch (of each rank) | accumulation, or ranks |
    | `"half"` | the gradients of two halves of a batch, from one more backward pass | one process |

    With `"half"`, a step of several micro-batches is measured by its micro-batches.

    Norms cross ranks in one small asynchronous all-reduce a step, and stay on the device until
    `noise_scale` is read. Gradients are only read: training is bitwise the same as without the
    meter.

    A model or an optimizer whose gradients cannot be measured is no error: a warning has the reason
    and what to change, nothing is measured, and training goes on. `not_measured` has the reason,
    too.

    Every `log_every_n_steps` steps the meter adds a row to `history`. With `log_to` it also writes
    what `noisescale predict`, `watch`, `compare` and TensorBoard's tab read. Call `close()` at the
    end of the training, for the last row. Call `pause()` before an evaluation, or its seconds count
    as training.

    Args:
        model: The DistributedDataParallel module, one sharded by FSDP1 or `fully_shard`, or
            DeepSpeed's engine; in one process any module. Wrappers by Fabric and torch.compile are
            allowed.
        window: See `NoiseScaleEstimator`.
        confidence: See `NoiseScaleEstimator`.
        unit: See `NoiseScaleEstimator`.
        every_n_steps: Measure every n-th optimizer step; "auto": as often as `max_overhead`
            pays for, see `Cadence`. Windows count measured steps.
        max_overhead: The share of the run's time that measuring may take with
            `every_n_steps="auto"`. None: 0.05 of the first ten minutes (500 steps at least) until
            the noise scale is known within a factor of 3, and 0.01 later; 0.05 if a scheduler uses
            the noise scale. If `meter.last_step` is set to the last step of the training, a third
            of that is kept for the last third.
        parameters: The parameters that are trained; default: all that require a gradient.
        small_batch: See above. "auto": "rank" if several processes train, else "half"; under
            DeepSpeed, and with tensor parallelism alone, "micro_batch".
        groups: Groups of parameters, each with a noise scale of its own from the same pass. A
            mapping from a group's name to one or several regular expressions, which are searched in
            the names of parameters; or a function from a parameter's name to the name of its group,
            or to None. A parameter belongs to the first group that fits.
        grad_scaler: The GradScaler whose `scale(loss)` is passed to `backward`.
        extra: What is measured beside the noise scale, for `extra_noise_scales`: see
            `ExtraMeasurement`.
        optimizer: The optimizer that steps. Predictions depend on its kind. Some measurements in
            `extra` need it. LBFGS is not measured.
        cut: Where the halves of a batch are separated: names of modules whose outputs have the rows
            of the batch as their first dimension. All trained parameters must act on the loss
            through these outputs. Default: modules that the training step calls, or else the
            tensors nearest to the loss.
        backward_twice: True says that a backward pass may go twice through the model's graph and
            changes nothing the second time: through Functions, hooks and saved tensors that are not
            known. Halves of a batch take one more pass, and are refused where these keep state.
        averaged: Whether training averages gradients over ranks before `optimizer.step()`. Pass
            False if the optimizer averages them in its step, as nanochat's does, or if each rank
            steps on its own gradient, as with `AdasumOptimizer`. A measured step then averages
            them for itself, in one more all-reduce. The weights must be the same on all ranks in
            each step.
        log_to: The folder of the run, to which rank 0 writes: `noise_scale.jsonl` with all rows
            and, if tensorboard is installed, event files with the metrics of `NoiseScaleMonitor`.
            Give a resumed run the same folder, or a new one. None: nothing is written.
        log_every_n_steps: Add a row, and log, every n-th optimizer step.

    Raises:
        TypeError: If several processes train and `model` is not wrapped.
        ValueError: If an argument is out of its range, or does not fit the way of training, or if
            `log_to` is no folder of this machine.

    Examples:
        >>> from noisescale import NoiseScaleMeter
        >>> def train(ddp_model, optimizer, batches, loss_function):
        ...     meter = NoiseScaleMeter(ddp_model, optimizer=optimizer, log_to="runs/a")
        ...     for x, y in batches:
        ...         optimizer.zero_grad()
        ...         loss = loss_function(ddp_model(x), y)
        ...         meter.backward(loss, local_batch_size=len(x))
        ...         meter.step()
        ...         optimizer.step()
        ...     meter.log(loss=loss)
        ...     meter.close()
        ...     print(meter)

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
        every_n_steps: int | Literal["auto"] = "auto",
        max_overhead: float | None = None,
        parameters: Iterable[nn.Parameter] | None = None,
        small_batch: SmallBatch = "auto",
        groups: Groups | None = None,
        grad_scaler: GradScaler | None = None,
        extra: Sequence[Extra] = (),
        optimizer: Optimizer | None = None,
        cut: Sequence[str] | None = None,
        backward_twice: bool = False,
        averaged: bool = True,
        log_to: str | PathLike[str] | None = None,
        log_every_n_steps: int = 50,
    ) -> None:
        # Arguments are checked before the collector puts hooks into the model.
        options = MeterOptions.from_arguments(locals())
        self._log_to = None if log_to is None else _checked_folder(log_to)
        self._log_every_n_steps = require_count("log_every_n_steps", log_every_n_steps, "Pass 50.")
        # Fabric and accelerate wrap the optimizer.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self._open(model, options, optimizer, parameters, grad_scaler, averaged=averaged)
        self._logged = RunLog(self, optimizer, averaged=averaged, loop="own")
        self._writes = self._log_to is not None and rank() == 0
        if self._log_to is not None and self._writes:
            self._logged.record_in([self._log_to])

    def __repr__(self) -> str:
        """Show the arguments that are not the defaults, and the last row of the history."""
        own = {"log_to": self._log_to and str(self._log_to)}
        given = vars(self._options) | own | {"log_every_n_steps": self._log_every_n_steps}
        return (
            f"NoiseScaleMeter({arguments(NoiseScaleMeter, **given)}): {last_row_of(self.history)}"
        )

    @property
    def history(self) -> History:
        """The noise scale along the run, one row for each log step."""
        return self._logged.explained_history()

    def step(self, *, loss_divisor: float | None = None) -> bool:
        """Close the step, and log at log steps. Call it before `optimizer.step()` and `zero_grad`.

        Every rank must call it for every optimizer step, also for a step without a backward.
        Gradients may be clipped or unscaled by then. With `averaged=False` they may not, unless
        `before_backward` was told to capture them. With DeepSpeed call it after each
        `engine.step()`.

        Args:
            loss_divisor: What each loss of this accumulation window was divided by. Default: the
                number of its backward passes, which makes the gradient a mean.

        Returns:
            Whether a step was closed: with DeepSpeed, whether the optimizer stepped.

        Raises:
            RuntimeError: If DeepSpeed's `engine.step()` was not called since the last call.
        """
        if not super().step(loss_divisor=loss_divisor):
            return False
        with self._logged.guard("The time of a step was not taken"):
            self._logged.note_step()
        if self.steps % self._log_every_n_steps == 0:
            self._log_row()
        return True

    def log(self, **metrics: float | Tensor) -> None:
        """Write other metrics of the run, such as the loss, for TensorBoard and `compare`.

        It reads the device. All ranks may call it, and rank 0 writes.

        Args:
            **metrics: Values by name. A name with a slash is given as `**{"val/loss": loss}`.

        Raises:
            Refusal: If the meter has no `log_to`.
            MissingExtraError: If tensorboard is not installed.
        """
        if self._log_to is None:
            raise Refusal("log_to", "be given to log metrics", None, 'Pass `log_to="runs/a"`.')
        need("tensorboard", "`NoiseScaleMeter.log`")
        with self._logged.guard(warning_of_folder(self._log_to)):
            if self._writes:
                numbers = {name: torch.as_tensor(value).item() for name, value in metrics.items()}
                self._events.add(numbers, self.steps)

    def stop(self, reason: NotMeasured) -> None:
        """Measure nothing from now on, and warn once with the reason: training goes on."""
        super().stop(reason)
        self._warn(
            f"NoiseScaleMeter has nothing to measure{' from here on' * self.accepted}."
            f" {self.not_measured} Training goes on, and there is no noise scale."
        )

    def pause(self) -> None:
        """Ignore forward passes until `resume`, and do not time the step under way.

        Call it before an evaluation or a checkpoint, whose seconds would count as training.
        """
        super().pause()
        self._logged.timer.interrupt()

    def close(self, *, interrupted: bool = False) -> None:
        """Log the last row, and remove every hook from the model. Results can still be read.

        Args:
            interrupted: Whether an error ended the training, so that other ranks may be gone. Then
                nothing is logged, and steps that would have to be waited for are left out.
        """
        if not interrupted:
            if self._logged.unfinished:
                self._log_row(at_end=True)
            self._logged.end()
        super().close(interrupted=interrupted)
        self._logged.let_go()
        if self._log_to is not None and "_events" in vars(self):
            with self._logged.guard(warning_of_folder(self._log_to)):
                self._events.write()
        if self._writes and not interrupted:
            from noisescale.prediction.closing import closing_lines

            with self._logged.guard("The verdict was not printed"):
                assert self._log_to is not None
                print(f"NoiseScaleMeter: {closing_lines([self.history], self._log_to)}")

    def state_dict(self, *, interrupted: bool = False) -> dict[str, Any]:
        """Return everything measured so far and the history, in builtins; it loads weights-only.

        This runs no collective, so one rank can save alone. The state is the same on all ranks,
        except for the examples since the last measured step, which are this rank's. So with
        `every_n_steps` above 1 and unequal batches on ranks, `examples` is slightly off after
        resuming.

        Args:
            interrupted: See `close`.
        """
        return super().state_dict(interrupted=interrupted) | {"log": self._logged.log_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, saved with the same `window` and `unit`.

        Raises:
            ValueError: If it was saved with another `window` or `unit`.
            KeyError: If a value is missing in it.
        """
        super().load_state_dict(state)
        self._logged.load_log_state(state["log"])

    def _log_row(self, *, at_end: bool = False) -> None:
        if not self.measuring:
            return
        reading = self._logged.read(self.steps, at_end=at_end)
        if self._log_to is not None and self._writes and is_installed("tensorboard"):
            with self._logged.guard(warning_of_folder(self._log_to)):
                self._events.add(reading.loggable, self.steps)
                self._events.write()

    @cached_property
    def _events(self) -> EventFile:
        assert self._log_to is not None
        return EventFile(self._log_to)


def _checked_folder(folder: str | PathLike[str]) -> Path:
    remedy = 'Pass the name of a folder, such as "runs/a".'
    if not isinstance(folder, (str, PathLike)):
        raise TypeRefusal("log_to", "be the path of a folder", repr(folder), remedy)
    if "://" in str(folder) or Path(folder).is_file():
        raise Refusal("log_to", "be a folder of this machine", repr(str(folder)), remedy)
    return Path(folder)
