# SPDX-License-Identifier: Apache-2.0
"""Load the user's own objects, named as `module.path:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from noisescale.printable import printable
from noisescale.refusal import Refusal


def load(target: str) -> Any:
    """Return the object that `target` names. Modules may also be in the working folder.

    Raises:
        ValueError: If `target` has another form, cannot be imported, or does not have the name.

    Examples:
        >>> load("collections:OrderedDict").__name__
        'OrderedDict'
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise Refusal(
            printable(target),
            "be written as package.module:name or file.py:name",
            "no name after a colon",
            "Add the name of a function, class or object.",
        )
    if place.startswith(".") and not place.endswith(".py"):
        raise Refusal(
            printable(target),
            "be written as package.module:name or file.py:name",
            "a relative module",
            "Write the full name of the module, or its file.",
        )
    try:
        found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
    except ImportError as error:
        raise Refusal(
            printable(target),
            "be importable",
            f"{type(error).__name__}: {printable(error)}",
            "Check the name, and whether its imports are installed.",
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refusal(
                printable(target),
                "name an object that exists",
                f"no {part!r} in {printable(getattr(found, '__name__', place))}",
                "Check the part after the colon.",
            )
        found = getattr(found, part)
    return found


def refuse_if_not_here(target: str) -> None:
    """Raise a ValueError if the file of a target is not in this folder. Nothing is imported."""
    file = Path(target.rpartition(":")[0])
    if file.suffix == ".py" and not file.is_file():
        raise Refusal(
            printable(target),
            "be in the folder of the worker",
            f"{printable(Path.cwd())} without it",
            "Start the worker in the folder of the sweep, or in a copy of it.",
        )


def call_if_callable(target: str, found: Any, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return the result of `found` if it is a function or class; else return `found`.

    Args:
        target: The name of `found`.
        found: What was loaded.
        arguments: Keyword arguments.

    Raises:
        ValueError: If the function or class needs other arguments.

    Examples:
        >>> call_if_callable("collections:Counter", load("collections:Counter"))
        Counter()
    """
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return found
    try:
        inspect.signature(found).bind(**(arguments or {}))
    except TypeError as error:
        raise Refusal(
            printable(target),
            "be callable without arguments",
            f"one for which this is so: {error}",
            "Name a function that calls it with its arguments.",
        ) from error
    return found(**(arguments or {}))


def own_arguments(target: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of arguments of a function or class, as far as they have any.

    Raises:
        ValueError: If it does not take one of the arguments.
    """
    found = load(target)
    takes: Mapping[str, inspect.Parameter] = {}
    if inspect.isclass(found) or inspect.isroutine(found):
        takes = inspect.signature(found).parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    defaults = {}
    for name in names:
        argument = takes.get(name)
        if argument is not None and argument.kind in by_name:
            if argument.default is not inspect.Parameter.empty:
                defaults[name] = argument.default
        elif not every:
            known = ", ".join(n for n, each in takes.items() if each.kind in by_name) or "none"
            raise Refusal(
                "search",
                f"name arguments of {printable(target)}, or what a training has"
                " (learning_rate, batch_size, weight_decay, momentum, epochs, steps)",
                name,
                f"Its arguments: {known}. Add the argument, or correct the name.",
            )
    return defaults


def module_and_data(
    target: str, data: str | None, arguments: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """Return a LightningModule and its data, from one target or from two.

    Args:
        target: Of the module.
        data: Of the data, if they do not come with the module. Without it a module may make its
            own loaders.
        arguments: Keyword arguments of the first.

    Raises:
        ValueError: If a target is something else.
    """
    module, examples = call_if_callable(target, load(target), arguments), None
    if isinstance(module, tuple) and len(module) == 2:
        module, examples = module
    if data is not None:
        examples = call_if_callable(data, load(data))
    if not hasattr(module, "training_step"):
        got = type(module).__name__
        if isinstance(module, tuple):
            got += f" of {', '.join(type(each).__name__ for each in module) or 'nothing'}"
        raise Refusal(
            printable(target),
            "be a LightningModule, or a function that returns a LightningModule and its data",
            got,
            "Name such a function.",
        )
    if examples is None:
        from noisescale.lightning.own_loaders import data_of, makes_loaders

        if not makes_loaders(module):
            raise Refusal(
                printable(target),
                "come with data",
                "only a LightningModule without `train_dataloader`",
                "Give the data with `--data`.",
            )
        examples = data_of(module)
    return module, examples


def is_first() -> bool:
    """Return whether this process is rank 0. Lightning starts the same command for every device."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0


@contextmanager
def shorten_errors(too_large: str) -> Iterator[None]:
    """Turn Lightning's errors about arguments into one line. Errors in a module keep all lines."""
    from noisescale.lightning.profiling.timed_fit import is_out_of_memory
    from noisescale.lightning.trainer_access import MisconfigurationException

    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ValueError(too_large) from error
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        package = str(frame.f_globals.get("__name__")).split(".")[0]
        hosts = ("noisescale", "lightning", "pytorch_lightning", "lightning_fabric")
        kinds = (ImportError, ValueError, *MisconfigurationException.__bases__)
        if package in hosts and isinstance(error, kinds):
            raise ValueError(str(error)) from error
        traceback.print_exc()
        raise SystemExit(1) from error


def _module(name: str) -> ModuleType:
    _search(Path.cwd())
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Refusal(printable(path), "be a Python file", "a path without a file", "Check it.")
    _search(path.resolve().parent)
    if path.stem in sys.modules:  # the same name again, or that of another module
        known = sys.modules[path.stem]
        if Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
            return known
        raise Refusal(
            printable(path),
            "not have the name of an imported module",
            repr(path.stem),
            "Rename the file.",
        )
    return importlib.import_module(path.stem)


def _search(folder: Path) -> None:
    """Search modules in a folder first, as a script in this folder would."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
