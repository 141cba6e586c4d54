# SPDX-License-Identifier: Apache-2.0
"""Keep failures beside the training from ending it: they warn, and training goes on."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch.distributed as dist

# Private in torch 2.13: how checkpointing ends a recomputation once it has what it needs.
from torch.utils.checkpoint import _StopRecomputationError

_log = logging.getLogger(__name__)


class NotMeasured(ValueError):
    """The gradients of a training cannot be measured. It is a warning for users: training goes on.

    Args:
        reason: Why, and what to change.
        remedy: What helps instead, if callbacks say under their trainer how it is done.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason + remedy)
        self.reason = reason
        self.remedy = remedy

    @classmethod
    def of_setting(cls, setting: str, value: str, reason: str, remedy: str) -> NotMeasured:
        """Return the error of a setting of the trainer, with the reason and the remedy."""
        return cls(f"`{setting}` is {value}: {reason}. {remedy}")


class Guard:
    """Catch errors beside a training, and warn once for each kind of error.

    Each rank warns of its own failures, as the other ranks do not see them. The traceback goes to
    the log `noisescale.guard`, at the level DEBUG.

    Args:
        *let_pass: Errors that it does not catch.

    Examples:
        >>> guard = Guard()
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(2):
        ...         with guard("There is no report"):
        ...             raise OSError("the disk is full")
        >>> [str(warning.message) for warning in caught]
        ['There is no report: OSError: the disk is full (<doctest ...>, line 5). Training goes on.']
    """

    def __init__(self, *let_pass: type[Exception]) -> None:
        self.let_pass = let_pass
        """Errors that it does not catch."""
        self._warned: set[str] = set()
        self.last = ""
        """The last error that it caught, in words."""

    @contextmanager
    def __call__(self, lost: str) -> Iterator[None]:
        """Let an error end this block only, and warn with `lost`: what is missing because of it."""
        try:
            yield
        except self.let_pass:
            raise
        except Exception as error:
            self.tell(lost, error)

    def tell(self, lost: str, error: Exception) -> None:
        """Warn about an error that was caught elsewhere."""
        _log.debug("%s", lost, exc_info=error)
        self.last = str(error) if isinstance(error, NotMeasured) else f"{lost}: {error}"
        if lost in self._warned:
            return
        self._warned.add(lost)
        on_rank = f" on rank {rank}" if (rank := _rank()) else ""
        warnings.warn(
            f"{lost}{on_rank}: {type(error).__name__}: {error}{_line_of(error)}. Training goes on.",
            stacklevel=2,
        )


class WarnOnce:
    """Warn once, on one rank, of something that all ranks see.

    Examples:
        >>> warn = WarnOnce()
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(2):
        ...         warn("The loader is short.")
        >>> len(caught)
        1
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self.last = ""
        """The last message, whether it was new or not."""

    def __call__(self, message: str, *, about: str | None = None) -> None:
        """Warn once. `about` names the topic that messages of several wordings share."""
        about = message if about is None else about
        self.last = message
        if about not in self._warned and _rank() == 0:
            warnings.warn(message, stacklevel=3)
        self._warned.add(about)


class WarnLater(WarnOnce):
    """Keep warnings until it is known whether they matter.

    Examples:
        >>> warn = WarnLater()
        >>> warn("The batch has one row.")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn.release()
        >>> len(caught)
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[str, str | None]] = []

    def __call__(self, message: str, *, about: str | None = None) -> None:
        """Keep a warning."""
        self._kept.append((message, about))

    def release(self) -> None:
        """Issue the warnings that were kept, each once."""
        kept, self._kept = self._kept, []
        for message, about in kept:
            super().__call__(message, about=about)

    def drop(self) -> None:
        """Forget what was kept."""
        self._kept = []


_Hook = TypeVar("_Hook", bound=Callable[..., None])


def never_ends_training(hook: _Hook) -> _Hook:
    """Decorate a callback's hook: only what the callback's `_guard` lets pass leaves it."""

    @wraps(hook)
    def run_guarded(callback: Any, *args: Any, **kwargs: Any) -> None:
        # Called several times a step, when each further call takes long: so no context manager.
        try:
            hook(callback, *args, **kwargs)
        except Exception as error:
            if isinstance(error, callback._guard.let_pass):
                raise
            callback._guard.tell(f"{type(callback).__name__} failed in `{hook.__name__}`", error)

    return cast(_Hook, run_guarded)


class HookErrors:
    """Keeps an error of a hook until the step ends. Raised in the hook, it would end the pass."""

    _error: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether a hook has failed since the step began."""
        return self._error is not None

    def raise_error_of_hook(self) -> None:
        """Raise the error of a hook once, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error


_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=HookErrors)


def keeps_errors(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R | None]:
    """Decorate a method that torch calls in a pass: it keeps its errors, see `HookErrors`."""

    @wraps(method)
    def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return method(self, *args, **kwargs)
        except _StopRecomputationError:
            raise
        except Exception as error:
            self._error = error
            return None

    return call


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _line_of(error: Exception) -> str:
    frames: list[Any] = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
