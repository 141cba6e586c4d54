# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleMonitor: the gradient noise scale of a Lightning run, measured and logged."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from noisescale.estimator import NoiseScale, NoiseScaleEstimator
from noisescale.history import History
from noisescale.lightning import host
from noisescale.lightning.step_timer import StepTimer
from noisescale.lightning.supported import check_supported
from noisescale.lightning.tensorboard_layout import merged_into
from noisescale.meter import NoiseScaleMeter, checked_every_n_steps

if TYPE_CHECKING:
    import pytorch_lightning as pl


_RESOLVED_ONLY = tuple(
    f"noise_scale/{key}" for key in ("simple", "simple_low", "simple_high", "efficiency")
)


class NoiseScaleMonitor(host.Callback):
    """Measure the simple gradient noise scale during training and log it.

    Add it to the callbacks of a Trainer, of `lightning` or of `pytorch_lightning`, that trains by
    DDP on two or more devices, or in one process with `accumulate_grad_batches` of 2 or more:

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[NoiseScaleMonitor()])

    Training is bitwise what it is without it. At Lightning's own log steps every logger gets
    these keys, finite values only, and `trainer.callback_metrics` all of them. The first four are
    logged only where the noise scale is resolved, the lower bound always.

    | key | meaning |
    |---|---|
    | `noise_scale/simple` | B_simple = tr(Σ)/|G|², in `unit` |
    | `noise_scale/simple_low`, `noise_scale/simple_high` | its confidence interval |
    | `noise_scale/efficiency` | B_simple/(B_simple + B): progress per example |
    | `noise_scale/lower_bound` | what B_simple is at least: the low end, resolved or not |
    | `noise_scale/grad_sq_norm`, `noise_scale/noise_trace` | averages of |G|² and of tr(Σ) |
    | `noise_scale/batch_size` | the global batch size of that step |
    | `noise_scale/seconds_per_step` | measured, without validation and checkpoints |
    | `noise_scale/skipped_steps` | steps left out so far: not finite, or nothing to compare |

    The averaged gradient is taken in `on_before_optimizer_step`, before Lightning clips it; what
    changes it earlier (in `on_after_backward`, say) spoils the comparison. Weight decay that is
    decoupled from the gradient (AdamW) is not part of it. `ddp_fork` and `ddp_spawn` train in
    other processes and hand back `callback_metrics` only: there, read results from those or from
    a logger.

    Args:
        window: Measured steps to average over, or "auto"; see `NoiseScaleEstimator`.
        every_n_steps: Measure one optimizer step in so many. Windows count measured steps.
        batch_size_fn: From a batch to the examples this rank has in it, in `unit`. Default:
            the first dimension of its tensors. Graphs, packed sequences and tokens need one.
        unit: What `batch_size_fn` counts, for display.
        confidence: Coverage of the interval, between 0 and 1.

    Raises:
        ValueError: If an argument is out of its range.
        TypeError: If `batch_size_fn` is not callable.
        MisconfigurationException: When a fit starts under an unsupported Trainer.

    Example:
        >>> monitor = NoiseScaleMonitor(window=200)
        >>> print(monitor.noise_scale)
        not measured yet

    References:
        McCandlish et al. 2018, arXiv:1812.06162.
    """

    history: History
    """The noise scale along the run, one row for each log step."""

    def __init__(
        self,
        window: int | Literal["auto"] = "auto",
        every_n_steps: int = 1,
        batch_size_fn: Callable[[Any], float] | None = None,
        unit: str = "examples",
        confidence: float = 0.95,
    ) -> None:
        super().__init__()
        if batch_size_fn is not None and not callable(batch_size_fn):
            raise TypeError(
                f"`batch_size_fn` must be callable, got {batch_size_fn!r}."
                " Pass a function from a batch to the number of examples in it."
            )
        self._nothing_measured = NoiseScaleEstimator(window, confidence, unit).estimate()
        self._options: dict[str, Any] = {
            "window": window,
            "every_n_steps": checked_every_n_steps(every_n_steps),
            "unit": unit,
            "confidence": confidence,
        }
        self._batch_size_fn = batch_size_fn or host.batch_size_of
        self.history = History()
        self._meter: NoiseScaleMeter | None = None
        self._measuring = False
        self._loaded: dict[str, Any] | None = None
        self._handed_on: dict[str, Any] = {}
        self._local_batch_size: float = 0
        self._timer = StepTimer()
        self._layouts = ExitStack()

    @property
    def noise_scale(self) -> NoiseScale:
        """The latest estimate, during the fit and after it. Reads the device."""
        return self._nothing_measured if self._meter is None else self._meter.noise_scale

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A fit that goes on (from a checkpoint, or on this Trainer) continues the averages.
        state = self._loaded
        if state is None:
            state = self.state_dict() if trainer.global_step else {}
        self._loaded = None
        self._handed_on = state
        self._meter = None
        self.history = History()
        if not check_supported(trainer):
            return
        model = trainer.strategy.model
        assert model is not None
        trained = [p for o in trainer.optimizers for g in o.param_groups for p in g["params"]]
        self._meter = NoiseScaleMeter(model, parameters=trained, **self._options)
        if state:
            self._meter.load_state_dict(state["meter"])
            self.history.load_state_dict(state["history"])
        self._measuring = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._timer = StepTimer()
        if self._measuring and trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(writer := getattr(logger, "experiment", None), SummaryWriter):
                    self._layouts.enter_context(merged_into(writer, _charts(self._options)))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._measuring:
            self._local_batch_size = self._batch_size_fn(batch)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        if self._measuring and self._meter is not None:
            self._meter.before_backward(loss, self._local_batch_size)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._measuring and self._meter is not None:
            self._meter.step(loss_divisor=trainer.accumulate_grad_batches)
            self._timer.step()
            if host.should_log(trainer):
                self._log(trainer, self._meter, host.log_step(trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._timer.interrupt()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._timer.interrupt()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._measuring and self._meter is not None and self._advanced(self._meter):
            self._log(trainer, self._meter, max(host.log_step(trainer) - 1, 0))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._loaded = None  # what validate and test load belongs to no fit
        self._stop(interrupted=False)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._stop(interrupted=True)

    def state_dict(self) -> dict[str, Any]:
        if self._meter is None:
            return self._handed_on
        return {"meter": self._meter.state_dict(), "history": self.history.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _log(self, trainer: pl.Trainer, meter: NoiseScaleMeter, step: int) -> None:
        estimate = meter.noise_scale
        values = {
            "simple": estimate.value,
            "simple_low": estimate.low,
            "simple_high": estimate.high,
            "lower_bound": estimate.low,
            "grad_sq_norm": estimate.grad_sq_norm,
            "noise_trace": estimate.noise_trace,
            "batch_size": meter.batch_size,
            "efficiency": estimate.efficiency(meter.batch_size),
            "seconds_per_step": self._timer.mean_since_last_read(),
            "skipped_steps": float(meter.skipped_steps),
        }
        metrics = {f"noise_scale/{key}": value for key, value in values.items()}
        # TensorBoard draws a band only where value, low and high have been logged together.
        unknown = () if estimate.resolved else _RESOLVED_ONLY
        known = {k: v for k, v in metrics.items() if math.isfinite(v) and k not in unknown}
        if host.has_log_steps(trainer):
            for logger in trainer.loggers:
                logger.log_metrics(known, step=step)
        host.publish(trainer, metrics)
        host.show_in_progress_bar(trainer, "noise_scale", estimate.short())
        if not self._advanced(meter):
            return
        self.history.append(
            step=meter.last_measured_step,
            examples=meter.examples,
            batch_size=meter.batch_size,
            grad_sq_norm=estimate.grad_sq_norm,
            noise_trace=estimate.noise_trace,
            noise_scale=estimate.value,
            low=estimate.low,
            high=estimate.high,
            seconds_per_step=values["seconds_per_step"],
            skipped_steps=meter.skipped_steps,
        )

    def _advanced(self, meter: NoiseScaleMeter) -> bool:
        """Whether a step was measured since the last row of the history."""
        return meter.last_measured_step > self.history.last_step

    def _stop(self, *, interrupted: bool) -> None:
        """Take everything back that was put into the model and the loggers."""
        self._measuring = False
        self._layouts.close()
        if self._meter is not None:
            self._meter.close(interrupted=interrupted)


def _charts(options: dict[str, Any]) -> dict[str, Any]:
    """Our part of TensorBoard's Custom Scalars page; Multiline tags are regular expressions."""
    value, low, high = (f"noise_scale/simple{end}" for end in ("", "_low", "_high"))
    interval = f"{options['confidence'] * 100:g} % interval"
    return {
        "Noise scale": {
            f"Simple noise scale and its {interval} [{options['unit']}]": [
                "Margin",
                [value, low, high],
            ],
            f"Noise scale against batch size [{options['unit']}]": [
                "Multiline",
                [r"^noise_scale/simple$", r"^noise_scale/batch_size$"],
            ],
            "Efficiency: progress per example": ["Multiline", [r"^noise_scale/efficiency$"]],
            "Signal: |G|²": ["Multiline", [r"^noise_scale/grad_sq_norm$"]],
            "Noise: tr(Σ)": ["Multiline", [r"^noise_scale/noise_trace$"]],
        }
    }
