# SPDX-License-Identifier: Apache-2.0
"""The controller in a loop of one's own: windows, decisions, state, several ranks."""

import json
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from refused import refused
from torch.nn.parallel import DistributedDataParallel

from noisescale import BatchSizeController, GradientMoments, NoiseScale, NoiseScaleMeter, Plan
from noisescale.scheduling import Gate, Given, Policy, Progress, RatioRule
from noisescale.scheduling.policy import Wanted
from noisescale.tradeoff.run_sums import gain_of

KNOWN = NoiseScale(500.0, 400.0, 600.0, grad_sq_norm=1.0, noise_trace=500.0, steps=50.0)


def sgd(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)


def made(
    rows: float = 8, accumulation: int = 4, policy: Any = "auto", **options: Any
) -> BatchSizeController:
    return BatchSizeController(Plan(rows, accumulation), sgd(), policy, **options)


def decided(
    controller: BatchSizeController,
    steps: int,
    measured: Callable[[int], int | None] = lambda step: None,
    *,
    known: NoiseScale | None = KNOWN,
    begin: Callable[[int], object] = lambda step: None,
) -> list[int]:
    """After which steps a decision was due, which is then taken; `measured` is the last step."""
    due = []
    for step in range(1, steps + 1):
        begin(step)
        controller.step()
        if controller.due_after(measured(step)):
            controller.decide(known, measured_step=measured(step))
            due.append(step)
    return due


@given(
    accumulations=st.lists(st.integers(1, 7), min_size=1, max_size=30),
    epochs=st.lists(st.integers(1, 20), min_size=1, max_size=3),
)
def test_windows_hand_out_every_batch_once_in_the_lengths_that_were_decided(
    accumulations: list[int], epochs: list[int]
) -> None:
    def policy(noise_scale: Any, plan: Plan, progress: Progress) -> float:
        return 8.0 * accumulations[progress.steps % len(accumulations)]

    controller = BatchSizeController(Plan(8, 2), sgd(), policy)
    wanted, seen = 2, []
    for length in epochs:
        epoch = []
        for window in controller.windows(range(length)):
            epoch += window
            left = length - len(epoch) + len(window)
            assert len(window) == min(wanted, left)
            controller.update(examples=8 * len(window))
            wanted = accumulations[controller.steps % len(accumulations)]
        seen.append(epoch)

    assert seen == [list(range(length)) for length in epochs]
    assert controller.examples == 8 * sum(epochs)


def test_a_short_last_window_counts_the_batches_that_it_has() -> None:
    controller = BatchSizeController(Plan(8, 4, devices=2), sgd(), lambda _, plan, __: 64.0)
    for _ in range(3):
        for _ in controller.windows(range(10)):
            controller.update()

    assert (controller.steps, controller.examples) == (9, 3 * 10 * 8 * 2)
    controller.update()
    assert controller.examples == 3 * 10 * 8 * 2 + 64


def test_a_function_is_obeyed_at_once_and_past_the_gates() -> None:
    controller = made(8, 1, lambda *_: 8000.0)

    move = controller.update()

    assert move is not None
    assert str(move).startswith("step 1: batch size 8 -> 8000 = 8 x 1000 micro-batches x 1 device")
    assert str(move).endswith(", lr x 31.6: the policy asks for it")
    assert (move.before, move.after, move.wanted) == (Plan(8, 1), Plan(8, 1000), 8000.0)
    assert list(controller.moves) == [move]


@pytest.mark.parametrize(
    ("policy", "bound"), [("ratio", "min_batch_size"), (lambda *_: 8000.0, "max_batch_size")]
)
def test_a_move_that_a_bound_makes_says_so(policy: Any, bound: str) -> None:
    move = made(8, 1, policy, **{bound: 64}).decide()

    assert move is not None
    assert move.after == Plan(8, 8)
    assert move.reason.endswith(f", `{bound}` is 64")


def test_named_policies_are_asked_seldom_and_early_and_after_another_measured_step() -> None:
    asked = decided(made(decide_every_n_steps=10), 80, known=None)
    measured = decided(made(decide_every_n_steps=10), 80, lambda step: (step - 1) // 30 * 30 + 1)

    assert asked[:6] == [4, 5, 6, 7, 8, 10]
    assert asked[-3:] == [51, 61, 71]
    assert measured == [4, 31, 61]


def test_a_saved_controller_knows_what_it_has_decided_on() -> None:
    first, second = made(), made()
    for step in range(40):
        if step == 20:
            first.decide(KNOWN, measured_step=20)
        first.step()

    second.load_state_dict(first.state_dict())

    assert [second.due_after(step) for step in (20, 21)] == [False, True]


@pytest.mark.parametrize("policy", ["tradeoff", "ratio", "norm_test", "doubling"])
def test_named_policies_grow_where_the_noise_scale_is_large_and_stay_where_it_is_unknown(
    policy: Any,
) -> None:
    unknown, known = made(8, 1, policy), made(8, 1, policy)
    for _ in range(5):
        unknown.step()
        known.step()

    assert unknown.decide() is None
    known.decide(KNOWN)
    assert known.plan.batch_size == (16 if policy == "doubling" else 32)


def test_a_named_policy_shrinks_and_the_learning_rate_with_it() -> None:
    controller = made(32, 512, Gate(RatioRule()))

    move = controller.decide(KNOWN, GradientMoments(grad_sq_norm=1.0, noise_trace=600.0))

    assert move is not None
    assert move.after == Plan(32, 128)
    gain = (1 + 600 / (32 * 512)) / (1 + 600 / (32 * 128))
    assert move.lr_factor == controller.lr_factor == pytest.approx(gain)


@pytest.mark.parametrize("lr_scaling", ["sqrt", "adascale"])
def test_a_schedule_is_kept_to_the_step_whatever_the_learning_rate_goes_by(lr_scaling: Any) -> None:
    controller = made(16, 1, {0: 16, 2: 32, 100: 64, 101: 48}, lr_scaling=lr_scaling)
    sizes: list[float] = []

    decided(controller, 103, known=None, begin=lambda _: sizes.append(controller.plan.batch_size))

    assert sizes == [16] * 2 + [32] * 98 + [64] + [48] * 2


@pytest.mark.parametrize(
    ("average", "b"),
    [
        ((1.0, 100.0), 100.0),
        ((-0.1, 100.0), 500.0),  # lost in the noise: what the steps so far tell
        ((0.01, 100.0), 500.0),  # huge by chance
        ((1.0, -1.0), 0.0),
        ((), 0.0),
    ],
)
def test_the_gain_goes_by_the_least_that_the_noise_scale_of_the_run_can_be(
    average: tuple[float, ...], b: float
) -> None:
    controller = made(32, 1, Gate(RatioRule()), lr_scaling="adascale")
    for _ in range(8):
        controller.step()

    controller.decide(KNOWN, GradientMoments(*average) if average else None)

    assert controller.plan.batch_size == 128
    assert controller.gain == controller.lr_factor == pytest.approx((1 + b / 32) / (1 + b / 128))


def test_every_step_counts_once_and_at_its_batch_size_in_what_the_run_was_worth() -> None:
    controller, adopting = made(500, 1, Gate(RatioRule())), made(500, 1, Gate(RatioRule()))

    last = decided(controller, 30)[-1]
    for _ in range(3):
        adopting.step()
    adopting.adopt(Plan(250, 1), "micro-batches of another size")  # between decisions
    adopting.step()
    adopting.decide(KNOWN)

    assert controller.run.min_steps == pytest.approx(last / (1 + 500 / 500))
    assert controller.run.critical_batch_size == pytest.approx(500)
    assert adopting.run.min_steps == pytest.approx(3 / (1 + 500 / 500) + 1 / (1 + 500 / 250))


def test_the_scaled_learning_rate_is_stepped_with() -> None:
    optimizer = sgd(lr=0.25)
    controller = BatchSizeController(Plan(8, 1), optimizer, {0: 32}, lr_scaling="linear")
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones(1)

    optimizer.step()
    controller.update()
    optimizer.step()

    assert parameter.item() == pytest.approx(1 - 0.25 - 4 * 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    controller.close()
    optimizer.step()
    assert parameter.item() == pytest.approx(1 - 1.5)


def test_all_of_the_state_is_loaded() -> None:
    controller, fresh = (
        made(rows, 4, Gate(RatioRule()), max_device_batch_size=64, base_batch_size=base)
        for rows, base in ((8, None), (16, 48))
    )
    unresolved = NoiseScale(math.nan, 40.0, math.inf, math.nan, math.nan, 9.0)
    for measured_step, noise_scale in ((1, KNOWN), (2, unresolved)):
        controller.step()
        controller.decide(noise_scale, GradientMoments(1.0, 600.0), measured_step=measured_step)
    controller.clock.advance(1.5)
    controller.lower_max_device_batch_size(48)
    saved, before = controller.state_dict(), fresh.state_dict()

    fresh.load_state_dict(saved)

    alike = {name for name in saved if before[name] == saved[name]}
    assert alike == {"same_schedule", "policy", "policy_kind", "losses"}
    assert fresh.state_dict() == saved


@pytest.mark.parametrize(
    ("within", "name"), [(None, "gain"), (None, "factors"), ("clock", "time"), ("run", "last")]
)
def test_a_state_that_lacks_something_is_refused_by_its_name(within: str | None, name: str) -> None:
    controller = BatchSizeController(Plan(8, 4), sgd())
    state = controller.state_dict()
    del (state[within] if within else state)[name]

    with pytest.raises(ValueError, match=f"have `{name}`") as error:
        controller.load_state_dict(state)

    assert within is None or f"`{within}`" in str(error.value)


class Counts:
    """A policy of a user's own that has a state."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, noise_scale: Any, plan: Plan, progress: Any) -> float:
        self.asked += 1
        return 32.0

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def test_another_policy_begins_without_the_state_of_the_first() -> None:
    first, counts = made(policy=Counts()), Counts()
    first.update()
    same, other = made(policy=counts), made(policy="seesaw")

    same.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="InsteadOfDecay, and the saved run had Counts"):
        other.load_state_dict(first.state_dict())

    assert counts.asked == 1
    assert other.progress.first_batch_size == other.plan.batch_size
    assert (other.steps, other.examples) == (1, 32.0)


class Ramp(Policy):
    """A policy of a user's own that says all that there is to say."""

    needs_noise_scale = True
    by_reduced_values = True
    checksum = None

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> float:
        self.seen.append(noise_scale.value)
        return 64.0


def test_a_policy_of_ones_own_is_asked_as_it_says() -> None:
    policy = Ramp()
    controller = made(policy=policy)

    assert decided(controller, 8) == [4, 5, 6, 7, 8]

    assert controller.settings.policy is policy
    assert policy.seen == [500.0] * 5
    assert controller.plan.batch_size == 64
    state = controller.state_dict()
    assert (state["policy"], state["policy_kind"]) == ({}, "Ramp")


@pytest.mark.parametrize(("says", "needs", "takes"), [(True, 1, 1), (False, 0, 0), (None, 0, 1)])
def test_a_function_says_by_an_attribute_whether_it_needs_the_noise_scale(
    says: bool | None, needs: bool, takes: bool
) -> None:
    def policy(*_: Any) -> float:
        return 32.0

    if says is not None:
        policy.needs_noise_scale = says  # type: ignore[attr-defined]
    settings = made(policy=policy, lr_scaling="sqrt").settings

    assert (settings.needs_noise_scale, settings.takes_noise_scale) == (needs, takes)


def test_resuming_a_schedule_takes_no_decision_that_was_not_due() -> None:
    """The learning rate, which follows the noise scale, would change with it."""

    def fresh() -> BatchSizeController:
        options: dict[str, Any] = {"lr_scaling": "adascale", "decide_every_n_steps": 8}
        return made(16, 1, {0: 16, 10: 64}, **options)

    def factors(half: int | None = None) -> list[float]:
        controller, seen = fresh(), []
        for step in range(60):
            if step == half:
                state = controller.state_dict()
                controller = fresh()
                controller.load_state_dict(state)
            controller.step()
            if controller.due_after(None):
                controller.decide(KNOWN, GradientMoments(1.0, 100.0 + step))
            seen.append(controller.lr_factor)
        return seen

    assert len(set(factors())) > 5
    assert factors(half=30) == factors()


def test_on_other_devices_the_global_batch_and_the_factor_stay() -> None:
    """How the plan is made anew is tested of `resume`."""
    first = of_two({0: 192}, 2, lr_scaling="linear")
    first.update()
    second = made(32, 1, {0: 192}, lr_scaling="linear", max_device_batch_size=32)

    second.load_state_dict(first.state_dict())

    assert (first.plan, second.plan) == (Plan(8, 12, devices=2), Plan(32, 6))
    assert second.lr_factor == first.lr_factor == 6.0
    assert (second.steps, second.examples, second.base_batch_size) == (1, 32.0, 32.0)


def error_of(act: Callable[[], object]) -> tuple[str, ...]:
    """The kind of an error, the kind of the one it came from, and what it says."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, type(error.__context__).__name__, str(error)
    return ()


def of_two(policy: Any, accumulation: int = 1, **options: Any) -> BatchSizeController:
    return BatchSizeController(Plan(8, accumulation, devices=2), sgd(), policy, **options)


def decisions_on(*sizes: float) -> list[str]:
    """Of a gated policy that wants another size on each rank."""
    controller, answers = of_two(Gate(lambda *_: sizes[dist.get_rank()]), 4), []

    def decide() -> None:
        answers.append("stays" if controller.decide(KNOWN) is None else "moves")

    for _ in range(2):
        if error := error_of(decide):
            return [*answers, error[-1].partition("got ")[2].partition(".")[0]]
    return answers


def failing_on(*ranks: int) -> tuple[str, ...]:
    def policy(*_: Any) -> float:
        if dist.get_rank() in ranks:
            raise ZeroDivisionError("mine")
        return 32.0

    return error_of(of_two(policy).update)


def with_schedules_of_their_own(*, resumed: bool) -> tuple[str, ...]:
    first, other = (of_two({0: 16, 1000: last}) for last in (32, 32 + 16 * dist.get_rank()))
    if not resumed:
        return error_of(other.update)
    first.update()
    return error_of(lambda: other.load_state_dict(first.state_dict()))


def collectives(policy: Any) -> int:
    controller = of_two(policy)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        for _ in range(20):
            controller.update()
    assert controller.plan.batch_size == 32
    return reduce.call_count


def moves_of_a_run() -> list[str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    meter = NoiseScaleMeter(model)
    meter.follow()
    controller = BatchSizeController(Plan(4, 1, devices=2), optimizer, Gate(RatioRule()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(60):
        for k in range(controller.plan.accumulation):
            x = torch.randn(4, 20, generator=generator)
            y = x[:, :1] + torch.randn(4, 1, generator=generator)
            model.require_backward_grad_sync = k == controller.plan.accumulation - 1
            loss = ((model(x) - y) ** 2).mean() / controller.plan.accumulation
            meter.backward(loss, local_batch_size=4)
        meter.step()
        optimizer.step()
        optimizer.zero_grad()
        controller.update(meter)
    return [str(move) for move in controller.moves]


@pytest.fixture(scope="module")
def on_both() -> dict[str, list[Any]]:
    """What both of two ranks see."""

    def everything() -> dict[str, Any]:
        rank, sizes = dist.get_rank(), {0: 16, 7: 32}
        return {
            "disagree": error_of(of_two(lambda *_: 32.0 + 16 * rank).update),
            "gated": [decisions_on(*both) for both in ((64, 64), (128, 128), (64, 128))],
            "one fails": failing_on(0),
            "all fail": failing_on(0, 1),
            "no learning rate": error_of(
                of_two(lambda *_: 32.0, lr_scaling=lambda *_: float(rank)).update
            ),
            "own schedules": [with_schedules_of_their_own(resumed=r) for r in (False, True)],
            "collectives": [
                collectives(policy)
                for policy in (sizes, Given(sizes, by="examples"), lambda *_: 32.0)
            ],
            "moves": moves_of_a_run(),
        }

    first, second = on_ranks(2, everything)
    return {name: [first[name], second[name]] for name in first}


def test_ranks_that_disagree_or_have_schedules_of_their_own_are_told_on_all_of_them(
    on_both: dict[str, list[Any]],
) -> None:
    first, second = on_both["disagree"]
    assert first == second
    assert "got 32 to 48" in first[-1]

    told = [error for of_rank in on_both["own schedules"] for error in of_rank]
    assert len(set(told)) == 1
    assert "the same schedule on all ranks" in told[0][-1]

    agree = [["stays", "stays"], ["moves", "stays"]]  # checked before a move, and at the next
    assert on_both["gated"] == [[*agree, ["stays", "64 to 128"]], [*agree, ["64 to 128"]]]

    def kinds(case: str) -> list[tuple[str, ...]]:
        return [error[:2] for error in on_both[case]]

    other = ("RuntimeError", "NoneType")  # none waits for one that failed
    assert kinds("one fails") == [("RuntimeError", "ZeroDivisionError"), other]
    assert kinds("all fail") == [("ZeroDivisionError", "NoneType")] * 2
    assert kinds("no learning rate") == [("RuntimeError", "Refusal"), other]


def test_ranks_agree_where_a_schedule_changes_and_at_each_step_on_a_function(
    on_both: dict[str, list[Any]],
) -> None:
    assert on_both["collectives"] == [[1, 1, 20]] * 2
    first, second = on_both["moves"]
    assert first == second
    assert len(first) > 1


@pytest.mark.parametrize(
    ("policy", "kinds", "scaling"),
    [
        ("tradeoff", "SGD", "adascale"),
        (RatioRule(), "SGD", "sqrt"),  # a function: nothing need be measured
        (Gate(RatioRule()), "SGD SGD", "adascale"),
        ("tradeoff", "AdamW", "sqrt"),
        ("auto", "SGD", "adascale"),
        ("auto", "SGD AdamW", "sqrt"),
        ("norm_test", "SGD Adam", "sqrt"),
        ("doubling", "SGD", "sqrt"),
        ({0: 32}, "SGD", "sqrt"),
        ("seesaw", "SGD", "sqrt"),
        ("smith", "Adam", "linear"),
    ],
)
def test_the_learning_rate_follows_as_optimizer_and_policy_ask_for(
    policy: Any, kinds: str, scaling: str
) -> None:
    optimizers = [
        getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(1))]) for kind in kinds.split()
    ]

    assert BatchSizeController(Plan(8, 4), optimizers, policy).settings.lr_scaling == scaling


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("policy", "best", ValueError),
        ("policy", 7, TypeError),
        ("lr_scaling", "cubic", ValueError),
        ("max_batch_size", 16, ValueError),  # less than at first
        ("max_device_batch_size", 0.5, ValueError),
        ("decide_every_n_steps", 0, ValueError),
        ("base_batch_size", 0, ValueError),
        ("examples_per_row", 0.0, ValueError),
        ("min_accumulation", 0, ValueError),
    ],
)
def test_what_cannot_be_is_refused(argument: str, value: Any, error: type[Exception]) -> None:
    with refused(argument, error=error) as raised:
        BatchSizeController(Plan(8, 4), sgd(), **{argument: value})

    assert raised.value.got.startswith(repr(value))


def test_what_contradicts_each_other_is_refused() -> None:
    with refused("lr_scaling", requirement='"linear"', got="'sqrt'"):
        made(policy="smith", lr_scaling="sqrt")
    with refused("min_batch_size", "max_batch_size") as error:
        made(min_batch_size=41, max_batch_size=47)
    assert error.value.got.startswith("41 to 47 for 1 device")
    with refused('lr_scaling="malladi"', got="SGD"):
        made(lr_scaling="malladi")
    with refused("optimizers", got="none"):
        BatchSizeController(Plan(8, 4), [])


def test_steps_that_cannot_be_measured_or_that_nobody_measures_are_refused() -> None:
    for options in ({"policy": "ratio"}, {"policy": {0: 32}, "lr_scaling": "adascale"}):
        with refused("meter", got="None"):
            made(**options).update()
    meter = NoiseScaleMeter(torch.nn.Linear(4, 1), small_batch="micro_batch")
    meter.follow()

    with refused("min_accumulation", requirement="at least 2", got="1"):
        BatchSizeController(Plan(8, 4), sgd()).update(meter)
    BatchSizeController(Plan(8, 4), sgd(), min_accumulation=2).update(meter)


def test_the_learning_rate_may_have_been_chosen_for_more_than_the_largest_batch() -> None:
    controller = made(policy=lambda *_: 128.0, base_batch_size=256, max_batch_size=64)

    controller.update()

    assert (controller.plan.batch_size, controller.lr_factor) == (64, 0.5)


@pytest.mark.parametrize("wanted", [math.nan, 0, math.inf, "64", None])
def test_a_policy_that_gives_no_batch_size_is_told(wanted: Any) -> None:
    with refused("policy", got=f"{wanted!r} at step 1"):
        made(policy=lambda *_: wanted).update()


def test_seesaw_follows_the_schedule_of_the_optimizer() -> None:
    """B·a and lr/√a, where StepLR alone would give lr/a."""
    optimizer = sgd(lr=0.4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.25)
    controller = BatchSizeController(Plan(8, 4), optimizer, "seesaw")
    seen = []
    for _ in range(6):
        optimizer.step()
        schedule.step()
        controller.update()
        lr = optimizer.param_groups[0]["lr"] * controller.lr_factor
        seen.append((controller.plan.batch_size, round(lr, 6)))

    assert seen == [(32, 0.4), (128, 0.2), (128, 0.2), (512, 0.1), (512, 0.1), (2048, 0.05)]


def test_the_batches_that_came_take_the_place_of_those_that_were_planned() -> None:
    controller = made(policy={0: 32, 2: 160}, max_batch_size=200)
    controller.step()

    controller.follow_batches(20.0, 43.0, max_batch_size=500)

    assert controller.plan == Plan(20.0, 4)
    assert (controller.base_batch_size, controller.examples) == (80, 75)
    controller.step()
    controller.decide()
    assert controller.plan == Plan(20.0, 8)
    assert controller.lr_factor == pytest.approx(math.sqrt(2))
    controller.follow_batches(600.0)  # which meets no bound
    controller.step()
    controller.decide()
    assert controller.plan == Plan(600.0, 1)


@pytest.mark.parametrize("lr_scaling", ["sqrt", "capped_sqrt"])
def test_a_schedule_by_examples_is_due_where_it_changes_alone(lr_scaling: Any) -> None:
    controller = made(policy={"0": 32, "0.1k": 64, "1k": 96}, lr_scaling=lr_scaling)

    due = decided(controller, 24, lambda _: 0, known=None)

    assert due[0] == 4  # after 128 examples
    assert len(due) == 2
    assert controller.plan.batch_size == 96


def test_the_learning_rate_of_a_loop_is_recorded_as_its_steps_had_it() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"small_batch": "micro_batch", "every_n_steps": 1}
    meter = NoiseScaleMeter(model, optimizer=optimizer, log_every_n_steps=1, **options)
    controller = BatchSizeController(Plan(8, 2), optimizer, {0: 16, 2: 64}, lr_scaling="sqrt")

    for window in controller.windows(torch.randn(8 * 20, 3).split(8)):
        for x in window:
            meter.backward(model(x).square().mean() / len(window), len(x))
        meter.step()
        optimizer.step()
        optimizer.zero_grad()
        controller.update(meter)

    assert meter.history["learning_rate"].tolist() == pytest.approx([0.1, 0.1, 0.2, 0.2])


@pytest.mark.parametrize(("size", "factor"), [(8.0, 0.25), (32.0, 1.0), (64.0, 1.0)])
def test_before_it_is_measured_a_smaller_batch_has_a_rate_in_proportion(
    size: float, factor: float
) -> None:
    controller = BatchSizeController(Plan(4, 8), sgd(), lambda *_: size, lr_scaling="adascale")

    controller.decide()

    assert controller.plan.batch_size == size
    assert controller.lr_factor == pytest.approx(factor)


def test_a_resumed_run_has_the_moves_and_the_reason_from_before() -> None:
    controller, resumed = made(policy={0: 32, 2: 64}), made(policy={0: 32, 2: 64})
    for _ in range(3):
        controller.update()
    assert controller.reason_to_stay is None

    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))

    assert list(resumed.moves) == list(controller.moves)
    assert [move.after.batch_size for move in resumed.moves] == [64]
    assert resumed.reason == "scheduled from 2 steps on"


def test_a_meter_is_told_the_last_step_of_the_run_as_the_batch_size_is_now() -> None:
    controller, meter = made(policy={0: 32, 2: 64}), mock.Mock(last_step=None)
    controller.tell(meter)
    assert meter.last_step is None  # the end of the run is not known
    controller.clock.end_with(steps_of_epochs=10)
    told = []
    for _ in range(6):
        controller.tell(meter)
        told.append(meter.last_step)
        controller.clock.advance(controller.plan.batch_size / 32)
        controller.update()

    assert told == [10, 10, 6, 6, 6, 6]


def test_a_run_without_a_move_has_a_reason_to_stay() -> None:
    controller = made(policy={0: 32})
    assert controller.reason_to_stay is None  # it was not asked yet
    controller.update()

    assert "the batch size stayed 32" in str(controller.reason_to_stay)
    assert "scheduled from 0 steps on" in str(controller.reason_to_stay)


def test_once_all_is_decided_steps_are_measured_as_without_a_scheduler() -> None:
    def measured_steps(share: float) -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        controller = BatchSizeController(Plan(8, 1), optimizer, max_batch_size=8)
        controller.clock.end_with(steps_of_epochs=100 / share)
        meter = NoiseScaleMeter(model)
        meter.follow()
        for step in range(200):
            meter.backward(model(torch.randn(8, 2)).square().mean(), local_batch_size=8)
            meter.step()
            optimizer.zero_grad()
            controller.clock.advance(1 if step < 100 else 0)
            controller.update(meter, examples=8)
        return meter.measured_steps

    assert measured_steps(0.9) < 0.8 * measured_steps(0.001)


@pytest.mark.parametrize(("epochs", "ends_by"), [(100.0, "steps"), (3.0, "examples")])
def test_before_the_first_step_the_nearer_limit_ends_the_run(epochs: float, ends_by: str) -> None:
    controller = made()
    controller.clock.end_with(steps_of_epochs=epochs, optimizer_steps=10)

    assert controller.progress.ends_by == ends_by
    assert controller.progress.most_steps == 10


def test_a_resumed_run_is_not_told_again_what_a_new_one_is() -> None:
    controller = made()
    assert controller.choice is not None
    controller.step()

    assert controller.choice is None


def test_the_reason_to_stay_names_the_bound_that_the_answer_met() -> None:
    controller = made(8, 4, policy=lambda *_: Wanted(2, "because"), min_batch_size=32)
    controller.update()

    assert str(controller.reason_to_stay).endswith("because, `min_batch_size` is 32")


def test_what_find_decided_last_is_said_also_after_a_move() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    controller = BatchSizeController(Plan(8, 4), optimizer)
    controller.clock.end_with(steps_of_epochs=4_000)
    assert controller.begin() is not None
    assert controller.reason_to_stay is None
    while not controller.settings.policy.done:
        controller.step()
        controller.clock.advance(controller.plan.batch_size / 32)
        if controller.due_after(None):
            controller.decide(KNOWN)

    assert len(controller.moves) == 1
    said = str(controller.reason_to_stay)
    assert "stayed 64 = 8 x 8 micro-batches x 1 device from step 0 on: by the run's" in said
    assert said.endswith("128,000 examples alone: the slope of a cross-entropy is not known")


def test_a_schedule_begins_with_its_first_batch_size_in_a_loop_of_ones_own() -> None:
    controller = made(8, 4, policy="0:16 8k:32")
    assert controller.begin() is not None
    assert controller.begin() is None
    lengths = [len(window) for window in controller.windows(range(6))]

    assert lengths == [2, 2, 2]
    assert [move.step for move in controller.moves] == [0]


def test_it_begins_once_and_not_in_a_run_that_is_under_way() -> None:
    asked = []

    class Counted(Given):
        def __call__(self, noise_scale: object, plan: Plan, progress: Progress) -> Wanted:
            asked.append(progress.steps)
            return super().__call__(noise_scale, plan, progress)

    fresh, under_way = (made(8, 4, policy=Counted({0: 16}, by="examples")) for _ in range(2))
    for _ in range(2):
        fresh.begin()
    under_way.step()

    assert asked == [0]
    assert under_way.begin() is None
    assert under_way.plan.batch_size == 32


def test_a_last_decision_that_moved_the_batch_is_not_said_again() -> None:
    class Decides(Policy):
        done = True

        def __call__(self, noise_scale: object, plan: Plan, progress: Progress) -> Wanted:
            return Wanted(64, "it is better")

    controller = made(8, 4, policy=Decides())
    controller.update()

    assert controller.moves[0].reason == "it is better"
    assert controller.reason_to_stay is None


def test_a_policy_by_the_learning_rate_is_not_asked_before_a_loop_has_set_it() -> None:
    optimizer = sgd()
    controller = BatchSizeController(Plan(8, 4), optimizer, "seesaw")
    assert controller.begin() is None
    for rate in (0.01, 0.05, 0.1):  # a warm-up by hand
        optimizer.param_groups[0]["lr"] = rate
        controller.update()

    assert not controller.moves


def test_a_batch_that_cannot_be_smaller_says_what_helps() -> None:
    controller = made(8, 1, policy=lambda *_: Wanted(2, "it is too large"))
    controller.update()

    assert "8 x 1" in str(controller.reason_to_stay)
    assert str(controller.reason_to_stay).endswith("start with fewer or smaller micro-batches")


@pytest.mark.parametrize(("start", "rises"), [(8, True), (512, False)])
def test_under_sgd_find_raises_the_rate_with_the_batch_and_lowers_it_by_the_gain(
    start: int, rises: bool
) -> None:
    controller = made(start, 1, min_batch_size=1, max_device_batch_size=512)
    controller.clock.end_with(steps_of_epochs=128_000 / start)
    controller.begin()
    controller.step()
    controller.clock.advance(0.02 * 128_000 / start)
    controller.decide(KNOWN, average=GradientMoments(1.0, 40.0))

    k = controller.plan.batch_size / start
    assert (k > 1) == rises
    b = math.inf if rises else 40.0
    assert controller.lr_factor == pytest.approx(
        gain_of(b, batch_size=k * start, base_batch_size=start)
    )


def test_under_sgd_a_run_without_a_known_end_follows_the_gain() -> None:
    """There the batch grows to where a step is worth less than its examples."""
    factors = []
    for policy in ("auto", "tradeoff"):
        controller = made(8, 1, policy, max_device_batch_size=512)
        for step in range(1, 40):
            controller.step()
            if controller.due_after(step):
                controller.decide(KNOWN, average=GradientMoments(1.0, 40.0), measured_step=step)
        factors.append(controller.lr_factor)

    assert factors[0] == factors[1] < controller.plan.batch_size / 8
