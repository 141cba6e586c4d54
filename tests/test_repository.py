# SPDX-License-Identifier: Apache-2.0
"""What a newcomer reads and runs: links, commands, code blocks, the benchmarks."""

import ast
import inspect
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import in_a_fork
from scripts import ROOT, helps, printed, run
from tiers import slow
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import noisescale
from noisescale.meter.run_log import LOGGED

pytestmark = pytest.mark.timeout(300)

PLACES = "*.md", "docs/**/*.md", "benchmarks/*.md", "tests/*/*.md"
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))


def page(name: str) -> str:
    return (ROOT / name).read_text()


def code_of(text: str) -> list[str]:
    """The blocks of Python of a page; they run on a CPU."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block.replace('accelerator="auto"', 'accelerator="cpu"') for block in blocks]


README = page("README.md")
TROUBLESHOOTING = page("docs/troubleshooting.md")
PROJECT = tomllib.loads(page("pyproject.toml"))


def test_relative_links_lead_somewhere() -> None:
    links = [(file, to) for file in PAGES for to in re.findall(r"\]\(([^)#]+)\)", file.read_text())]

    assert len(links) > 100
    for file, target in links:
        assert target.startswith("http") or (file.parent / target).exists(), (file, target)


def test_on_pypi_the_readmes_links_lead_to_the_files_of_the_version() -> None:
    shown = README
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    repository = re.escape(PROJECT["project"]["urls"]["Source"])
    raw = repository.replace("github", "raw\\.githubusercontent", 1)

    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", shown)

    assert re.findall(r"pip install \S+", shown) == ['pip install "noisescale[tensorboard]"']
    assert len(links) > 15
    for image, link in links:
        assert link.startswith("https://"), link
        if "noisescale/noisescale" in link:
            place = raw + "/" if image else repository + "/blob/"
            found = re.fullmatch(place + r"v\$HFPR_VERSION/(.+)", link)
            assert found, link
            assert (ROOT / found[1].split("#")[0]).exists(), link


def test_the_extras_that_pages_install_exist() -> None:
    text = "".join(file.read_text() for file in [*PAGES, *ROOT.glob("docs/tutorials/*.ipynb")])

    named = re.findall(r'pip install \\?"[^[]*\[([a-z,-]+)\]', text)

    assert len(named) > 10
    assert set(",".join(named).split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_readmes_commands_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE)

    commands = re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)

    assert {"demo", "test"} <= set(commands) <= set(targets)


def test_the_oldest_constraints_are_the_bounds_of_the_package() -> None:
    project = PROJECT["project"]
    # No user is promised old tools, and TRL asks for newer versions than these.
    extras = {**project["optional-dependencies"], "dev": [], "trl": []}
    needed = sum(extras.values(), project["dependencies"])
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)$", "\n".join(needed), re.MULTILINE))

    pinned = dict(re.findall(r"^([^#=\n]+)==(.+)$", page("constraints-oldest.txt"), re.MULTILINE))

    assert {"torch", "pytorch-lightning", "lightning", "transformers", "numpy"} <= set(bounds)
    for name, bound in bounds.items():
        assert f"{pinned[name]}.".startswith(f"{bound}."), name


def training(folder: Path) -> dict[str, Any]:
    """What the README takes for given of a user of transformers."""
    from transformers import TrainingArguments

    args = TrainingArguments(str(folder), use_cpu=True, max_steps=1, report_to=[])
    return {"model": nn.Linear(2, 1), "args": args, "data": [{"input": [1.0, 2.0]}]}


ON_PAGES = "hugging-face measuring own-loop predicting pretraining sweeps time-to-result"
ON_PAGES += " prompts-or-generations ways-of-training weights"


@pytest.mark.parametrize("name", ["README", *(slow(f"docs/{name}") for name in ON_PAGES.split())])
def test_the_code_on_the_pages_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "generations" in name:
        pytest.importorskip("trl")
    blocks = code_of(page(f"{name}.md"))
    assert len(blocks) >= 1 + 2 * (name == "README")
    history = noisescale.History()
    noise_scale = {"noise_scale": 118.0, "low": 90.0, "high": 150.0}
    history.append(
        step=100, examples=3200, batch_size=32, seconds_per_step=0.1, devices=2, **noise_scale
    )

    monitor = SimpleNamespace(noise_scale="as measured", history=history)
    for name in ("sgd", "adam"):
        log = tmp_path / "runs" / name / "metrics.csv"
        log.parent.mkdir(parents=True)
        log.write_text("epoch,step,val_loss\n1,100,0.2\n2,200,0.1\n")
    for block in blocks:
        exec(block, training(tmp_path) | {"monitor": monitor})


def text_of(node: ast.expr) -> str:
    """The text of a string; "..." stands for values in it, or for all of it."""
    if isinstance(node, ast.Tuple):
        return "` and `".join(map(text_of, node.elts))
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    known = [getattr(part, "value", None) for part in parts]
    return "".join(part if isinstance(part, str) else "..." for part in known)


def messages_of_the_package() -> Iterator[str]:
    """Every string in the sources but docstrings; "..." stands for the values in it."""
    for source in Path(noisescale.__file__).parent.rglob("*.py"):
        tree = ast.parse(source.read_text())
        left_out: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                left_out.add(node.value)
            elif isinstance(node, ast.Call) and len(node.args) >= 4:  # Refusal, refuse
                argument, requirement, got, remedy = map(text_of, node.args[:4])
                yield f"`{argument}` must {requirement}, got {got}. {remedy}"
            elif isinstance(node, ast.JoinedStr):
                left_out.update(node.values)
                yield text_of(node)
            elif isinstance(value := getattr(node, "value", None), str) and node not in left_out:
                yield value


def test_troubleshooting_quotes_messages_that_the_package_has() -> None:
    """In lines that begin with "> "; "..." stands for what differs from case to case."""
    messages = [" ".join(message.split()) for message in messages_of_the_package()]

    quotes = re.findall(r"^> (.+(?:\n> .+)*)", TROUBLESHOOTING, re.MULTILINE)

    assert len(quotes) > 20
    for quote in quotes:
        words = " ".join(quote.replace("\n> ", " ").split())
        assert len(words) > 20, quote
        pattern = ".*".join(re.escape(part.strip()) for part in words.split("..."))
        assert any(re.search(pattern, message) for message in messages), quote


@pytest.mark.slow
def test_the_code_on_troubleshooting_runs() -> None:
    in_a_fork(run_the_code_on_troubleshooting)()  # it changes settings of torch and of logging


def run_the_code_on_troubleshooting() -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import EarlyStopping

    names: dict[str, Any] = {name: getattr(noisescale, name) for name in noisescale.__all__}
    names |= {"EarlyStopping": EarlyStopping, "Trainer": Trainer}
    assert len(code_of(TROUBLESHOOTING)) > 5

    for block in code_of(TROUBLESHOOTING):
        exec(block, names)

    assert names["monitor"].examples_in({"input_ids": torch.zeros(4, 7)}) == 4
    model: Any = nn.Linear(4, 1)
    model.no_sync = nullcontext
    meter = noisescale.NoiseScaleMeter(model)
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(2)]
    exec(code_of(page("docs/own-loop.md"))[1], names)  # to which troubleshooting links
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        names["one_step"](model, optimizer, meter, batches, nn.MSELoss())
    assert (meter.measured_steps, meter.accumulation) == (4, 2)


def test_every_measured_truth_is_a_whole_row() -> None:
    heading, *rows = re.findall(r"^\| .*", page("docs/measured-truths.md"), re.MULTILINE)

    assert len(rows) >= 9
    for row in rows:
        *_, truth, noise_scale, second, branches, source = (x.strip() for x in row.split("|")[:-1])
        assert row.count("|") == heading.count("|"), row
        value, low, high = map(float, re.findall(r"[\d.]+", truth))
        assert low < value < high, row
        assert float(noise_scale) > 0, row
        assert all(float(cell) > 0 for cell in (second, branches) if cell), row
        assert re.fullmatch(r"\[.+\]\(.+\)", source), row


def test_the_documented_keys_and_arguments_are_those_that_there_are() -> None:
    def keys(of: str, text: str | None) -> set[str]:
        return set(re.findall(rf"`({of}/\w+)`", text or ""))

    monitor = inspect.getdoc(noisescale.NoiseScaleMonitor) or ""
    logged = keys("noise_scale", monitor)
    scheduled = keys("batch_size", noisescale.BatchSizeScheduler.__doc__)
    arguments = re.findall(
        r"^    (\w+): ", monitor.split("Args:")[1].split("Raises:")[0], re.MULTILINE
    )
    suggested = re.findall(r"`(\w+)`", page("docs/measuring.md").split("## Arguments")[1])

    names = (*LOGGED, "between", "within")
    assert keys("noise_scale", page("docs/loggers.md")) == logged
    assert logged == {f"noise_scale/{name}" for name in names}
    assert len(scheduled) == 10
    assert set(arguments) == set(inspect.signature(noisescale.NoiseScaleMonitor).parameters)
    assert set(suggested) <= set(arguments)


@pytest.mark.slow
def test_the_loops_on_scheduling_and_copies_of_examples_train() -> None:
    names: dict[str, Any] = {}
    for block in code_of(page("docs/scheduling.md")):
        exec(block, names)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model.weight.clone()
    names["train"](model, optimizer, DataLoader(data, batch_size=4), nn.MSELoss(), epochs=2)
    assert not torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)  # the cosine's end

    names = {}
    exec(code_of(page("docs/copies-of-examples.md"))[1], names)
    model = nn.Linear(4, 3)
    before = model.weight.clone()
    data = TensorDataset(torch.rand(64, 4), torch.randint(3, (64,)))
    names["train"](model, DataLoader(data, batch_size=16))
    assert not torch.equal(model.weight, before)


def test_the_version_to_cite_is_that_of_the_package() -> None:
    (cited,) = re.findall(r"^version: (.+)$", page("CITATION.cff"), re.MULTILINE)
    sections = re.findall(r"^## \[(.+?)\]", page("CHANGELOG.md"), re.MULTILINE)

    assert cited == noisescale.__version__
    assert sections[0] == "Unreleased"
    assert cited.partition(".dev")[0] in sections or cited.endswith(".dev0")


def test_every_exported_name_works_and_the_rest_is_not_there() -> None:
    assert all(getattr(noisescale, name).__doc__ for name in noisescale.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'NoiseScaleMotor'"):
        noisescale.NoiseScaleMotor  # noqa: B018


def test_importing_the_package_is_light_and_the_arithmetic_needs_no_torch() -> None:
    loaded = run(
        "-c",
        "import sys, noisescale; print({'torch', 'numpy'} & sys.modules.keys());"
        "from noisescale import NoiseScaleEstimator, Tradeoff, History;"
        "from noisescale import steps_to_result, performance_profile;"
        "import noisescale.lab.compare;"
        "print({'torch', 'lightning', 'pytorch_lightning'} & sys.modules.keys())",
    )

    assert loaded == "set()\nset()\n"


@pytest.mark.slow
def test_lightnings_logger_stays_that_of_the_package_in_use() -> None:
    """In forks, for each package to be the first that is imported; noisescale may be, too."""
    code = """
        import os, torchmetrics
        for package in "lightning.pytorch", "pytorch_lightning", "noisescale":
            if os.fork() == 0:
                __import__(package)
                from noisescale import NoiseScaleMonitor
                from lightning_utilities.core import rank_zero
                print(package, rank_zero.log.name, flush=True)
                os._exit(0)
            os.wait()
    """

    said = dict(line.split() for line in run("-c", textwrap.dedent(code)).splitlines())

    assert said.pop("noisescale").startswith(("lightning.pytorch", "pytorch_lightning"))
    assert said.keys() == {"lightning.pytorch", "pytorch_lightning"}
    assert all(name.startswith(package) for package, name in said.items())


SCRIPTS = [p for p in sorted(ROOT.glob("benchmarks/*/[!_]*.py")) if p.parent.name != "lib"]


@pytest.mark.slow
def test_every_benchmark_says_what_it_measures() -> None:
    shown = helps(SCRIPTS)

    assert len(SCRIPTS) > 20
    for script, text in zip(SCRIPTS, shown, strict=True):
        assert text.startswith(f"usage: {script.name}"), script


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["cost/report", "prediction/single_runs", "scheduling/inner_product"]
)
def test_benchmarks_run(script: str) -> None:
    assert printed(f"benchmarks/{script}.py", "--smoke")


SMOKE = ["cost/endurance", "cost/scheduler", "cost/whole_runs", "scheduling/adaptive"]
SMOKE += [f"methods/{name}" for name in ("adasum", "carbs", "decentlam", "tune_prior")]
SMOKE += [
    "scheduling/fixed_budget",
    "scheduling/time_beside_steps",
    "suite/run",
    "accuracy/two_levels",
]
SMOKE += ["prediction/prompts_or_generations"]


@pytest.mark.weekly
@pytest.mark.parametrize(
    "words",
    [
        *(f"{script} --smoke" for script in SMOKE),
        "cost/engines --smoke",
        "accuracy/real_model --seeds 1 --steps 100",
        "accuracy/alike --looks 1 --tasks 'one class'",
        "accuracy/neutral --libraries torch --models RNN CTC checkpoint",
        "accuracy/coverage --runs 1000 --only '8 steps' --processes 1",
        "accuracy/groups --steps 20 --seeds 2 --truth 100",
        "accuracy/halves --models VAE 'two towers' --seeds 1 --batches 60 --rounds 8",
        "prediction/coverage --runs 200 --only 'b = 2 B, 200' --processes 1",
        "prediction/regimes --runs 10 --only 'perfect, α 1, 7' --processes 1",
        "prediction/step_times --fits 6 --only six --processes 1",
        "prediction/unsearched_rates --trials 6",
    ],
)
def test_benchmarks_that_repeat_tests_run(words: str) -> None:
    script, *options = shlex.split(words)

    assert printed(f"benchmarks/{script}.py", *options)


@pytest.mark.weekly
def test_the_benchmark_that_profiles_runs() -> None:
    """Not in a fork of this process: torch's profiler does not always survive one."""
    assert run("benchmarks/cost/overhead.py", "--smoke")
