# SPDX-License-Identifier: Apache-2.0
"""Adversarial examples from stale weights, made beside the training step (ConAdv)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from noisescale.checks import is_real, is_whole, refuse, require_choice, require_positive
from noisescale.collectives import world_size
from noisescale.collectors.halves.side_effects import keep_random_numbers
from noisescale.collectors.own_pass import own_pass
from noisescale.meter.choosing import unwrap
from noisescale.refusal import TypeRefusal

LossOf = Callable[[Any], Tensor]
"""A function from the model's output for the inputs to a scalar loss."""


class Prepared(NamedTuple):
    """Adversarial inputs that may still be computed."""

    inputs: Tensor
    done: Any
    """The event on the device after which they are there; None on a CPU."""


class ConcurrentAdversary:
    """Adversarial copies of the next batch, from the weights of an earlier step (ConAdv).

    One projected step along the input gradient of the loss at stale weights θ makes the copies:

        x' = x + Π(α·sign ∇ₓ loss(x; θ))          Π: onto |δ| <= radius, elementwise

    or, with `norm="l2"`, α·∇/|∇| and Π onto |δ|₂ <= radius, for each example. FGSM takes the
    present weights, so that a step waits for two gradients in a row. With the weights of τ steps
    ago the copies of a batch need nothing of the step before it, and are made while that step runs.

    `batches_from` goes through a loader with the copies made ahead. `perturb`, `prepare` and
    `take` are its parts. Train on clean and adversarial inputs, as one example each: see
    `interleaved`.

    On a GPU the copies are made on a stream of their own. On a CPU nothing runs beside the step,
    and an epoch takes as long as with FGSM.

    Training sees nothing of it: no gradient is added to `p.grad`, buffers (the running statistics
    of BatchNorm) stay as they are, and random numbers that the model draws (dropout) are drawn
    again by training. Each rank makes the copies of its own batches, without a collective, at
    weights that are equal on all ranks under DDP. It needs memory for `staleness` copies of the
    weights and buffers, one batch of inputs, and the activations of a forward pass. FSDP is not
    supported.

    There is nothing to save: in a resumed run the first batches take the weights that are there.

    Args:
        model: The model; DDP around it is left out.
        radius: The largest perturbation, in units of the inputs.
        step_size: α, in the same units. With `radius` or more, and "linf", this is FGSM's step.
        staleness: τ, the age of the weights in steps. 0 is FGSM: nothing is made ahead.
        norm: "linf" or "l2".
        bounds: The least and the largest value of an input; None: any.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> adversary = ConcurrentAdversary(model, radius=0.1, step_size=0.1)
        >>> adversary.perturb(torch.zeros(1, 2), lambda output: output.sum())
        tensor([[0.1000, 0.1000]])

    References:
        Liu et al. 2021, arXiv:2106.00221. Goodfellow et al. 2015, arXiv:1412.6572 (FGSM).
    """

    def __init__(
        self,
        model: nn.Module,
        radius: float,
        step_size: float,
        staleness: int = 1,
        *,
        norm: Literal["linf", "l2"] = "linf",
        bounds: tuple[float, float] | None = None,
    ) -> None:
        model = unwrap(model)
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self.radius = require_positive("radius", radius, "Pass 8/255 for images in [0, 1], say.")
        self.step_size = require_positive("step_size", step_size, "Pass `radius` for FGSM's step.")
        if not is_whole(staleness) or staleness < 0:
            needed = "be a whole number of steps, 0 or more"
            refuse("staleness", needed, repr(staleness), "Leave it at 1.")
        self.staleness = int(staleness)
        self._norm = require_choice("norm", norm, ("linf", "l2"), 'Leave it at "linf".')
        self._bounds = _require_bounds(bounds)
        self._stale: deque[dict[str, Tensor]] = deque(maxlen=max(self.staleness, 1))
        self._streams: dict[torch.device, Any] = {}
        self._prepared: Prepared | None = None

    def perturb(self, x: Tensor, loss_of: LossOf) -> Tensor:
        """Return the adversarial copies of inputs, at the weights as they are now.

        Args:
            x: Floating-point inputs, shape (batch, ...), on the model's device.
            loss_of: From the model's output for `x` to the scalar loss, with the labels of `x`.
        """
        return self._perturb(x, loss_of, _weights(self._model))

    def prepare(self, x: Tensor, loss_of: LossOf) -> None:
        """Begin to make the copies of the *next* batch. Call it before the step of this batch.

        They are made at the weights of `staleness` calls ago, counting this one: with 1 at those
        that the step of this batch starts from. Arguments: see `perturb`.

        Raises:
            RuntimeError: If what the last call prepared was not taken.
            ValueError: If `staleness` is 0.
        """
        if self.staleness == 0:
            refuse("staleness", "be 1 or more to prepare batches", 0, "Call `perturb` instead.")
        if self._prepared is not None:
            raise RuntimeError(
                "A batch has been prepared and not taken. Call `take` before the next `prepare`."
            )
        self._keep_weights()
        stream = self._stream_of(x)
        if stream is None:
            self._prepared = Prepared(self._perturb(x, loss_of, self._stale[0]), None)
            return
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            inputs = self._perturb(x, loss_of, self._stale[0])
        x.record_stream(stream)
        self._prepared = Prepared(inputs, stream.record_event())

    def take(self) -> Tensor:
        """Return the copies that `prepare` began. On a GPU the stream waits, the host does not.

        Raises:
            RuntimeError: If nothing is prepared.
        """
        if self._prepared is None:
            raise RuntimeError(
                "No batch is prepared. Call `prepare` with it first, or `perturb` for a batch that"
                " is wanted at once."
            )
        (inputs, done), self._prepared = self._prepared, None
        if done is not None:
            now = torch.cuda.current_stream(inputs.device)
            now.wait_event(done)
            inputs.record_stream(now)
        return inputs

    def drop(self) -> None:
        """Forget what was prepared and not taken."""
        self._prepared = None

    def batches_from(
        self,
        batches: Iterable[Any],
        loss_of: Callable[[Any, Any], Tensor],
        inputs_of: Callable[[Any], Tensor] = lambda batch: batch[0],
    ) -> AdversarialBatches:
        """Return batches with their adversarial inputs. The next batch's inputs are made ahead.

        See `AdversarialBatches`, which a loop and a Trainer of Lightning go through.

        Args:
            batches: A loader, or other batches.
            loss_of: From the model's output for a batch's inputs, and the batch, to a scalar loss.
            inputs_of: The inputs of a batch. Default: its first element.

        Examples:
            >>> model = torch.nn.Linear(2, 3)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> loss = torch.nn.functional.cross_entropy
            >>> loader = [(torch.randn(4, 2), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
            >>> adversary = ConcurrentAdversary(model, radius=0.1, step_size=0.1)
            >>> batches = adversary.batches_from(loader, lambda out, b: loss(out, b[1]))
            >>> for (x, y), adversarial in batches:
            ...     optimizer.zero_grad()
            ...     ((loss(model(x), y) + loss(model(adversarial), y)) / 2).backward()
            ...     optimizer.step()
        """
        return AdversarialBatches(self, batches, loss_of, inputs_of)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self._model.parameters()).device

    def _keep_weights(self) -> None:
        """Keep the weights as they are now, in the place of the oldest."""
        now = _weights(self._model)
        if len(self._stale) < max(self.staleness, 1):
            self._stale.append({name: value.clone() for name, value in now.items()})
            return
        kept = self._stale.popleft()
        with torch.no_grad():
            for name, value in now.items():
                kept[name].copy_(value)
        self._stale.append(kept)

    def _perturb(self, x: Tensor, loss_of: LossOf, weights: dict[str, Tensor]) -> Tensor:
        weights = weights | {  # a forward pass may change buffers, and so may the next one
            name: weights[name].clone() for name, _ in self._model.named_buffers()
        }
        if not x.is_floating_point():
            remedy = "Perturb what the model computes from them: embeddings, say."
            refuse("x", "be floating-point inputs", x.dtype, remedy, error=TypeRefusal)
        inputs = x.detach().requires_grad_()
        with keep_random_numbers({x.device}), own_pass(), torch.enable_grad():
            loss = loss_of(functional_call(self._model, weights, (inputs,)))
            (gradient,) = torch.autograd.grad(loss, inputs)
        with torch.no_grad():
            perturbed = x + self._step(gradient)
            return perturbed if self._bounds is None else perturbed.clamp(*self._bounds)

    def _step(self, gradient: Tensor) -> Tensor:
        if self._norm == "linf":
            return (self.step_size * gradient.sign()).clamp(-self.radius, self.radius)
        norms = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
        length = min(self.step_size, self.radius)
        factor = torch.where(norms > 0, length / norms, 0.0)
        return gradient * factor.view(-1, *[1] * (gradient.dim() - 1))

    def _stream_of(self, x: Tensor) -> Any:
        if x.device.type != "cuda":
            return None
        if x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)
        return self._streams[x.device]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers as they are, not copied."""
    return {n: x.detach() for n, x in [*model.named_parameters(), *model.named_buffers()]}


def _require_bounds(bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    if bounds is None:
        return None
    pair = tuple(bounds)
    if len(pair) != 2 or not all(is_real(value) for value in pair) or not pair[0] < pair[1]:
        needed = "be the least and the largest value of an input"
        refuse("bounds", needed, repr(bounds), "Pass (0, 1) for images in that range.")
    return float(pair[0]), float(pair[1])


class AdversarialBatches:
    """Pairs of a batch and its adversarial inputs, see `ConcurrentAdversary.batches_from`.

    Take each optimizer step before the next batch is asked for: then the inputs of a batch are made
    at the weights of `staleness` steps ago. Those of the first batch take the weights that are
    there. One batch is read ahead, and moved to the model's device.

    Its length, sampler and batch sampler are those of the loader. So a Trainer of Lightning can go
    through it, and sets the sampler's epoch. Under several ranks Lightning gives a
    DistributedSampler to a DataLoader alone: pass the loader one yourself.

    Raises:
        ValueError: Where an epoch begins under several ranks, if a DataLoader has the same examples
            for all of them.
    """

    def __init__(
        self,
        adversary: ConcurrentAdversary,
        batches: Iterable[Any],
        loss_of: Callable[[Any, Any], Tensor],
        inputs_of: Callable[[Any], Tensor],
    ) -> None:
        self._adversary, self._batches = adversary, batches
        self._loss_of, self._inputs_of = loss_of, inputs_of
        self.sampler = getattr(batches, "sampler", None)
        self.batch_sampler = getattr(batches, "batch_sampler", None)

    def __len__(self) -> int:
        """Return the number of batches, if the loader has one."""
        return len(self._batches)  # type: ignore[arg-type]  # a TypeError if it has none

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield each batch with its adversarial inputs."""
        self._check_ranks()
        adversary, left = self._adversary, iter(self._batches)
        adversary.drop()  # what an iteration that was left early prepared
        for first in left:
            batch = on_device(first, adversary.device)
            inputs = adversary.perturb(*self._task(batch))
            break
        else:
            return
        for each in left:
            following = on_device(each, adversary.device)
            if adversary.staleness:
                adversary.prepare(*self._task(following))
            yield batch, inputs
            batch = following
            inputs = (
                adversary.take() if adversary.staleness else adversary.perturb(*self._task(batch))
            )
        yield batch, inputs

    def _task(self, batch: Any) -> tuple[Tensor, Callable[[Any], Tensor]]:
        return self._inputs_of(batch), lambda output: self._loss_of(output, batch)

    def _check_ranks(self) -> None:
        same_on_all = isinstance(self.sampler, (RandomSampler, SequentialSampler))
        if world_size() > 1 and same_on_all and isinstance(self._batches, DataLoader):
            refuse(
                "batches",
                "have examples of their own on each rank",
                f"a DataLoader with a {type(self.sampler).__name__}",
                "Pass `sampler=DistributedSampler(dataset)` to the DataLoader.",
            )


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all tensors on a device; lists, tuples and mappings are searched."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: on_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(on_device(value, device) for value in batch)
    return batch


def interleave(clean: Tensor, adversarial: Tensor) -> Tensor:
    """Return both copies of each example as rows one after the other, for one forward pass.

    DDP wants one forward pass for each backward pass where the model has buffers. If the noise
    scale is measured by halves of a batch, the model has to return `output.unflatten(0, (-1, 2))`:
    halves are made of what the first dimension counts.

    Args:
        clean: Shape (batch, ...), inputs or labels.
        adversarial: The same shape; pass labels twice.

    Returns:
        Shape (2·batch, ...).

    Examples:
        >>> interleave(torch.tensor([1, 2]), torch.tensor([10, 20])).tolist()
        [1, 10, 2, 20]
    """
    return torch.stack([clean, adversarial], 1).flatten(0, 1)
