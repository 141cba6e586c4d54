# SPDX-License-Identifier: Apache-2.0
"""Commands made from functions: their options, types, defaults and texts are the function's own.

The function is read from its source and not imported, so that help stays fast.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from noisescale.cli.showing import check_html
from noisescale.cli.values import flags_of
from noisescale.refusal import rename_arguments

Values = dict[str, Any]
"""The arguments that were typed, by their names in Python."""

_HOME = {
    "branch": "lab.branch.branch",
    "compare": "lab.compare.compare",
    "fit": "tradeoff.fit_sweep",
    "horizon": "rules.horizon",
    "measure": "frozen.measure",
    "predict": "prediction.predict",
    "profile": "profiling.profile",
    "rescale": "rules.rescale",
    "sweep": "lab.sweep.sweep",
    "tune": "lab.tune.tune",
}
"""The module of each function that is a command of the same name."""

_KINDS = {"PathLike": Path, "str": str, "float": float, "int": int, "bool": bool}
"""What is typed for an argument, by a word in its annotation. The first that is found counts."""


@dataclass(frozen=True)
class Given:
    """How an argument is given on the command line, where it is not as in Python.

    Args:
        kind: Its type.
        help: Its text.
        flag: Its flag.
        metavar: What stands for its value in the help.
        default: Its default; `...` if it has to be given.
        read: Makes the value for Python from what was typed.
    """

    kind: Any = None
    help: str = ""
    flag: str = ""
    metavar: str | None = None
    default: Any = Parameter.empty
    read: Callable[[Any], Any] | None = None


def command_from(
    function: str,
    given: Mapping[str, Given | str] = MappingProxyType({}),
    *,
    positional: str = "",
    panels: Mapping[str, str] = MappingProxyType({}),
    only: str = "",
    without: str = "progress",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the options of a public function.

    The decorated function takes the values of these options. Its further arguments are options of
    the command alone. Errors name arguments as they are typed.

    Args:
        function: The name of the function.
        given: What differs on the command line; a text alone is another text of help.
        positional: Arguments without a flag.
        panels: From the title of a panel in the help to its arguments.
        only: The arguments that the command has. Default: all.
        without: Arguments that it has not.
    """
    known = {each.name: each for each in _arguments_of(function)}
    names = [name for name in only.split() or known if name not in without.split()]
    flags = {name: f"--{name.replace('_', '-')}" for name in known}
    flags |= {name: name.upper() for name in positional.split()}
    panel_of = {name: title for title, listed in panels.items() for name in listed.split()}
    special = {
        name: Given(help=one) if isinstance(one, str) else one for name, one in given.items()
    }

    def parameter(name: str) -> Parameter:
        one, own = special.get(name, Given()), known[name]
        default = own.default if one.default is Parameter.empty else one.default
        kind = one.kind or own.kind
        said = one.help or _text_as_typed(own.help, flags)
        option: Any
        if name in positional.split():
            option = typer.Argument(metavar=flags[name], help=said)
        else:
            option = typer.Option(
                one.flag or flags[name],
                metavar=one.metavar,
                help=said,
                rich_help_panel=panel_of.get(name),
            )
        return Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is ... else default,
            annotation=Annotated[kind | None if default is None else kind, option],
        )

    def as_in_python(name: str, value: Any) -> Any:
        read = special.get(name, Given()).read
        return value if read is None else read(value)

    def make(body: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(body, include_extras=True)
        own = [
            each.replace(annotation=hints[each.name], kind=Parameter.KEYWORD_ONLY)
            for each in [*inspect.signature(body).parameters.values()][1:]
        ]
        parameters = [*map(parameter, names), *own]

        def command(**typed: Any) -> None:
            check_html(typed.get("html"))
            with rename_arguments(flags_of(command)):
                values = {name: as_in_python(name, typed.pop(name)) for name in names}
                body(values, **typed)

        command.__name__, command.__doc__ = body.__name__, body.__doc__
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        return command

    return make


@dataclass(frozen=True)
class _Argument:
    """An argument of a function in its source. Of a default that is an expression, None is left."""

    name: str
    kind: Any
    default: Any
    help: str


def _arguments_of(function: str) -> Iterator[_Argument]:
    """Yield the arguments of a public function."""
    path = Path(__file__).parents[1].joinpath(*_HOME[function].split("."))
    source = path.with_suffix(".py").read_text(encoding="utf-8")
    tree = ast.parse(source).body
    (node,) = (each for each in tree if isinstance(each, ast.FunctionDef) and each.name == function)
    texts = _texts_of(ast.get_docstring(node) or "")
    plain, defaults = node.args.args, node.args.defaults
    required: list[ast.expr | None] = [None] * (len(plain) - len(defaults))
    for argument, default in (
        *zip(plain, [*required, *defaults], strict=True),
        *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
    ):
        words = re.findall(r"\w+", ast.unparse(argument.annotation or ast.Constant(None)))
        kind = next((kind for word, kind in _KINDS.items() if word in words), str)
        value = ... if default is None else getattr(default, "value", None)
        yield _Argument(argument.arg, kind, value, texts.get(argument.arg, ""))


def _texts_of(docstring: str) -> dict[str, str]:
    """Return what a docstring says of each argument.

    Examples:
        >>> _texts_of("Fit.\\n\\nArgs:\\n    by: What\\n        counts.\\n\\nReturns:\\n    All.")
        {'by': 'What counts.'}
    """
    section = re.split(r"\n(?=\S)", docstring.partition("\nArgs:\n")[2])[0]
    parts = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
    return {
        name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def _text_as_typed(text: str, flags: Mapping[str, str]) -> str:
    """Return a text in the words of the command line.

    Examples:
        >>> _text_as_typed('Such as "2h". With `max_cost` see `sweep`.', {"max_cost": "--max-cost"})
        'Such as 2h. With --max-cost see `noisescale sweep`.'
    """
    text = re.sub(r'"([^"]*)"', r"\1", text)

    def name_as_typed(found: re.Match[str]) -> str:
        command = f"`noisescale {found[1]}`" if found[1] in _HOME else found[0]
        return flags.get(found[1], command)

    return re.sub(r"`(\w+)`", name_as_typed, text)
