# SPDX-License-Identifier: Apache-2.0
"""What a trial was trained with, as loggers write it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from noisescale.extras import is_installed
from noisescale.refusal import Refusal

LEARNING_RATES = ("learning_rate", "lr")
"""Names of the learning rate. The first that is there counts."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object lay in memory. It differs between runs."""


class Hyperparameters(NamedTuple):
    """What a trial was trained with."""

    batch_size: float
    """NaN if it is not known."""
    learning_rate: float
    """NaN if it is not known."""
    others: Mapping[str, float | str]
    """All other numbers and words."""
    optimizer: str
    """The name of the optimizer; "" if it is not known."""


def hyperparameters(logged: Mapping[str, Any]) -> Hyperparameters:
    """Sort what was logged. Nested names are joined by "/", and their last part counts.

    Switches are 1 or 0: a run with Nesterov's momentum is no repetition of one without. Words and
    lists count, too, such as the name of a schedule or widths of layers. Addresses of objects are
    left out.

    A batch size or a learning rate that several nested names give differently is not known.

    Examples:
        >>> logged = {"optim": {"lr": "1e-3", "beta": 0.9}, "batch_size": 64, "decay": "cosine"}
        >>> found = hyperparameters(logged)
        >>> found.batch_size, found.learning_rate, found.others
        (64.0, 0.001, {'decay': 'cosine', 'optim/beta': 0.9})
    """
    flat = dict(_flatten(logged))
    numbers = {name: each for name, text in flat.items() if (each := _number(text)) is not None}
    batch_size = _common_number(numbers, "batch_size")
    rates = (_common_number(numbers, name) for name in LEARNING_RATES)
    learning_rate = next((rate for rate in rates if not math.isnan(rate)), math.nan)
    known = ("batch_size", *LEARNING_RATES)
    words = {name: _ADDRESS.sub("", each) for name, each in flat.items() if isinstance(each, str)}
    optimizer = words.pop("optimizer", "")
    given = words | numbers
    others = {name: each for name, each in given.items() if name.rpartition("/")[2] not in known}
    others |= {name: float(each) for name, each in flat.items() if isinstance(each, bool)}
    return Hyperparameters(batch_size, learning_rate, others, optimizer)


def read_hparams(folder: Path) -> dict[str, Any]:
    """Read the hparams.yaml that Lightning writes beside a log. It needs PyYAML, as Lightning does.

    Objects of classes in the file are left out, never made.

    Returns:
        An empty dictionary if there is no such file, or PyYAML is not installed.

    Raises:
        ValueError: If the file is not YAML.
    """
    file = folder / "hparams.yaml"
    if not file.is_file() or not is_installed("yaml"):
        return {}
    import yaml

    plain: Any = type("Plain", (yaml.SafeLoader,), {})
    plain.add_multi_constructor("", lambda loader, tag, node: None)
    plain.add_constructor("tag:yaml.org,2002:python/tuple", yaml.SafeLoader.construct_yaml_seq)
    try:
        found = yaml.load(file.read_text("utf-8"), plain)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refusal(
            file,
            "be YAML",
            " ".join(str(error).split()),
            "Correct or remove the file.",
        ) from error
    return found if isinstance(found, dict) else {}


def _flatten(logged: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in logged.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{before}{name}/")
        elif isinstance(value, (list, tuple)):
            yield f"{before}{name}", str([*value])
        else:
            yield f"{before}{name}", value


def _number(value: Any) -> float | None:
    """Return a finite number; None if it is none. YAML reads 1e-3 as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _common_number(numbers: Mapping[str, float], name: str) -> float:
    if name in numbers:
        return numbers[name]
    found = {each for at, each in numbers.items() if at.rpartition("/")[2] == name}
    return found.pop() if len(found) == 1 else math.nan
