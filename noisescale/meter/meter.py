# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleMeter: measure the gradient noise scale in any torch loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from noisescale.batches.batch_counter import check_batch_size
from noisescale.batches.row_groups import RowGroupsLike, check_groups_are_used, checked_row_groups
from noisescale.collectors.choosing import SmallBatch, choose_collector, unwrapped
from noisescale.collectors.fsdp.collector import is_sharded
from noisescale.collectors.groups import Groups
from noisescale.collectors.in_model import InModel
from noisescale.collectors.per_example.collector import Layers
from noisescale.collectors.rows.window_layout import Weight
from noisescale.meter.capture import STEPS_LOST, BackwardPass, StepCapture
from noisescale.meter.options import MeterOptions
from noisescale.meter.readings import MeterReadings

# Reduced steps wait on the device until somebody asks; this many at most (a few kB).
_MOST_UNREAD = 1024


class NoiseScaleMeter(MeterReadings):
    """Measure the gradient noise scale in a torch loop.

    The meter compares the gradients of small batches with the gradient of the whole step. What a
    small batch is depends on the way of training:

    | `small_batch` | compared with the step's gradient | needs |
    |---|---|---|
    | `"rank"` | each rank's gradient, before it is averaged | DDP or FSDP2, two ranks or more |
    | `"micro_batch"` | the gradient of each micro-batch (of each rank) | accumulation, or ranks |
    | `"half"` | the gradients of two halves of a batch, from one more backward pass | one process |
    | `"example"` | the gradient of each example | Linear, Conv, Embedding, normalization layers |

    With `"half"`, a step of several micro-batches is measured by its micro-batches.

    Norms cross ranks in one small asynchronous all-reduce a step, and stay on the device until
    `noise_scale` is read. Gradients are only read: training is bitwise the same as without the
    meter.

    Args:
        model: The DistributedDataParallel module, or one sharded by `fully_shard`; in one process
            any module. Wrappers by Fabric and torch.compile are allowed.
        window: See `NoiseScaleEstimator`.
        confidence: See `NoiseScaleEstimator`.
        unit: See `NoiseScaleEstimator`.
        every_n_steps: Measure every n-th optimizer step; "auto": as often as `cost` pays for, more
            often early on, see `Cadence`. Windows count measured steps.
        cost: The share of the run's time that measuring may take with `every_n_steps="auto"`; None:
            0.01, or 0.05 if a scheduler uses the noise scale.
        parameters: The parameters that are trained; default: all that require a gradient.
        small_batch: See above. "auto": "rank" if several processes train, else "half".
        layers: The layers whose gradients of single examples are compared: "all" that have a
            formula, or only "normalization" layers, which cost next to nothing and tend to have the
            noise scale of the whole. Implies `small_batch="example"`.
        groups: Groups of parameters, each with a noise scale of its own from the same pass. A
            mapping from a group's name to one or several regular expressions, which are searched in
            the names of parameters; or a function from a parameter's name to the name of its group,
            or to None. A parameter belongs to the first group that fits.
        grad_scaler: The GradScaler whose `scale(loss)` is passed to `backward`.
        preconditioner: An optimizer of Adam's family. Its second moments scale the gradients for
            `preconditioned_noise_scale`, which is not B_simple.
        momentum: The optimizer whose momentum is the direction for `noise_along_gradient`, which
            policies with an inner-product test use. A measured step then reads gradients and
            momentum once more for each part, and once for itself.
        cut: Where the halves of a batch are separated: names of modules whose outputs have the rows
            of the batch as their first dimension. All trained parameters must act on the loss
            through these outputs. Default: modules that the training step calls, or else the
            tensors nearest to the loss.
        averaged: Whether training averages gradients over ranks. Pass False if each rank steps on
            its own gradient, as with `AdasumOptimizer`: then a measured step averages them, in one
            more all-reduce. The weights must be the same on all ranks in each step.

    Raises:
        TypeError: If several processes train and `model` is not wrapped.
        ValueError: If an argument is out of its range, or no parameter requires a gradient. In a
            step, if it is taken within `model.join()`.

    Examples:
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
        McCandlish et al. 2018, arXiv:1812.06162, appendix A.1. Gray et al. 2024, arXiv:2411.00999,
        for examples and normalization layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        window: int | Literal["auto"] = "auto",
        confidence: float = 0.95,
        unit: str = "examples",
        every_n_steps: int | Literal["auto"] = "auto",
        cost: float | None = None,
        parameters: Iterable[nn.Parameter] | None = None,
        small_batch: SmallBatch = "auto",
        layers: Layers = "all",
        groups: Groups | None = None,
        grad_scaler: GradScaler | None = None,
        preconditioner: Optimizer | None = None,
        momentum: Optimizer | None = None,
        cut: Sequence[str] | None = None,
        averaged: bool = True,
    ) -> None:
        # Arguments are checked before the collector puts hooks into the model.
        options = MeterOptions(
            window=window,
            every_n_steps=every_n_steps,
            cost=cost,
            unit=unit,
            groups=groups,
            confidence=confidence,
            small_batch=small_batch,
            layers=layers,
            preconditioned=preconditioner is not None,
            cut=cut,
            along_gradient=momentum is not None,
        )
        optimizers = preconditioner, momentum
        self._open(model, options, parameters, grad_scaler, optimizers, averaged=averaged)

    @classmethod
    def from_options(
        cls,
        model: nn.Module,
        options: MeterOptions,
        optimizer: Optimizer,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
        grad_scaler: GradScaler | None = None,
        averaged: bool = True,
    ) -> NoiseScaleMeter:
        """Return a meter as `options` describe it.

        `optimizer` is the preconditioner, and that of the momentum, as far as these are wanted.
        """
        meter = cls.__new__(cls)
        optimizers = (
            optimizer if options.preconditioned else None,
            optimizer if options.along_gradient else None,
        )
        meter._open(model, options, parameters, grad_scaler, optimizers, averaged=averaged)
        return meter

    def _open(
        self,
        model: nn.Module,
        options: MeterOptions,
        parameters: Iterable[nn.Parameter] | None,
        grad_scaler: GradScaler | None,
        optimizers: tuple[Optimizer | None, Optimizer | None],
        *,
        averaged: bool,
    ) -> None:
        """Have a collector put its hooks into the model, and begin with no steps."""
        collector = choose_collector(
            model,
            small_batch=options.small_batch,
            layers=options.layers,
            parameters=parameters,
            groups=options.groups,
            preconditioner=optimizers[0],
            momentum=optimizers[1],
            cut=options.cut,
            averaged=averaged,
        )
        wrapper = unwrapped(model)
        ddp = wrapper if isinstance(wrapper, DistributedDataParallel) else None
        in_model = None  # FSDP exchanges whole parameters and their shards
        if not is_sharded(wrapper):
            inner = wrapper if ddp is None else ddp.module
            in_model = InModel(inner, collector.norms.names, collector.norms.parameters)
        capture = StepCapture(collector, ddp, grad_scaler, in_model)
        super().__init__(capture, collector, options)
        self._found_by_close: dict[str, Any] = {}

    def backward(
        self,
        loss: Tensor,
        local_batch_size: float,
        *,
        rows: int | None = None,
        weight: Weight | None = None,
        mean_of_means: bool = False,
        row_groups: RowGroupsLike | None = None,
    ) -> None:
        """Call `loss.backward()` and capture the norms of its small batches.

        Args:
            loss: The mean over this rank's examples, divided for accumulation as you do it, and
                scaled if there is a `grad_scaler`. Put a forward pass whose gradients are not to be
                averaged into `no_sync()` too.
            local_batch_size: This rank's examples in `loss`, each counted once however many
                augmented copies of it there are.
            rows: See `before_backward`.
            weight: See `before_backward`.
            mean_of_means: See `before_backward`.
            row_groups: See `before_backward`.
        """
        self.before_backward(
            loss,
            local_batch_size,
            rows=rows,
            weight=weight,
            mean_of_means=mean_of_means,
            row_groups=row_groups,
        )
        loss.backward()

    def before_backward(
        self,
        loss: Tensor,
        local_batch_size: float,
        *,
        capture_average: bool = False,
        weight: Weight | None = None,
        mean_of_means: bool = False,
        batch: int | None = None,
        rows: int | None = None,
        last: bool | None = None,
        terms: Weight | None = None,
        row_groups: RowGroupsLike | None = None,
    ) -> None:
        """Prepare for a `loss.backward()` that follows right after; `backward` does both.

        Args:
            loss: The loss, or any tensor that its backward pass goes through first.
            local_batch_size: See `backward`.
            capture_average: Norm the step's gradient at the end of this pass, for certain. Default:
                if it may be the last pass of the step.
            weight: What is in the mean that the step's loss is, if that is one mean over all passes
                and ranks: the tokens of this pass, for example, where the loss is the sum over its
                tokens divided by the tokens of the step. Only ratios matter. A number, a scalar on
                the device, or a tensor with the weight of each row, which also corrects the halves
                of a batch. If one pass has a weight, all passes need one.
            mean_of_means: Whether the step's loss is a mean, weighted by `weight`, of each pass's
                mean over its examples, and not one mean over what the weights count. Then a pass
                of few examples is noisier than its weight says.
            batch: Index of the batch that the loss is of, if several passes of a step may use one
                batch. Such a step is not measured, as the examples of each pass are not known.
            rows: Rows of the batch, if its halves are compared and `local_batch_size` differs.
            last: Whether the optimizer steps after this pass, if that is known: the only batch of a
                step is measured by its halves. Default: as in the step before.
            terms: Without a `weight`: the tokens of the batch that count in the loss, by its mask
                or its labels. A warning tells if the losses follow them, so that a `weight` is
                needed.
            row_groups: The group of each row, if the halves of a batch are compared and rows are
                not independent of each other: the completions of one prompt, pairs, augmented
                copies. Numbers or names, in a tensor or a list; a tensor on the device makes a
                measured step wait for the device. Whole groups are in one half then. What
                `local_batch_size` counts is still up to you: rows or groups.
        """
        check_batch_size(local_batch_size)
        one = BackwardPass(local_batch_size, weight, batch, mean_of_means)
        capture = self._capture
        if not capture.due:
            capture.count_pass(one)
            return
        groups = None
        if row_groups is not None:
            check_groups_are_used("row_groups", self._options.small_batch)
            groups = checked_row_groups(row_groups)
        capture.add_pass(
            loss,
            one,
            capture_average=capture_average,
            rows=rows,
            last=last,
            terms=terms,
            row_groups=groups,
        )

    @property
    def due(self) -> bool:
        """Whether the step under way is measured. Weights are not needed in other steps."""
        return bool(self._capture.due)

    def step(self, *, loss_divisor: float | None = None) -> None:
        """Close the step. Call it before `optimizer.step()`, and before `zero_grad`.

        Every rank must call it for every optimizer step, also for a step without a backward.
        Gradients may be clipped or unscaled by then. With `averaged=False` they may not, unless
        `before_backward` was told to capture them.

        Args:
            loss_divisor: What each loss of this accumulation window was divided by. Default: the
                number of its backward passes, which makes the gradient a mean. Lightning divides by
                the full window, also in the short last window of an epoch.
        """
        counts, capture = self._counts, self._capture
        unmeasured_steps = counts.steps - counts.last_measured_step
        counts.steps += 1
        step = capture.close_step(loss_divisor, counts.unmeasured_examples, unmeasured_steps)
        if not step.due:
            for one in step.passes:
                counts.unmeasured_examples += one.size
            self._open_step()
            return
        counts.close_measured(len(step.passes), least=self.least_micro_batches)
        if counts.spent is not None:
            counts.spent = counts.spent.after(step.due, self._cost)
        self._open_step()
        if len(capture.unread) >= _MOST_UNREAD:
            with capture.guard(STEPS_LOST):
                self._settle()

    def pause(self) -> None:
        """Ignore forward passes until `resume`, for example between two steps.

        The results do not depend on it: only passes that a `backward` follows count. With
        `small_batch="example"` it removes a hook on all modules, which costs each of them some
        microseconds, and which makes `torch.export.export(..., strict=True)` fail.
        """
        self._capture.pause(True)

    def resume(self) -> None:
        """End a `pause`: call it before the forward pass of a step."""
        self._capture.pause(False)

    def leave_step_out(self, error: Exception) -> None:
        """Leave the current step out, as its contents are not known; warn once with the reason."""
        self._capture.leave_step_out(error)

    def close(self, *, interrupted: bool = False) -> None:
        """Remove every hook from the model. What was measured can still be read.

        Args:
            interrupted: See `state_dict`.
        """
        try:
            self._settle(alone=interrupted)
        finally:
            with self._capture.guard("The coverage was not read"):
                self._found_by_close = self._found
                self._coverage_at_close = self.coverage
            self._capture.close()

    def _open_step(self) -> None:
        """Begin the next step, which is to be measured or is not."""
        self._capture.open_step(due=self._next_due(self._cost))

    @property
    def _cost(self) -> float:
        """What measuring a step takes in plain steps, as the last ones were."""
        collector = self._capture.collector
        return 0.0 if collector is None else collector.cost

    @property
    def _found(self) -> dict[str, Any]:
        """What the collector found out about the model in its first steps."""
        collector = self._capture.collector
        return self._found_by_close if collector is None else collector.state_dict()

    def state_dict(self, *, interrupted: bool = False) -> dict[str, Any]:
        """Return everything measured so far, in builtins, so that it loads weights-only.

        This runs no collective, so one rank can save alone. The state is the same on all ranks,
        except for the examples since the last measured step, which are this rank's. So with
        `every_n_steps` above 1 and unequal batches on ranks, `examples` is slightly off after
        resuming.

        Args:
            interrupted: Set it after an error, when other ranks may be gone. Steps that have not
                been read are then left out if reading them would mean waiting.
        """
        self._settle(alone=interrupted)
        return {
            "estimates": self._estimates.state_dict(),
            **vars(self._counts),
            "spent": self._counts.spent and list(self._counts.spent),
            "pair_shares": self._pair_shares.state_dict(),
            "collector": self._found,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, saved with the same `window` and `unit`.

        Raises:
            ValueError: If it was saved with another `window` or `unit`.
            KeyError: If a value is missing in it.

        In either case the averages start again, and the counts that the state has are continued.
        """
        begun_anew = self._estimates.state_dict()
        try:
            try:
                self._counts.load_state_dict(state)
                self._pair_shares.load_state_dict(state.get("pair_shares", []))
            finally:  # which steps are due goes by what the collector knows
                if self._capture.collector is not None:
                    self._capture.collector.load_state_dict(state["collector"])
            self._estimates.load_state_dict(state["estimates"])
        except Exception:
            self._estimates.load_state_dict(begun_anew)
            raise
        finally:
            # Averages that begin anew do so in the middle of the run.
            self._estimates.step = self._counts.last_measured_step
            self._open_step()
