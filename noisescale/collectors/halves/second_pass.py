# SPDX-License-Identifier: Apache-2.0
"""Read from a graph whether a second backward pass through it may change the training.

torch's own operations bear it. A Function written in Python, a hook on a node, and hooks that give
saved tensors back may keep state: those that are not known to bear it are named, and no pass is
made. A checkpointed part runs forward again: see `PythonState`.

Read here, and private as of torch 2.13: `_forward_cls` of a Function's node, `_raw_saved_*` of
nodes with their `unpack_hook` (since torch 2.10), and what checkpointing and `torch.library` keep
in closures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from noisescale.collectors.halves.graph import Node, next_nodes, walk
from noisescale.collectors.own_pass import asks_whether_measuring, name_of

_KNOWN = frozenset(
    {
        # Trained here with a second pass, bit for bit as without.
        "timm",
        "torch",
        "torch_geometric",
        "transformers",
        # Each of their Functions was read.
        "apex",
        "bitsandbytes",
        "causal_conv1d",
        "diffusers",
        "entmax",
        "fla",
        "flash_attn",
        "kornia",
        "lightly",
        "liger_kernel",
        "mamba_ssm",
        "peft",
        "snntorch",
        "torchaudio",
        "torchvision",
        "trl",
        "xformers",
    }
)
"""Packages whose Functions bear a second backward pass.

Some write to what they save. `ProvedCuts` restores that, and refuses it.
"""

_NOT_KNOWN = (
    "apex.contrib.bottleneck.",  # buffers of communication
    "apex.contrib.cudnn_gbn.",
    "apex.contrib.groupbn.",  # counts passes
    "apex.contrib.transducer.",  # a backward pass inside
    "apex.mlp.",  # deletes what it saved
    "apex.transformer.",  # adds to `main_grad`
    "bitsandbytes.autograd._functions.MatMul8bitLt",
    "liger_kernel.ops.backends._ascend.",  # gradients by the address of a tensor
    "liger_kernel.ops.cute.ops.moe.",  # pops from a stack
    "liger_kernel.ops.cutile.ops.tiled_mlp.",  # a backward pass inside
    "liger_kernel.ops.swiglu.LigerFusedGateUpSiLUMulFunction",
    "liger_kernel.ops.tiled_mlp.",
    "peft.tuners.lora.velora.",
    "snntorch.surrogate.CustomSurrogate",  # runs a function of the user's
    "torch.distributed.fsdp.",
    "torch_geometric.nn.models.rev_gnn.",  # reverses activations in place
    "transformers.loss.loss_lsd.",  # frees a graph inside
    "transformers.models.reformer.",
    "xformers.fwbw_overlap.",
)
"""How the names of Functions in known packages begin that do not bear it."""

_KNOWN_HOOKS = (
    "noisescale.",
    "torch.distributed.",
    "torch.utils.hooks.BackwardHook.",  # of modules: `hooks_on_modules` names those
)

_KNOWN_UNPACKING = "torch.autograd.graph.save_on_cpu."


class SecondPass(NamedTuple):
    """What a second backward pass through a graph meets."""

    unknown: tuple[str, ...]
    """What may keep state, in the words of a message."""
    impossible: tuple[str, ...]
    """What ends a second pass or the one after it with an error."""
    frames: tuple[Any, ...]
    """The checkpointed parts that it runs forward again."""
    runs_python: bool
    """Whether it runs Functions of others, or parts again: only these can write to buffers."""


def second_pass(loss: Node) -> SecondPass:
    """Read the graph behind a loss.

    Takes about 15 µs for each node on the CPU, and does not wait for the device.
    """
    unknown: dict[str, None] = {}
    impossible: dict[str, None] = {}
    frames: dict[int, Any] = {}
    functions = False
    for node in walk([loss], next_nodes):
        kind = type(node)
        if issubclass(kind, BackwardCFunction) or kind.__name__ == "CppFunction":
            name = _name_of_function(node)
            functions = functions or not name.startswith("torch.")
            if name == "torch.utils.checkpoint.CheckpointFunction":
                impossible["a checkpoint with `use_reentrant=True`"] = None
            elif not _is_known(name):
                unknown[f"the Function {name}"] = None
        for hook in _unpacking(node, kind):
            frame = _frame_of(hook)
            if frame is not None:
                frames[id(frame)] = frame
            elif not (name := name_of(hook)).startswith(_KNOWN_UNPACKING):
                unknown[f"the saved-tensor hook {name}"] = None
        if not hasattr(node, "variable"):  # where a pass for gradients of parameters ends
            for hook in _hooks_on(node):
                name = name_of(hook)
                if not name.startswith(_KNOWN_HOOKS) and not asks_whether_measuring(hook):
                    unknown[f"the hook {name} on {node.name()}"] = None
    for frame in frames.values():
        if not isinstance(cells_of(frame.recompute_fn).get("recompute_context"), nullcontext):
            impossible["selective checkpointing (`context_fn`)"] = None
    if frames and torch._C._get_graph_exec_group() is not None:
        impossible["a `GraphExecGroup` around checkpoints"] = None
    in_parts = tuple(frames.values())
    return SecondPass(tuple(unknown), tuple(impossible), in_parts, functions or bool(in_parts))


def cells_of(function: Any) -> dict[str, Any]:
    """Return what a function has in its closure, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    found = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    return found


def _is_known(name: str) -> bool:
    return name.partition(".")[0] in _KNOWN and not name.startswith(_NOT_KNOWN)


def _name_of_function(node: Node) -> str:
    """Return the full name of the Function that a node is of."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None:
        return _name_in_cpp(node.name())
    name = f"{function.__module__}.{function.__qualname__}"
    if "GeneratedBackwardFor_" in name:  # of a custom operator: what its author registered
        info = cells_of(function.backward).get("info")
        name = name_of(getattr(info, "_backward_fn", None))
    elif name.startswith("torch._functorch.autograd_function.Vmapped"):
        function = cells_of(function.backward).get("autograd_function")
        name = f"{function.__module__}.{function.__qualname__}" if function else "of a vmap"
    return name


def _name_in_cpp(name: str) -> str:
    """Return the name of a Function written in C++, with dots: it is in the node's."""
    inner = name.partition("CppNode<")[2] or name
    return inner.removesuffix(">").replace("at::", "torch::", 1).replace("::", ".")


_names_saved: dict[type, tuple[str, ...]] = {}


def _unpacking(node: Node, kind: type) -> Iterator[Callable[[Any], Any]]:
    """Yield the hooks that give back what a node has saved."""
    names = _names_saved.get(kind)
    if names is None:
        names = tuple(name for name in dir(node) if name.startswith("_raw_saved"))
        _names_saved[kind] = names
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # it has been freed
            continue
        for one in saved if isinstance(saved, tuple | list) else (saved,):
            hook = None if one is None else _unpack_hook(one)
            if hook is not None:
                yield hook


def _unpack_hook(saved: Any) -> Callable[[Any], Any] | None:
    try:
        hook: Callable[[Any], Any] | None = saved.unpack_hook
    except RuntimeError:  # nothing was saved, or it has been freed
        return None
    return hook


def _frame_of(hook: Any) -> Any:
    """Return the frame of a checkpointed part, if the hook is one of checkpointing's."""
    if not name_of(hook).startswith("torch.utils.checkpoint._checkpoint_hook."):
        return None
    held = cells_of(hook)
    return held.get("frame") or cells_of(held.get("unpack_hook")).get("frame")


def _hooks_on(node: Node) -> list[Any]:
    """Return the hooks on a node: torch shows them to who adds one."""
    found: list[Any] = []
    for register in (node.register_hook, node.register_prehook):
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        found += hooks.values() if hooks else ()
    return found


def _nothing(*_: Any) -> None:
    """Do nothing: torch shows the hooks on a node to who adds one."""
