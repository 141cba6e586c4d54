# SPDX-License-Identifier: Apache-2.0
"""Load the user's own objects, named as `module.path:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from noisescale.refusal import Refusal

_LOADING: ContextVar[str] = ContextVar("loading", default="")
"""The target whose module is being imported."""


@contextmanager
def shield_process() -> Iterator[None]:
    """Keep the working folder and the standard streams, whatever a target does to them.

    What the target prints goes to stderr: stdout has the answer alone, which may be JSON.
    """
    with chdir(Path.cwd()), redirect_stdout(sys.stderr), redirect_stderr(sys.stderr):
        yield


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
            target,
            "be written as package.module:name or file.py:name",
            "no name after a colon",
            "Add the name of a function, class or object.",
        )
    if place.startswith(".") and not place.endswith(".py"):
        raise Refusal(
            target,
            "be written as package.module:name or file.py:name",
            "a relative module",
            "Write the full name of the module, or its file.",
        )
    before = _LOADING.set(target)
    try:
        found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
    except ImportError as error:
        raise Refusal(
            target,
            "be importable",
            f"{type(error).__name__}: {error}",
            "Check the name, and whether its imports are installed.",
        ) from error
    finally:
        _LOADING.reset(before)
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refusal(
                target,
                "name an object that exists",
                f"no {part!r} in {getattr(found, '__name__', place)}",
                "Check the part after the colon.",
            )
        found = getattr(found, part)
    return found


def refuse_if_not_here(target: str) -> None:
    """Raise a ValueError if the file of a target is not in this folder. Nothing is imported."""
    file = Path(target.rpartition(":")[0])
    if file.suffix == ".py" and not file.is_file():
        raise Refusal(
            target,
            "be in the folder of the worker",
            f"{Path.cwd()} without it",
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
            target,
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
                f"name arguments of {target}, or what a training has"
                " (learning_rate, batch_size, weight_decay, momentum, epochs, steps)",
                name,
                f"Its arguments: {known}. Add the argument, or correct the name.",
            )
    return defaults


def module_and_data(
    target: Any,
    data: Any = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    or_trainer: bool = False,
) -> tuple[Any, Any]:
    """Return a LightningModule and its data, from one target or from two.

    Args:
        target: A LightningModule, or a function or class that returns one, alone or in a pair with
            its data; or a text for `load` that names one of these.
        data: The data, a function or class that returns them, or a text for `load`. Default: what
            the target returns, else the loaders that the module makes.
        arguments: Keyword arguments of the target.
        or_trainer: Whether it may be the Trainer of transformers, which has a data set.

    Returns:
        The module, and data for `train_and_val`.

    Raises:
        ValueError: If a target is something else, or there are no data.
    """
    name = target if isinstance(target, str) else "target"
    module, examples = _load_and_call(target, name, arguments), None
    if isinstance(module, tuple) and len(module) == 2:
        module, examples = module
    if data is not None:
        examples = _load_and_call(data, data if isinstance(data, str) else "data")
    is_trainer = is_trainer_of_transformers(module)
    if is_trainer and or_trainer:
        examples = module.train_dataset if examples is None else examples
    elif is_trainer or not hasattr(module, "training_step"):
        got = type(module).__name__
        if isinstance(module, tuple):
            got += f" of {', '.join(type(each).__name__ for each in module) or 'nothing'}"
        raise Refusal(
            name,
            "be a LightningModule, or a function that returns a LightningModule and its data",
            got,
            "Name such a function.",
        )
    if examples is None:
        from noisescale.lightning.own_loaders import data_of, makes_loaders

        if is_trainer or not makes_loaders(module):
            without = "`train_dataset`" if is_trainer else "`train_dataloader`"
            raise Refusal(
                name,
                "come with data",
                f"only a {type(module).__name__} without {without}",
                "Give the `data`.",
            )
        examples = data_of(module)
    return module, examples


def is_trainer_of_transformers(made: Any) -> bool:
    """Return whether an object is one. Nothing is imported."""
    return hasattr(made, "compute_loss") and hasattr(made, "get_train_dataloader")


def train_and_val(data: Any) -> tuple[Any, Any]:
    """Return the data to train on, and the data to validate on or None.

    Args:
        data: A Dataset, a DataLoader or a LightningDataModule, or a pair of these: to train and to
            validate on. A list of two examples is a data set.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> train_and_val([[1.0], [2.0]])
        ([[1.0], [2.0]], None)
        >>> train_and_val((DataLoader([1.0]), DataLoader([2.0])))[1].dataset
        [2.0]
    """
    pair = isinstance(data, tuple | list) and len(data) == 2 and any(map(_is_source, data))
    train, val = data if pair else (data, None)
    return train, val


def _is_source(data: Any) -> bool:
    from torch.utils.data import DataLoader, Dataset

    return isinstance(data, Dataset | DataLoader) or hasattr(data, "train_dataloader")


def _load_and_call(target: Any, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    return call_if_callable(name, load(target) if isinstance(target, str) else target, arguments)


def text_of(target: Any, argument: str) -> str:
    """Return the text by which another process can load a target.

    Args:
        target: Such a text, or a function or class of a script, or of a module that can be
            imported.
        argument: The name of the argument, for the error.

    Raises:
        ValueError: If `load` would not find this target by its module and its name, or if this
            process is only loading the file of a target.

    Examples:
        >>> from collections import Counter
        >>> text_of(Counter, "target")
        'collections:Counter'
    """
    if loading := _LOADING.get():
        raise Refusal(
            argument,
            "be trained by a script, and not whenever the script is imported",
            f"a call while {loading} is loaded",
            'Write the call below `if __name__ == "__main__":`.',
        )
    if isinstance(target, str):
        return target
    place, name = (getattr(target, each, None) for each in ("__module__", "__qualname__"))
    found = sys.modules.get(place) if place and name else None
    file = getattr(found, "__file__", None)
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is None or found is not target or (place == "__main__" and file is None):
        raise Refusal(
            argument,
            "be found by the processes of the workers",
            f"{name or type(target).__name__}, which they cannot import",
            "Put a function that returns it into a file, and give its name as a text, for example"
            ' "train.py:make".',
        )
    return f"{os.path.relpath(file) if place == '__main__' and file else place}:{name}"


def is_first() -> bool:
    """Return whether this process is rank 0. Lightning starts the same command for every device."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0


@contextmanager
def shorten_errors() -> Iterator[None]:
    """Turn Lightning's errors about arguments into one line. Errors in a module keep all lines.

    Errors that did not come through Lightning stay as they are.
    """
    from noisescale.lightning.trainer_access import MisconfigurationException

    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        packages = [str(frame.f_globals.get("__name__")).split(".")[0] for frame in frames]
        hosts = {"lightning", "pytorch_lightning", "lightning_fabric"}
        if not hosts & set(packages):
            raise
        kinds = (ImportError, ValueError, *MisconfigurationException.__bases__)
        if packages[-1] in {*hosts, "noisescale"} and isinstance(error, kinds):
            raise ValueError(str(error)) from error
        traceback.print_exc()
        raise SystemExit(1) from error


@contextmanager
def refuse_out_of_memory(argument: str, remedy: str) -> Iterator[None]:
    """Turn the error of a device that runs out of memory into a refusal of an argument."""
    from noisescale.lightning.training import is_out_of_memory

    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise Refusal(
            argument, "fit in the memory of a device", "batches that do not", remedy
        ) from error


def _module(name: str) -> ModuleType:
    _search(Path.cwd())
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Refusal(path, "be a Python file", "a path without a file", "Check it.")
    _search(path.resolve().parent)
    if path.stem in sys.modules:  # the same name again, or that of another module
        known = sys.modules[path.stem]
        if Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
            return known
        raise Refusal(
            path,
            "not have the name of an imported module",
            repr(path.stem),
            "Rename the file.",
        )
    return importlib.import_module(path.stem)


def _search(folder: Path) -> None:
    """Search modules in a folder first, as a script in this folder would."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
