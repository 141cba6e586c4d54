# SPDX-License-Identifier: Apache-2.0
"""What every collector keeps, in every way of training; in each the ranks are forked once a tier.

The weights stand still, so that each example has one gradient in each step: see `brute_force`.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import devices
import pytest
import torch
import torch.distributed as dist
from brute_force import (
    Expected,
    columns_of,
    expected,
    gradients_of_examples,
    halvings,
    micro_batch,
    whole,
)
from ranks import on_ranks
from tiers import slow
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from ways_of_capture import WAYS, Net, Way, batch, half_squares, not_averaging

from noisescale.collectors.collector import Collector
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import MeasuredStep, StepRows
from noisescale.collectors.rows.window_layout import UNKNOWN
from noisescale.meter.choosing import choose_collector
from noisescale.meter.options import MeterOptions

pytestmark = pytest.mark.usefixtures("device")

STEPS = 4  # by then DDP's hooks have given way to the end of the backward pass

ACCIDENTS = {
    3: "no pass",
    5: "not finite",
    7: "not announced",
    9: "not watching",
    11: "a hook fails",
    13: "zero_grad",
}
"""What happens at which step. At all but the last there is nothing to measure."""

SPOILED = (
    "noisescale.collectors.gradient_norms.norms_of",
    "noisescale.collectors.gradient_norms.norms_of_one",
)
"""What hooks call."""


class Case(NamedTuple):
    """A training of some steps."""

    rows: tuple[tuple[int, ...], ...]
    """In each micro-batch of each rank."""
    size: Callable[[int], float] = lambda micro: 1.0
    """What a row of a micro-batch counts."""
    weights: tuple[tuple[float, ...], ...] = ()
    over_step: bool = False
    """Whether the loss is one mean over what the weights count."""
    divisor: float | None = None
    """What each loss is divided by; None: the micro-batches of a step."""
    frozen: tuple[str, ...] = ()
    only: str = ""
    """Part of the names of the parameters that are asked for."""
    groups: Any = None
    branch: Callable[[int, int], bool] = lambda rank, micro: True
    """Whether a micro-batch goes through `side`."""
    clipped: bool = False
    """Whether the step's gradient has to be taken before `backward` is over."""
    accidents: bool = False
    quick: Sequence[str] = ()
    """What is compared where it runs in `make test`: see `Way.part`."""

    def steps(self) -> range:
        return range(max(ACCIDENTS) + 2 if self.accidents else STEPS)

    def is_of_the_host(self) -> bool:
        """Whether the host does the arithmetic. Such cases run on the CPU only."""
        return bool(self.weights or self.divisor) or self.size(0) != 1


UNEQUAL = ((3, 6, 2), (5, 1, 4), (2, 2, 7))
WEIGHTS = ((1.0, 5.0, 2.0), (3.0, 1.0, 4.0), (2.0, 2.0, 1.0))
IN_GROUPS = {"ends": ["^first", "^last"], "norms": "norm"}
ALL_BUT_HALVES = ("rank", "micro_batch")
CASES = {
    "clipped, in groups": Case(UNEQUAL, groups=IN_GROUPS, clipped=True, quick=ALL_BUT_HALVES),
    "losses with weights, some unused": Case(
        UNEQUAL, weights=WEIGHTS, branch=lambda rank, micro: micro == 1, quick=ALL_BUT_HALVES
    ),
    "accidents": Case(UNEQUAL, accidents=True, quick=ALL_BUT_HALVES),
    "one batch": Case(((5,), (3,), (6,)), quick=("half",)),
    "one batch, clipped": Case(((6,), (4,), (3,)), clipped=True, quick=("half",)),
    "accidents of one batch": Case(((2,), (4,), (3,)), accidents=True, quick=("half",)),
    "unequal micro-batches, in groups": Case(UNEQUAL, groups=IN_GROUPS),
    "counted in tokens": Case(UNEQUAL, size=lambda micro: 4.5 + micro),
    "losses with weights": Case(UNEQUAL, weights=WEIGHTS),
    "one mean over the step": Case(UNEQUAL, weights=WEIGHTS, over_step=True),
    "a short last window": Case(((3, 6), (5, 1), (4, 4)), divisor=3),
    "some are frozen": Case(UNEQUAL, frozen=("first.bias", "norm.weight", "last.weight")),
    "some are asked for": Case(UNEQUAL, only="weight"),
    "some are unused": Case(UNEQUAL, branch=lambda rank, micro: False),
    "some are unused in some passes": Case(UNEQUAL, branch=lambda rank, micro: micro == 1),
    "some are unused on some ranks": Case(UNEQUAL, branch=lambda rank, micro: rank + micro == 0),
    "clipped": Case(UNEQUAL, clipped=True),
}


FIRST = ("micro-batches", "halves", "DDP", "FSDP2", "FSDP1")
"""The first way of each collector, a new one's too: those of other ways are slow tests."""


def cases_of(name: str, *, quick: bool) -> list[str]:
    """All but those that have nothing to compare, and what the engine cannot train."""
    way = WAYS[name]
    least = 2 if way.part == "micro_batch" and way.ranks == 1 else 1
    return [
        each
        for each, case in CASES.items()
        if (way.part in case.quick and (name in FIRST or not case.accidents)) == quick
        and len(case.rows[0]) >= least
        and not (devices.name != "cpu" and case.is_of_the_host())
        and each not in way.impossible
    ]


class Measured(NamedTuple):
    """What a rank saw of a case."""

    names: list[str]
    group_names: tuple[str, ...]
    steps: list[MeasuredStep | None]
    accidents: list[str]
    """What was seen of them."""
    without_norms: list[int]
    """The steps that had no small norms to rely on."""


class Facts(NamedTuple):
    """What a rank saw of a way of training, for the quick tests or for the slow ones."""

    cases: dict[str, Measured]
    equal_gradients: list[bool]
    hooks: list[list[str]]
    """Before there is a collector, with one, and after it was closed."""
    resumed: list[list[MeasuredStep]]
    """The same steps, of the run that went on and of the one that was resumed."""


class Training:
    """One rank of a case."""

    def __init__(self, way: Way, case: Case, *, measured: bool = True) -> None:
        self.way, self.case = way, case
        self.rank = dist.get_rank() if way.ranks > 1 else 0
        unused = not all(case.branch(r, m) for r in range(way.ranks) for m in range(3))
        self.device = devices.of_rank(self.rank)
        self.model = way.wrapped(Net(case.frozen).to(self.device), unused=unused)
        self.collector = self.new_collector() if measured else None
        self.accidents: list[str] = []
        self.without_norms: list[int] = []

    def new_collector(self) -> Collector:
        parameters = [p for n, p in self.model.named_parameters() if self.case.only in n]
        options: Any = {"small_batch": self.way.small_batch, "groups": self.case.groups}
        return choose_collector(self.model, MeterOptions(**options), parameters=parameters)

    def step(self, step: int, accident: str = "") -> MeasuredStep | None:
        """Train for one step, as the meter does."""
        if self.case.accidents:
            accident = ACCIDENTS.get(step, "")
        collector, sizes = self.collector, []
        self.model.zero_grad()
        rows = [] if accident == "no pass" else self.case.rows[self.rank]
        if collector is not None:
            collector.watching = accident != "not watching"
        with spoiled(accident == "a hook fails" and self.rank == 0):
            for micro, n in enumerate(rows):
                last, size = micro == len(rows) - 1, n * self.case.size(micro)
                x, y = self._batch(step, micro, n)
                if accident == "not finite" and self.rank == 0 and last:
                    x = x * torch.inf
                if accident == "zero_grad" and last and collector is not None:
                    self.model.zero_grad()
                    self._drop(collector, step)
                    sizes = []
                with not_averaging(self.model, self.way, last=last):
                    output = self.model(x, self.case.branch(self.rank, micro))
                    loss = half_squares(output, y) * self._factor(micro, accident)
                    if collector is not None and accident not in ("not watching", "not announced"):
                        collector.expect(rows=n, last=last)
                        collector.before_backward(
                            loss, size, capture_average=last and self.case.clipped
                        )
                        sizes.append(size)
                    loss.backward()
        if self.case.clipped:
            assert collector is None or not sizes or collector.average_captured
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.1)
        return None if collector is None else self._closed(collector, sizes, step)

    def _batch(self, step: int, micro: int, rows: int) -> list[Tensor]:
        return [part.to(self.device) for part in batch(step, self.rank, micro, rows)]

    def _drop(self, collector: Collector, step: int) -> None:
        """Have a pass before the last that averages, and drop what it gave."""
        collector.reset()
        with not_averaging(self.model, self.way, last=True):
            x, y = self._batch(step, 7, 4)
            loss = half_squares(self.model(x), y)
            collector.expect(rows=4, last=False)
            collector.before_backward(loss, 4)
            loss.backward()
        before = collector.gradients_dropped
        self.model.zero_grad()
        self.accidents.append(f"dropped {before} {collector.gradients_dropped}")
        collector.reset()

    def _factor(self, micro: int, accident: str) -> float:
        case, ranks = self.case, self.way.ranks
        if accident == "zero_grad":
            return 1.0
        if case.weights:
            return ranks * case.weights[self.rank][micro] / sum(map(sum, case.weights[:ranks]))
        return 1 / (case.divisor or len(case.rows[0]))

    def _closed(self, collector: Collector, sizes: list[float], step: int) -> MeasuredStep:
        small, layout = None, UNKNOWN
        try:
            small = collector.small_sq_norms()
        except ZeroDivisionError as error:
            self.accidents.append(f"raised {error}")
        if small is None:
            self.without_norms.append(step)
        big = collector.big_sq_norms()
        if self.case.weights:
            layout = collector.weighted_layout(sizes, self.case.weights[self.rank])
            layout = layout._replace(over_step=float(self.case.over_step))
        else:
            layout = collector.layout(sizes, self.case.divisor or len(sizes))
        queue = StepRows(collector.norms, collector.group)
        queue.add(
            small, big, layout, examples=sum(sizes), unmeasured_examples=0, unmeasured_steps=0
        )
        (measured,) = queue.read()
        collector.reset()
        return measured


@contextmanager
def spoiled(really: bool) -> Iterator[None]:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("in a hook")

    if not really:
        yield
        return
    with ExitStack() as stack:
        for name in SPOILED:
            stack.enter_context(patch(name, fails))
        yield


def measured(way: Way, names: Sequence[str]) -> dict[str, Measured]:
    found = {}
    for name in names:
        training = Training(way, CASES[name])
        collector = training.collector
        assert collector is not None
        steps = [training.step(step) for step in CASES[name].steps()]
        seen = steps, training.accidents, training.without_norms
        found[name] = Measured(collector.norms.names, collector.norms.group_names, *seen)
        collector.close()
    return found


def short_case(way: Way) -> Case:
    several = way.part == "micro_batch" and way.ranks == 1
    return CASES["counted in tokens" if several else "one batch"]


def neutral(way: Way) -> tuple[list[bool], list[list[str]]]:
    hooks: list[list[str]] = []

    def trained(*, with_one: bool) -> Iterator[Tensor]:
        training = Training(way, short_case(way)._replace(clipped=True), measured=False)
        hooks.append(hooks_of(training.model))
        if with_one:
            training.collector = training.new_collector()
        for step in range(STEPS):
            training.step(step, accident="not watching" if step == 1 else "")
            for p in training.model.parameters():
                if p.grad is not None:
                    yield getattr(p.grad, "_local_tensor", p.grad).clone()
            yield torch.get_rng_state()
            if training.collector is not None and step == 0:
                training.collector.watching = True
                hooks.append(hooks_of(training.model))
        if training.collector is not None:
            training.collector.close()
            hooks.append(hooks_of(training.model))

    ours, theirs = list(trained(with_one=True)), list(trained(with_one=False))
    return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)], hooks[:3]


def hooks_of(model: nn.Module) -> list[str]:
    """Everything that stays on a model, by name: add where a new collector hangs its hooks."""
    found = [f"module {key}" for key in torch_modules._global_forward_hooks]
    found += [f"module {key}" for key in torch_modules._global_forward_pre_hooks]
    found += ["retain_grad"] * ("retain_grad" in vars(Tensor))
    for name, module in model.named_modules():
        found += [f"{name} {key}" for key in (*module._forward_hooks, *module._backward_hooks)]
        if hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            unit = (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])[0]
            found.append(f"{name} {type(unit._reduce_scatter_comm).__module__}")
        if (handle := vars(module).get("_handle")) is not None:  # of FSDP1
            hooked = handle.flat_param._post_accumulate_grad_hooks
            found += [f"{name} {key}" for key in hooked or ()]
    for name, p in model.named_parameters():
        for some in (p._backward_hooks, p._post_accumulate_grad_hooks):
            found += [f"{name} {key}" for key in some or ()]
    return found


def resumed(way: Way) -> list[list[MeasuredStep]]:
    case = short_case(way)
    runs: list[list[Any]] = []
    state: dict[str, Any] = {}
    for goes_on in (True, False):
        training = Training(way, case)
        assert training.collector is not None
        training.collector.load_state_dict({})  # of a run that was not measured
        if goes_on:
            for step in range(STEPS):
                training.step(step)
            state = json.loads(json.dumps(training.collector.state_dict()))
        else:
            training.collector.load_state_dict(state)
        runs.append([training.step(step) for step in range(STEPS, 2 * STEPS)])
        training.collector.close()
    return runs


HERE = [name for name, way in WAYS.items() if way.ranks <= devices.most_ranks()]
of_each_way = pytest.mark.parametrize("way", HERE)
of_first_ways = pytest.mark.parametrize("way", [w if w in FIRST else slow(w) for w in HERE])


@cache
def facts_or_error(name: str, quick: bool) -> list[Facts] | Exception:
    way = WAYS[name]

    def of_rank() -> Facts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Facts(
                measured(way, cases_of(name, quick=quick)),
                *(neutral(way) if quick else ([], [])),
                resumed(way) if quick == (name in FIRST) else [],
            )

    try:
        if way.ranks == 1 and not devices.forks():
            return [of_rank()]
        return on_ranks(way.ranks, of_rank)
    except Exception as error:
        return error


def facts(way: str, *, quick: bool = True) -> list[Facts]:
    """Of every rank, found out once."""
    found = facts_or_error(way, quick)
    if isinstance(found, Exception):
        raise found
    return found


@pytest.fixture(autouse=True)
def found_out(way: str, request: pytest.FixtureRequest) -> None:
    """Before tests that are forked each: ranks of all of them are the same."""
    facts_or_error(way, request.node.get_closest_marker("slow") is None)


# ---- what is expected


@cache
def gradients(
    frozen: tuple[str, ...], branch: bool, step: int, rank: int, micro: int, rows: int
) -> list[Tensor]:
    """Of the rows of one micro-batch."""

    class Branched(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, branch)

    return gradients_of_examples(Branched(frozen), batch(step, rank, micro, rows), half_squares)


def expectations(way: Way, case: Case, step: int, columns: Sequence[int]) -> list[Expected]:
    """What a step may show: one thing, but by halves one for each way to halve the batch."""
    parts = []
    for rank in range(way.ranks):
        mine, single = [], []
        micros = list(enumerate(case.rows[rank]))
        if case.accidents and ACCIDENTS.get(step) == "zero_grad":
            micros = micros[-1:]
        for micro, rows in micros:
            weight = case.weights[rank][micro] if case.weights else 1.0
            single = gradients(case.frozen, case.branch(rank, micro), step, rank, micro, rows)
            mean = torch.stack(single).mean(0)
            mine.append(micro_batch(mean, rows * case.size(micro), weight))
        if way.part == "half" and len(micros) == 1:
            return halvings(single, columns)
        parts += [whole(mine)] if way.part == "rank" else mine
    if len(parts) < 2:
        return []
    found = expected(parts, columns)
    if case.over_step:  # tr(Σ)/B is the variance of the step's gradient
        size = sum(map(sum, case.rows[: way.ranks]))
        pairs = found.small_batch / found.big_batch
        found = found._replace(small_batch=size * pairs, big_batch=size)
    return [found]


def agree(got: StepNorms, want: Expected, tolerance: float) -> bool:
    close = pytest.approx(tuple(want), rel=tolerance)
    solved = pytest.approx(want.moments, rel=1e-3, abs=1e-3 * want.small_sq_norm)
    return bool(got[:4] == close and got.moments() == solved)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        case if quick else slow(*case)
        for quick in (True, False)
        for way in HERE
        for case in product([way], cases_of(way, quick=quick))
    ],
)
def test_norms_and_sizes_are_those_of_single_gradients(
    way: str, name: str, request: pytest.FixtureRequest
) -> None:
    """Those of the whole gradient and of every group, and so |G|² and tr(Σ)."""
    quick = request.node.get_closest_marker("slow") is None
    case, tolerance = CASES[name], 1e-5
    of_ranks = [cases[name] for cases, *_ in facts(way, quick=quick)]
    first, *others = of_ranks

    assert all(repr(other.steps) == repr(first.steps) for other in others)  # NaN is NaN
    everything = [n for n, p in Net(case.frozen).named_parameters() if p.requires_grad]
    wanted = sorted(n for n in everything if case.only in n)
    assert [sorted(one.names) for one in of_ranks] == [wanted] * len(of_ranks)
    compared = 0
    for step, measured in zip(case.steps(), first.steps, strict=True):
        assert measured is not None
        accident = ACCIDENTS.get(step, "") if case.accidents else ""
        columns = columns_of(Net(case.frozen), first.names.__contains__)
        choices = expectations(WAYS[way], case, step, columns)
        # Without a choice one micro-batch is left of the step.
        if accident not in ("", "zero_grad") or not choices:
            assert not measured.norms.comparable, step
            continue
        compared += 1
        assert any(agree(measured.norms, want, tolerance) for want in choices), step
        for entry, group in enumerate((*first.group_names, None)):
            names = [n for n in first.names if group_of(n, case) == group]
            of_group = columns_of(Net(case.frozen), names.__contains__)
            choices = expectations(WAYS[way], case, step, of_group)
            got = measured.entries[entry]
            assert any(agree(got, want, tolerance) for want in choices), (step, group)
    assert compared >= STEPS


def group_of(name: str, case: Case) -> str | None:
    """Those of the one case with groups, written out."""
    if not case.groups:
        return None
    return {"first": "ends", "last": "ends", "norm": "norms"}.get(name.split(".")[0])


@of_first_ways
def test_accidents_end_no_pass_and_leave_nothing_behind(way: str) -> None:
    """An error in a hook is raised once, in its step. Gradients that were dropped begin it anew.

    Without an announced pass there are no norms: nothing is left of the step before.
    """
    empty = {3, 7, 9}  # no pass, not announced, not watching
    for rank, (cases, *_) in enumerate(facts(way, quick=way in FIRST)):
        for name, measured in cases.items():
            if CASES[name].accidents:
                raised = ["raised in a hook"] if rank == 0 else []
                assert measured.accidents == [*raised, "dropped False True"]
                assert empty <= set(measured.without_norms) <= {*range(2), *ACCIDENTS}


@of_each_way
def test_gradients_and_random_numbers_are_bitwise_those_without(way: str) -> None:
    """And closing removes every hook."""
    for one in facts(way):
        assert len(one.equal_gradients) > STEPS
        assert all(one.equal_gradients)
        before, during, after = one.hooks
        assert during != before, "`hooks_of` sees none of this collector's hooks"
        assert after == before


@of_first_ways
def test_a_resumed_run_measures_what_the_one_that_goes_on_does(way: str) -> None:
    for one in facts(way, quick=way in FIRST):
        went_on, resumed = one.resumed
        assert all(step.norms.comparable for step in went_on)
        if WAYS[way].ranks < 3:
            # What is said of earlier steps begins anew, and no loss is heard.
            assert [[*step[:-4]] for step in went_on] == [[*step[:-4]] for step in resumed]
        else:  # DDP adds up three gradients in the order of its buckets
            for a, b in zip(went_on, resumed, strict=True):
                assert a.norms == pytest.approx(b.norms, rel=1e-6)
