# SPDX-License-Identifier: Apache-2.0
"""Help, version and completion of the command line."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from program import ended, run
from tiers import slow_after

import noisescale
from noisescale.cli.app import app

needs_short_help = pytest.mark.skipif(
    tuple(map(int, typer.__version__.split(".")[:2])) < (0, 20),
    reason="before typer 0.20 each option without a default says so in a line of its own",
)

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined] # a group


def help_of(monkeypatch: pytest.MonkeyPatch, *words: str, width: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    return run(*words, "--help")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_the_example_at_the_end_is_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = COMMANDS[name]

    text = help_of(monkeypatch, name)

    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name
        if parameter.param_type_name == "option":
            assert parameter.opts[0] in text
    example = " ".join(text.partition("Example: ")[2].split())
    program, called, *words = shlex.split(example)
    assert (program, called) == ("noisescale", name)
    context = command.make_context(name, words)  # refuses what is no option of it
    missing = [p.name for p in command.params if p.required and context.params[p.name] is None]
    assert missing == []


@needs_short_help
def test_options_of_predict_fit_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_of(monkeypatch, "predict")

    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= 100


@needs_short_help
def test_commands_are_listed_without_being_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, errors = ended()
    assert (code, errors.strip()) == (2, "")

    text = help_of(monkeypatch)

    for name, command in COMMANDS.items():
        (said,) = re.findall(rf"^│ {name} +([A-Z].*\.) *│$", text, re.M)
        assert said == command.help.partition("\n\n")[0]
        assert f" {name} " in output


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version") == f"noisescale {noisescale.__version__}\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    slow_after(
        1,
        [
            (["noisescale", "pr"], ["profile", "predict"]),
            (["noisescale", "watch", "--o"], ["--optimizer", "--once"]),
            (["noisescale", "predict", "--second"], ["--second-run"]),
            (["noisescale", "predict", "light"], []),  # files are left to bash
        ],
    ),
)
def test_bash_completes_commands_and_options(
    words: list[str], completed: list[str], tmp_path: Path
) -> None:
    """By the script that `--install-completion` writes, with the program as it is installed."""
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    script = f"""
        noisescale --install-completion bash >/dev/null
        . ~/.bashrc
        complete -p noisescale
        COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}
        _noisescale_completion noisescale
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"

    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    registered, *found = done.stdout.split("\n")
    assert registered == "complete -o default -F _noisescale_completion noisescale"
    assert [name for name in found if name not in ("", words[-1])] == completed


def test_the_page_of_commands_has_every_option_with_its_help() -> None:
    """After a change of the command line run `python docs/commands.py`."""
    page = (Path(__file__).parents[2] / "docs/api/commands.md").read_text(encoding="utf-8")
    parts = re.split(r"^## `noisescale (\w+)`$", page, flags=re.MULTILINE)
    documented = dict(zip(parts[1::2], parts[2::2], strict=True))

    assert documented.keys() == COMMANDS.keys()
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if flag := next((opt for opt in parameter.opts if opt.startswith("--")), None):
                (line,) = re.findall(
                    rf"^\* `{flag}(?: (?:<[\w\[\]]+>|[A-Z]+))?`: (.*)$",
                    documented[name],
                    re.MULTILINE,
                )
                assert line.startswith(parameter.help)
            else:
                assert parameter.help in documented[name]
