# SPDX-License-Identifier: Apache-2.0
"""What a refusal says, by its fields."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from noisescale.refusal import Refusal


@contextmanager
def refused(
    *arguments: str, error: type[BaseException] = ValueError, **fields: Any
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect a refusal of these arguments.

    Args:
        arguments: Their names.
        error: What callers may catch it as.
        fields: `got`, `word` or `at` as they are; of `requirement` and `remedy` a part.
    """
    with pytest.raises(error) as raised:
        yield raised
    refusal = raised.value
    assert isinstance(refusal, Refusal), repr(refusal)
    assert refusal.arguments == arguments
    for name, expected in fields.items():
        value = getattr(refusal, name)
        if name in ("requirement", "remedy"):
            assert expected in value, f"{name}: {value}"
        else:
            assert value == expected, f"{name}: {value}"
