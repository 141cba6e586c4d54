# SPDX-License-Identifier: Apache-2.0
"""The names of hooks that others have registered."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.modules.module as of_modules


def function_of(hook: Any) -> Any:
    """Return the function that a hook calls in the end."""
    while isinstance(hook, partial | of_modules._WrappedHook):
        hook = hook.func if isinstance(hook, partial) else hook.hook
    return getattr(hook, "__func__", hook)


def name_of(hook: Any) -> str:
    """Return the full name of the function that a hook calls, or of an object's class."""
    function = function_of(hook)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__ or 'builtins'}.{named.__qualname__}"
