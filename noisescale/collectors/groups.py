# SPDX-License-Identifier: Apache-2.0
"""Find the group of each parameter, by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from noisescale.history.metric_names import check_name
from noisescale.refusal import Refusal, TypeRefusal

# The mapping stands first: from a union that begins with a function jsonargparse, which
# LightningCLI is made of, writes "Unable to serialize" into configs.
Groups = Mapping[str, str | Sequence[str]] | Callable[[str], str | None]
"""A mapping from names of groups to one or several regular expressions, which are searched in the
names of parameters; or a function from a parameter's name to the name of its group."""


_Pairs = list[tuple[str, str]]
"""A group and a regular expression of it."""


def check_groups(groups: Groups | None) -> None:
    """Raise if `groups` is wrong for every model.

    Raises:
        ValueError: If loggers do not accept a name, or an expression does not compile.
        TypeError: If something has the wrong type.

    Examples:
        >>> check_groups({"attention": r"attn|attention", "ends": ["^embed", r"^head\\."]})
        >>> check_groups({"attention": "(attn"})
        Traceback (most recent call last):
        ...
        noisescale.refusal.Refusal: `groups` must have regular expressions, got '(attn' for
        'attention': missing ), unterminated subpattern at position 0. Correct it, or
        escape it with `re.escape`.
    """
    if groups is None or (callable(groups) and not isinstance(groups, Mapping)):
        return
    if not isinstance(groups, Mapping):
        raise TypeRefusal(
            "groups",
            "be a mapping or a function",
            repr(groups),
            "Pass a dict from names of groups to regular expressions, or a function from"
            " a parameter's name to its group's.",
        )
    for name, patterns in groups.items():
        one = isinstance(patterns, str)
        several = isinstance(patterns, Sequence) and patterns
        if not (isinstance(name, str) and (one or several)) or not all(
            isinstance(pattern, str) for pattern in patterns
        ):
            raise TypeRefusal(
                "groups",
                "map names to regular expressions",
                f"{name!r}: {patterns!r}",
                "Pass a string or a list of strings for each group.",
            )
    _pairs(groups)


def groups_of(names: Sequence[str], groups: Groups) -> list[str | None]:
    """Return the group of each parameter's name, None where it has none.

    A name that belongs to several groups is in the first of them.

    Raises:
        ValueError: If a regular expression matches no parameter, or a function gives a name that
            loggers do not take.
        TypeError: If a function gives something else than names.

    Examples:
        >>> groups_of(["norm.weight", "mlp.weight", "mlp.bias"], {"bias": "bias", "mlp": "mlp"})
        [None, 'mlp', 'bias']
    """
    check_groups(groups)
    if not isinstance(groups, Mapping):
        return _by_function(names, groups)
    return _by_patterns(names, _pairs(groups))


def _pairs(groups: Mapping[str, str | Sequence[str]]) -> _Pairs:
    pairs = []
    for name, patterns in groups.items():
        check_name(name, "groups", "have names")
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            try:
                re.compile(pattern)
            except re.error as reason:
                raise Refusal(
                    "groups",
                    "have regular expressions",
                    f"{pattern!r} for {name!r}: {reason}",
                    "Correct it, or escape it with `re.escape`.",
                ) from None
            pairs.append((name, pattern))
    return pairs


def _by_patterns(names: Sequence[str], pairs: _Pairs) -> list[str | None]:
    for group, pattern in pairs:
        if not any(re.search(pattern, name) for name in names):
            raise Refusal(
                "groups",
                "have regular expressions that match parameters",
                f"{pattern!r} for {group!r}, which matches none",
                f"Some names: {', '.join(names[:5])}.",
            )
    return [
        next((group for group, pattern in pairs if re.search(pattern, name)), None)
        for name in names
    ]


def _by_function(names: Sequence[str], function: Callable[[str], str | None]) -> list[str | None]:
    found = [function(name) for name in names]
    for name, group in zip(names, found, strict=True):
        if group is not None and not isinstance(group, str):
            raise TypeRefusal(
                "groups",
                "give a name or None",
                f"{group!r} for {name!r}",
                "Return None for a parameter that belongs to no group.",
            )
    for group in dict.fromkeys(found):
        if group is not None:
            check_name(group, "groups", "have names")
    return found
