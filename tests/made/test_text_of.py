# SPDX-License-Identifier: Apache-2.0
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from noisescale.made.targets import load, text_of
from noisescale.refusal import Refusal


def make() -> None:
    """What a test names."""


def test_a_function_is_named_by_its_module_and_a_text_stays() -> None:
    assert text_of("train.py:make", "target") == "train.py:make"
    assert text_of(OrderedDict, "target") == "collections:OrderedDict"
    assert load(text_of(make, "target")) is make


def test_a_function_of_a_script_is_named_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__main__")
    script.make, script.__file__ = make, str(tmp_path / "train.py")  # type: ignore[attr-defined]  # of a module
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make, "__module__", "__main__")

    assert text_of(make, "target") == "train.py:make"

    del script.__file__
    with pytest.raises(Refusal) as refused:
        text_of(make, "target")
    assert refused.value.arguments == ("target",)
    assert refused.value.got == "make, which they cannot import"
    assert refused.value.remedy.startswith("Put a function that returns it into a file, and give")


def test_what_no_other_process_would_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> None: ...

    for unnamed in (lambda: None, inner, partial(make)):
        with pytest.raises(Refusal, match="`data` must be found by the processes of the workers"):
            text_of(unnamed, "data")

    def other() -> None: ...

    monkeypatch.setattr(other, "__qualname__", "make")
    with pytest.raises(Refusal) as refused:
        text_of(other, "target")
    assert refused.value.got == "make, which they cannot import"


def test_a_call_at_the_end_of_the_targets_own_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker would begin the job again."""
    (tmp_path / "calls_itself.py").write_text(
        "from noisescale.made.targets import text_of\n"
        "def make(): ...\n"
        "text_of('calls_itself.py:make', 'target')\n"
    )
    monkeypatch.chdir(tmp_path)

    with pytest.raises(Refusal) as refused:
        load("calls_itself.py:make")

    assert refused.value.got == "a call while calls_itself.py:make is loaded"
    assert refused.value.remedy == 'Write the call below `if __name__ == "__main__":`.'
