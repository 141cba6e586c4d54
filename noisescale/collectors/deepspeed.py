# SPDX-License-Identifier: Apache-2.0
"""Gradient norms under DeepSpeed's engine, with ZeRO stages 0 to 3.

Hooks on parameters see the rank's own gradient of each micro-batch, whatever DeepSpeed does with it
afterwards: it is 1/`gradient_accumulation_steps` of the micro-batch's by then, and times the loss
scale. `p.grad` is of no use from stage 1 on. The norm of the averaged gradient is what the engine
computes in its step, before it clips. Where the engine computes none, or not what is wanted (groups
of parameters), the averaged gradients are gathered one by one as the engine begins to step.

Private attributes used here, as of DeepSpeed 0.19.8: `DeepSpeedEngine._take_model_step`, which is
called at the end of an accumulation alone, and once the gradients of all ranks are reduced.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from noisescale.collectors.averaged_gradient import AveragedGradient
from noisescale.collectors.gradient_norms import GradientNorms, Norms
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.guard import NotMeasured, keeps_errors


def is_deepspeed(model: nn.Module) -> bool:
    """Return whether a module is DeepSpeed's engine. Whoever has made one has imported it."""
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    return kind is not None and isinstance(model, kind)


def elements_of(engine: Any) -> int:
    """Return the number of elements in all parameters that an engine trains."""
    trained = (p for p in engine.module.parameters() if p.requires_grad)
    return sum(getattr(p, "ds_numel", p.numel()) for p in trained)  # stage 3 leaves p empty


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that steps, in the wrappers of accelerate and of an engine."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def stepped_parameters(engine: Any) -> set[int]:
    """Return the ids of the parameters that the engine's optimizer steps, and averages."""
    optimizer = engine.optimizer
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if (groups := getattr(optimizer, name, None)) is not None:
            return {id(p) for group in groups for p in group}
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


class EngineSteps:
    """Tells when an engine steps.

    The engine's own count of steps changes when it loads a checkpoint, too.

    Args:
        engine: DeepSpeed's engine.
        before: Called when gradients are averaged, before the optimizer steps.
        after: Called when it has stepped, or skipped the step.
    """

    def __init__(
        self,
        engine: Any,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        self._engine, self._before, self._after = engine, before, after
        self._stepped, self._micro_steps = False, engine.micro_steps
        self._steps_at_close: int | None = None
        self._take_step: Callable[..., Any] = engine._take_model_step
        engine._take_model_step = self._watch_step

    def advanced(self) -> bool:
        """Return whether the engine's optimizer stepped since the last call, or skipped a step.

        Call it at every micro-batch.

        Raises:
            RuntimeError: If `engine.step` was not called since.
        """
        engine = self._engine
        if self._steps_at_close is not None:
            before, self._steps_at_close = self._steps_at_close, engine.global_steps
            return bool(before != engine.global_steps)
        if engine.micro_steps == self._micro_steps and not self._stepped:
            raise RuntimeError(
                "Call `meter.step()` after `engine.step()`, at every micro-batch: DeepSpeed's"
                " engine computes the norm of the averaged gradient in its step."
            )
        stepped, self._stepped = self._stepped, False
        self._micro_steps = engine.micro_steps
        return stepped

    def close(self) -> None:
        """Leave the engine alone. From now on its own count tells when it steps."""
        engine, self._before, self._after = self._engine, None, None
        self._steps_at_close = engine.global_steps
        # The wrapper is the instance's own attribute; the method is its class's.
        if vars(engine).get("_take_model_step") == self._watch_step:
            del engine._take_model_step
            if getattr(self._take_step, "__func__", None) is not type(engine)._take_model_step:
                engine._take_model_step = self._take_step  # of another meter

    def _watch_step(self, *args: Any, **kwargs: Any) -> Any:
        self._stepped = True
        if self._before is not None:
            self._before()
        result = self._take_step(*args, **kwargs)
        if self._after is not None:
            self._after()
        return result


class DeepSpeedCollector(MicroBatchCollector):
    """Squared norms of each micro-batch's gradient on each rank, and of the averaged gradient.

    Args:
        engine: DeepSpeed's engine, checked by `check_engine`.
        norms: See `Collector`.
    """

    how_to_compare = "Set `gradient_accumulation_steps` to 2 or more, or use more devices."

    gradients_dropped = False
    """The engine has the gradients, and drops them when it has stepped."""
    divides_losses = True
    captures_freely = False
    """The average is captured in the step, whether it is asked for or not."""
    _average: _EngineAverage

    def __init__(self, engine: Any, norms: GradientNorms) -> None:
        everything = dist.distributed_c10d._get_default_group()
        super().__init__(norms, everything if dist.get_world_size() > 1 else None)
        by_parameter = norms.partition > 1 or len(norms.parameters) < len(
            stepped_parameters(engine)
        )
        self._average = _EngineAverage(norms, self.group, engine, by_parameter=by_parameter)
        self.steps = EngineSteps(engine, self._before_step, self._after_step)

    def check_next_passes(self, checking: bool) -> None:
        """Check nothing: what the engine does with gradients is not in `p.grad`."""

    def _ends_of_parts(self, passes: int) -> Sequence[int]:
        """Every micro-batch is a part, if the engine accumulates all of them."""
        engine = self._average.engine
        expected, stage = engine.gradient_accumulation_steps(), engine.zero_optimization_stage()
        if passes > expected and stage in (1, 2):  # which overwrite what they averaged
            raise NotMeasured(
                "`gradient_accumulation_steps` must be the backward passes of a step with ZeRO"
                f" stage {stage}, got {expected} for {passes} passes: DeepSpeed steps on the last"
                f" of them alone. Set it to {passes}, do not divide the loss, and call"
                " `engine.step()`, then `meter.step()`, after each pass."
            )
        return super()._ends_of_parts(passes)

    def small_sq_norms(self) -> Tensor | None:
        """Return Σ|g|² over the micro-batches since the last reset; None if there were none."""
        sq_norms = super().small_sq_norms()
        return None if sq_norms is None else sq_norms / self._average.loss_scale**2

    def close(self) -> None:
        """Remove all hooks."""
        super().close()
        self.steps.close()

    def _capture(self, index: int, gradient: Tensor) -> None:
        # At once: without `contiguous_gradients` averages are written into this tensor.
        self.norms.add_one(self._step.captured.found, index, gradient)

    def _before_step(self) -> None:
        # All ranks alike, as gradients are gathered: not by what this one has seen.
        if self.watching:
            self._average.before_step()

    def _after_step(self) -> None:
        if self.watching:
            self._average.after_step()


class _EngineAverage(AveragedGradient):
    """|g|² of the gradient that the engine averages. All ranks know it: each has 1/W of it."""

    def __init__(
        self,
        norms: GradientNorms,
        group: dist.ProcessGroup | None,
        engine: Any,
        *,
        by_parameter: bool,
    ) -> None:
        super().__init__(norms, group)
        self.engine = engine
        self._by_parameter = by_parameter or not _computes_norm(engine)
        self._sq_norms: Tensor | None = None
        self.loss_scale: float | Tensor = 1.0
        """What the losses of the step were multiplied by."""

    @property
    def captured(self) -> bool:
        """Whether the engine has stepped."""
        return self._sq_norms is not None

    def before_backward(self, loss: Tensor, *, capture: bool) -> None:
        """Arrange for nothing: gradients are averaged when the engine steps."""

    def end_pass(self, came: set[int]) -> None:
        """Note nothing: the engine takes gradients out of `p.grad`."""

    def sq_norms(self) -> Tensor:
        """Return this rank's share, shape (entries,); NaN if the engine skipped the step."""
        self.raise_error_of_hook()
        return self._unknown() if self._sq_norms is None else self._sq_norms

    def forget(self) -> None:
        """Begin another step."""
        super().forget()
        self._sq_norms = None

    @keeps_errors
    def before_step(self) -> None:
        """Note the loss scale, which the step may change; norm the gradients one by one, if so."""
        self.loss_scale = _loss_scale_of(self.engine)
        if not self._by_parameter:
            return
        if (wait := getattr(self.engine.optimizer, "_wait_for_offload_copies", None)) is not None:
            wait()
        found = self._norms.empty()
        for index in range(len(self._norms.parameters)):
            self._gather(found, index)
        self._sq_norms = self._norms.sums(found) / self._ranks / self.loss_scale**2

    @keeps_errors
    def _gather(self, found: Norms, index: int) -> None:
        """Norm a gradient. All ranks take part, also after an error, and one is whole at a time."""
        from deepspeed.utils import safe_get_full_grad

        p = self._norms.parameters[index]
        if p.requires_grad and (gradient := safe_get_full_grad(p)) is not None:
            self._norms.add_one(found, index, gradient)

    @keeps_errors
    def after_step(self) -> None:
        """Take the norm that the engine computed."""
        if self._by_parameter:
            return
        norm = self.engine.get_global_grad_norm()
        self._sq_norms = self._unknown()
        # Stage 3 divides by the scale after the step, which is another one if it was changed.
        if norm is not None and self._scale_is_kept():
            self._sq_norms.fill_(1 / self._ranks)
            if isinstance(self.loss_scale, Tensor):  # autocast's, which the engine leaves in
                self._sq_norms /= self.loss_scale.to(self._sq_norms.device) ** 2
            self._sq_norms *= torch.as_tensor(norm, device=self._sq_norms.device).square()

    def _scale_is_kept(self) -> bool:
        """Return whether the loss scale is what it was. One on the device alone is not read."""
        now = _loss_scale_of(self.engine)
        return isinstance(now, Tensor) or now == self.loss_scale

    def _unknown(self) -> Tensor:
        return torch.full((self._norms.entries,), math.nan, device=self._norms.device)


def check_engine(engine: Any) -> None:
    """Raise if hooks on parameters do not see the gradients that the engine averages.

    Raises:
        NotMeasured: The message names the setting and the remedy.
    """
    for refused, setting, remedy in (
        (engine.pipeline_parallelism, "a pipeline", "Use data parallelism alone."),
        (engine.has_moe_layers, "experts", "Use data parallelism alone."),
        (
            engine.dp_world_size != dist.get_world_size(),
            f"{engine.dp_world_size} data-parallel of {dist.get_world_size()} ranks",
            "Use data parallelism alone.",
        ),
        (
            not engine.enable_backward_allreduce,
            "an optimizer that reduces, as 1-bit Adam does",
            "Use an optimizer that steps on averaged gradients.",
        ),
        (getattr(engine, "zenflow", False), "ZenFlow", "Leave it out of the configuration."),
        (
            not getattr(engine, "gradient_average", True),
            'gradient_allreduce_op "sum"',
            "Leave it out of the configuration.",
        ),
        (
            engine.zero_quantized_gradients(),
            "quantized gradients",
            "Leave `zero_quantized_gradients` out of the configuration.",
        ),
        (
            # 0.17.0 trains on another gradient then, 0.19.8 does not.
            not engine.zero_contiguous_gradients() and _version_of(engine) < (0, 19),
            "`contiguous_gradients` off in a version before 0.19",
            "Leave `contiguous_gradients` out of the configuration.",
        ),
        (
            engine.fp16_enabled() and engine.zero_optimization_stage() == 0,
            "float16 and no ZeRO",
            "Use ZeRO stage 1, or bfloat16.",
        ),
        (
            getattr(engine, "is_deepcompile_enabled", bool)(),
            "DeepCompile",
            "Leave it out of the configuration, or use `torch.compile`.",
        ),
        (not hasattr(engine.optimizer, "param_groups"), "no optimizer", "Pass an optimizer."),
    ):
        if refused:
            raise NotMeasured(
                "`model` must be an engine that averages the gradients of all ranks, got one with"
                f" {setting}. {remedy}"
            )


def _version_of(engine: Any) -> tuple[int, ...]:
    version = sys.modules[type(engine).__module__.partition(".")[0]].__version__
    return tuple(map(int, version.split(".")[:2]))


def _computes_norm(engine: Any) -> bool:
    """Return whether the engine's steps compute the norm of the averaged gradient.

    With Muon it is the norm of what Muon makes of that.
    """
    optimizer = engine.optimizer
    muon = any(group.get("use_muon") for group in optimizer.param_groups)
    return (
        hasattr(optimizer, "_global_grad_norm")
        and getattr(optimizer, "compute_grad_norm", True)
        and not muon
    )


def _loss_scale_of(engine: Any) -> float | Tensor:
    """Return what the engine multiplies losses by; a tensor if only the device knows."""
    optimizer = engine.optimizer
    if getattr(optimizer, "custom_loss_scaler", False):
        return float(optimizer.external_loss_scale)
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None) or getattr(
        engine, "torch_autocast_z0_gradscaler", None
    )
    if scaler is not None:
        scale = scaler._get_scale_async()
        return 1.0 if scale is None else scale.clone()
    return float(getattr(optimizer, "loss_scale", 1.0))
