# SPDX-License-Identifier: Apache-2.0
"""Faults put into the functions of the package, one after another, while something is trained."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import noisescale

_PACKAGE = str(Path(noisescale.__file__).parent)
OF_A_METER = {
    "Meter.step",
    "NoiseScaleMeter.step",
    "StepCapture.close_step",
    "StepCapture._open_collector",
    "_SpoilsStep.__enter__",
    "_SpoilsStep.__exit__",
    "StepCapture.ends_with",
    "refuse_join",
    "StepRows.add",
    "StepRows._reduce",
    "to_device",
}
"""What leads to a collective of a meter. It does nothing else; what it calls may fail."""


class FaultError(Exception):
    """Raised where a function of the package is called."""


class Faults:
    """Raise an error in each function that is called, once, and in one function a step.

    Args:
        begin: The name of the function from whose first call on faults are raised.
        spared: Whether the function of that module and name is left alone.
        done: Functions that have had theirs in an earlier fit.
    """

    def __init__(
        self, begin: str, spared: Callable[[str, str], bool], done: set[str] | None = None
    ) -> None:
        self.done = set() if done is None else done
        self._begin = begin
        self._spared = spared
        self._begun = False
        self._passed: set[CodeType] = set()
        gc.collect()  # what ends an earlier training must not have one

    def next_step(self) -> None:
        """Let another fault be raised; call it where a step begins."""
        sys.settrace(self._on_call)

    def stop(self) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code in self._passed:
            return
        if not code.co_filename.startswith(_PACKAGE):
            self._passed.add(code)
            return
        self._begun |= code.co_qualname == self._begin
        if not self._begun:
            return
        self._passed.add(code)
        module = code.co_filename.removeprefix(_PACKAGE)[1:]
        name = f"{module}: {code.co_qualname}"
        if name in self.done or "<" in code.co_name or self._spared(module, code.co_qualname):
            return
        self.done.add(name)
        # Python takes a trace function that raises out, so this is the only fault of the step.
        raise FaultError(name)
