# SPDX-License-Identifier: Apache-2.0
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from refused import refused

from noisescale.refusal import Refusal
from noisescale.user_code.targets import load, text_of


def make() -> None:
    """What a test names."""


def test_a_function_is_named_by_its_module_and_a_text_stays() -> None:
    assert text_of("train.py:make", "target") == "train.py:make"
    assert text_of(OrderedDict, "target") == "collections:OrderedDict"
    assert load(text_of(make, "target")) is make


def test_a_function_of_a_script_is_named_by_its_file(tmp_path: Path, monkeypatch: Any) -> None:
    script = ModuleType("__main__")
    script.make, script.__file__ = make, str(tmp_path / "train.py")  # type: ignore[attr-defined]  # of a module
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make, "__module__", "__main__")

    assert text_of(make, "target") == "train.py:make"

    del script.__file__
    with refused("target", got="make, which they cannot import", remedy="into a file"):
        text_of(make, "target")


def test_what_no_other_process_would_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> None: ...

    for unnamed in (lambda: None, inner, partial(make)):
        with refused("data"):
            text_of(unnamed, "data")

    def other() -> None: ...

    monkeypatch.setattr(other, "__qualname__", "make")
    with refused("target", got="make, which they cannot import"):
        text_of(other, "target")


def test_a_call_in_the_targets_own_file_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """Every worker would begin the job again."""
    (tmp_path / "calls_itself.py").write_text(
        "from noisescale.user_code.targets import text_of\n"
        "def make(): ...\n"
        "text_of('calls_itself.py:make', 'target')\n"
    )
    monkeypatch.chdir(tmp_path)

    with pytest.raises(Refusal) as raised:
        load("calls_itself.py:make")

    assert raised.value.got == "a call while calls_itself.py:make is loaded"
    assert "__main__" in raised.value.remedy
