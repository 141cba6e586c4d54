# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 reduces, seen from inside: its units, their flat buffers, its divisors.

FSDP2 lays the local gradients of one unit (a module that `fully_shard` was applied to) in one
buffer: a row for each shard, in it that shard of every parameter that has a gradient, one after
another, padded with zeros. It calls the unit's reduce-scatter on that. `replicate` uses the same
machinery with one shard: it allocates the same buffer, and a second one for the sum over ranks, and
calls no reduce-scatter.

With tensor parallelism each rank has a part of the unsharded gradient, or all of it where the
parameter is replicated. FSDP2 sums gradients that are partial before they come to the buffer.

Private attributes read here, as of torch 2.13: `FSDPModule._get_fsdp_state`; a state's
`_fsdp_param_groups` (before torch 2.12 `_fsdp_param_group`), here called units; of a unit
`_reduce_scatter_comm` (also written: that is what `set_custom_reduce_scatter` does, which takes no
module of several units),
`_reduce_scatter_process_group`, `_all_reduce_process_group`, `_all_reduce_hook`, `reduce_grads`,
`all_reduce_grads`, `device`, `mesh_info`, `fsdp_params`, `gradient_divide_factor` and
`force_sum_reduction_for_comms`; of a parameter `sharded_param`, `padded_sharded_param_size` and
`_unsharded_dtensor_spec` (before torch 2.13 `_tp_spec`) and `is_dtensor`;
`_get_gradient_divide_factors`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from noisescale.collectors.context_parallel import refuse_context_parallel
from noisescale.collectors.devices import keep_from
from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.collectors.tensor_parallel import shards_in
from noisescale.guard import HookErrors, NotMeasured, keeps_errors

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
except ImportError:  # built without distributed
    ReduceScatter = object  # type: ignore[assignment, misc] # a stand-in


_EXPERT = re.compile(r"ep|expert\w*", re.IGNORECASE)
"""Names of mesh dimensions of expert parallelism."""


def is_fsdp2(model: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to any module in the model."""
    # By name, for a torch that was built without distributed.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return "FSDPModule" in kinds


class Unit(HookErrors, ReduceScatter):
    """Replaces a unit's reduce-scatter: it shows the buffer, then calls the original one.

    Args:
        unit: The unit of FSDP.
        norms: The parameters that count, and where.
        on_reduce: Called with this object and the buffer, on FSDP's stream.
        sharing: The ranks of tensor parallelism.
    """

    def __init__(
        self,
        unit: Any,
        norms: GradientNorms,
        on_reduce: Callable[[Unit, Tensor], None],
        sharing: int = 1,
    ) -> None:
        self.waiting: Callable[[int], None] | None = None
        """Called with each parameter in a buffer whose contents are not known yet."""
        self._unit = unit
        self._on_reduce = on_reduce
        self._wrapped: Any = unit._reduce_scatter_comm
        self._hooks: list[RemovableHandle] = []
        self._closed = False
        self._shards = shards_of(unit.mesh_info)
        self._allocated: Tensor | None = None
        self._columns = [p.padded_sharded_param_size.numel() for p in unit.fsdp_params]
        index_of = {id(p): index for index, p in enumerate(norms.parameters)}
        self._indices = [index_of.get(id(p.sharded_param)) for p in unit.fsdp_params]
        # For each parameter the first that counts in the same entry, and on how many ranks of
        # tensor parallelism it is; None: it does not count.
        self._counts_as = [
            None
            if index is None
            else (norms.entry_of.index(norms.entry_of[index]), sharing // tensor_shards_of(p))
            for index, p in zip(self._indices, unit.fsdp_params, strict=True)
        ]
        unit._reduce_scatter_comm = self

    @property  # type: ignore[misc] # `object` has one that can be set
    def __class__(self) -> type:
        """Answer as the original one: FSDP2 asks where a user sets how buffers are made."""
        kind: type = self._wrapped.__class__
        return kind

    @property
    def reduces(self) -> bool:
        """Whether this backward pass reduces its gradients, not only adds to them."""
        return bool(self._unit.reduce_grads)

    @property
    def reduces_over_replicas(self) -> bool:
        """Whether this backward pass also reduces over replicas, if there are any."""
        replicated = isinstance(self._unit.mesh_info, DDPMeshInfo)
        return bool(self._unit.all_reduce_grads) or not replicated

    @property
    def factor(self) -> float:
        """p.grad over the mean over ranks: not 1 if FSDP was given a divisor."""
        ranks: int = self._unit.mesh_info.mesh.size()
        return ranks / (self._unit.gradient_divide_factor or ranks)

    def reduce_divisor(self, dtype: torch.dtype) -> float:
        """Return the divisor of a buffer before it is reduced: half precision needs it."""
        unit = self._unit
        if self._shards == 1:
            return 1.0  # it is seen before it is divided
        before, _, _, _ = _get_gradient_divide_factors(
            unit._reduce_scatter_process_group,
            unit._all_reduce_process_group if isinstance(unit.mesh_info, DDPMeshInfo) else None,
            dtype,
            unit.device.type,
            unit.gradient_divide_factor,
            unit.force_sum_reduction_for_comms,
        )
        return before or 1.0

    def divides_otherwise(self, dtype: torch.dtype) -> bool:
        """Return whether it is not known what a buffer of one shard is divided by.

        FSDP2 divides it by a divisor of the user's once or twice, by version and type. Half
        precision is divided in place, before a buffer that is cut later has been seen.
        """
        divisor = self._unit.gradient_divide_factor
        later = self.waiting is not None and dtype not in (torch.float32, torch.bfloat16)
        return self._shards == 1 and (divisor not in (None, 1) or later)

    def parameters_in(self, buffer: Tensor) -> set[int]:
        """Return the indices of measured parameters in a buffer; none if it lacks a trained one."""
        trained = [i for i, p in enumerate(self._unit.fsdp_params) if p.sharded_param.requires_grad]
        elements = buffer.numel() // self._shards
        if sum(self._columns[i] for i in trained) != elements:
            return set()
        return {index for i in trained if (index := self._indices[i]) is not None}

    def cut(self, buffer: Tensor, take: Callable[[list[Piece]], None]) -> None:
        """Pass the measured pieces to `take`, now or once the contents of the buffer are known."""
        trained = [i for i, p in enumerate(self._unit.fsdp_params) if p.sharded_param.requires_grad]
        entries = {self._counts_as[i] for i in trained}
        rows = buffer.view(self._shards, -1)
        if len(entries) == 1:
            take([_piece(key, buffer) for key in entries if key is not None])
        elif sum(self._columns[i] for i in trained) == rows.shape[1]:
            take(self._pieces(rows, trained))
        else:
            self._cut_later(rows, trained, take)

    def reset(self) -> None:
        """Begin another step."""
        self._error = self.waiting = self._allocated = None
        # While a parameter has a hook, FSDP copies its gradient to the CPU with the host waiting:
        # `foreach_reduce`, where gradients are offloaded. So hooks end with the measured step.
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        """Restore the reduce-scatter, unless another one has replaced this object since."""
        self.reset()
        self._closed = True
        if self._unit._reduce_scatter_comm is self:
            # Of several monitors the first to close is not the last that wrapped.
            wrapped = self._wrapped
            while isinstance(wrapped, Unit) and wrapped._closed:
                wrapped = wrapped._wrapped
            self._unit._reduce_scatter_comm = wrapped

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Let the original reduce-scatter allocate the buffers.

        With one shard the first buffer is full, and still to be divided, when the second is asked
        for.
        """
        buffer: Tensor = self._wrapped.allocate(size, dtype=dtype, device=device)
        if self._shards == 1:
            full, self._allocated = self._allocated, buffer
            if full is not None:
                self._allocated = None
                self._on_reduce(self, full)
        return buffer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Show the buffer, then reduce."""
        self._on_reduce(self, input_tensor)
        work: dist.Work | None = self._wrapped(
            output_tensor=output_tensor,
            input_tensor=input_tensor,
            group=group,
            op=op,
            async_op=async_op,
        )
        return work

    def _pieces(self, rows: Tensor, present: list[int]) -> list[Piece]:
        """Cut out what counts: neighbours in one piece, so that nothing is copied.

        On the CPU row by row. Kernels of other devices take several rows of a buffer at once.
        """
        pieces, start = [], 0
        for key, run in groupby(present, self._counts_as.__getitem__):
            stop = start + sum(self._columns[i] for i in run)
            if key is not None:
                piece = rows[:, start:stop]
                pieces += [_piece(key, one) for one in (piece if rows.is_cpu else [piece])]
            start = stop
        return pieces

    def _cut_later(
        self, rows: Tensor, trained: list[int], take: Callable[[list[Piece]], None]
    ) -> None:
        """Cut a buffer that lacks the gradient of some parameter, once it is known which one.

        FSDP does not say until it has reduced. Then it calls the hooks of every parameter that
        was in the buffer, in order, as autograd does where it has written a gradient.
        """
        present: list[int] = []

        def note_present(position: int) -> None:
            present.append(position)
            if sum(self._columns[i] for i in present) == rows.shape[1]:
                self.waiting = None
                keep_from(None, [rows])  # FSDP keeps the buffer for its reduce-scatter only
                take(self._pieces(rows, present))

        self.waiting = note_present
        if not self._hooks:
            for position in trained:
                parameter = self._unit.fsdp_params[position].sharded_param
                hook = partial(self._on_write, position)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    @keeps_errors
    def _on_write(self, position: int, _: Tensor) -> None:
        if self.waiting is not None:
            self.waiting(position)


def shards_of(mesh_info: Any) -> int:
    """Return the ranks that a gradient is sharded over: 1 with `replicate`."""
    return int(getattr(mesh_info, "shard_mesh_size", 1))


def tensor_shards_of(fsdp_param: Any) -> int:
    """Return the ranks of tensor parallelism that a parameter is sharded over."""
    for name in ("_unsharded_dtensor_spec", "_tp_spec"):  # the latter before torch 2.13
        spec = getattr(fsdp_param, name, None)
        if spec is not None:
            return shards_in(spec.mesh, spec.placements)
    if fsdp_param.is_dtensor:
        raise NotMeasured(
            f"`model` must not be tensor parallel with torch {torch.__version__}, whose FSDP2 does"
            " not say how a parameter is shared out. Use torch 2.13."
        )
    return 1


def _piece(key: tuple[int, int], gradient: Tensor) -> Piece:
    index, holders = key
    return Piece(index, gradient, holders=holders)


def units_of(model: nn.Module, named_parameters: list[tuple[str, Parameter]]) -> list[Any]:
    """Return FSDP's units that hold any of the parameters.

    Raises:
        NotMeasured: If gradients are not averaged over one mesh of FSDP2.
    """
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    units = [unit for state in dict.fromkeys(states) for unit in _units_of_state(state)]
    unit_of: dict[int, Any] = {
        id(p.sharded_param): unit for unit in units for p in unit.fsdp_params
    }
    held: dict[Any, None] = {}
    meshes: set[Any] = set()
    of_parameters: set[Any] = set()
    parameter: Any  # a DTensor
    for name, parameter in named_parameters:
        if id(parameter) not in unit_of:
            _refuse(
                "shard every trained parameter",
                f"{name!r}: FSDP does not reduce its gradient",
                "Apply `fully_shard` to the whole model as well, or leave the parameter out.",
            )
        unit = unit_of[id(parameter)]
        info = unit.mesh_info
        of_parameters.add(parameter.device_mesh)
        if any(_EXPERT.fullmatch(dim) for dim in parameter.device_mesh.mesh_dim_names or ()):
            _refuse(
                "be data and tensor parallel only",
                f"{name!r} on {parameter.device_mesh}: with expert parallelism the gradient of an"
                " expert comes from the batches of other ranks, too",
                "Leave the experts out by `parameters`.",
            )
        if unit._all_reduce_hook is not None:
            _refuse(
                "have no all-reduce hook",
                f"one on the unit of {name!r}: FSDP does not know what it averages over",
                "Pass `fully_shard` a mesh of two dimensions instead.",
            )
        held[unit] = None
        meshes.add((tuple(info.mesh.mesh.flatten().tolist()), shards_of(info)))
    refuse_context_parallel(of_parameters)
    if len(meshes) > 1:
        _refuse(
            "be sharded over one mesh",
            f"{len(meshes)}: its gradients are means over different ranks",
            "Measure the parameters of one mesh.",
        )
    return list(held)


def _refuse(requirement: str, got: str, remedy: str) -> NoReturn:
    raise NotMeasured(f"`model` must {requirement}, got {got}. {remedy}")


def _units_of_state(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    only = state._fsdp_param_group
    return [] if only is None else [only]
