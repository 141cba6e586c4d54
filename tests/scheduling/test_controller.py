# SPDX-License-Identifier: Apache-2.0
"""The controller in a loop of one's own: windows, decisions, state, several ranks."""

import math
import re
from collections.abc import Callable
from io import BytesIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

from noisescale import BatchSizeController, GradientMoments, NoiseScale, NoiseScaleMeter, Plan
from noisescale.scheduling import BoundedSeesaw, Gate, Given, Policy, Progress, RatioRule

KNOWN = NoiseScale(500.0, 400.0, 600.0, grad_sq_norm=1.0, noise_trace=500.0, steps=50.0)


def sgd(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)


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
    controller = BatchSizeController(Plan(8, 1), sgd(), lambda b, plan, progress: 8000.0)

    move = controller.update()

    assert move is not None
    assert str(move) == (
        "step 1: batch size 8 -> 8000 = 8 x 1000 micro-batches x 1 device, lr x 31.6: the policy"
        " asks for it"
    )
    assert (move.before, move.after, move.wanted) == (Plan(8, 1), Plan(8, 1000), 8000.0)
    assert list(controller.moves) == [move]


@pytest.mark.parametrize(
    ("policy", "bounds", "reason"),
    [
        ("ratio", {"min_batch_size": 64}, "noise scale above 0 agrees with 8, `min_batch_size` is"),
        (lambda *_: 8000.0, {"max_batch_size": 64}, "the policy asks for it, `max_batch_size` is"),
    ],
)
def test_a_move_that_a_bound_makes_says_so(policy: Any, bounds: Any, reason: str) -> None:
    move = BatchSizeController(Plan(8, 1), sgd(), policy, **bounds).decide()

    assert move is not None
    assert move.after == Plan(8, 8)
    assert move.reason == f"{reason} 64"


def test_named_policies_are_asked_seldom_and_early() -> None:
    controller = BatchSizeController(Plan(8, 1), sgd(), decide_every_n_steps=10)
    asked = []
    for _ in range(80):
        controller.step()
        if controller.due:
            asked.append(controller.steps)
            controller.decide()

    assert asked[:6] == [4, 5, 6, 7, 8, 10]
    assert asked[-3:] == [51, 61, 71]


def test_a_decision_waits_for_another_measured_step() -> None:
    controller = BatchSizeController(Plan(8, 1), sgd(), decide_every_n_steps=10)
    asked = []
    for step in range(1, 81):
        controller.step()
        measured_step = (step - 1) // 30 * 30 + 1  # 1, 31, 61
        if controller.due_after(measured_step):
            asked.append(step)
            controller.decide(KNOWN, measured_step=measured_step)

    assert asked == [4, 31, 61]


def test_a_saved_controller_knows_what_it_has_decided_on() -> None:
    first, second = (BatchSizeController(Plan(8, 1), sgd()) for _ in range(2))
    for _ in range(20):
        first.step()
    first.decide(KNOWN, measured_step=20)
    for _ in range(20):
        first.step()
    saved = first.state_dict()
    second.load_state_dict(saved)

    assert [second.due_after(step) for step in (20, 21)] == [False, True]


@pytest.mark.parametrize("policy", ["tradeoff", "ratio", "norm_test", "doubling"])
def test_named_policies_grow_where_the_noise_scale_is_large_and_stay_where_it_is_unknown(
    policy: Any,
) -> None:
    unknown, known = (BatchSizeController(Plan(8, 1), sgd(), policy) for _ in range(2))
    for _ in range(5):
        unknown.step()
        known.step()

    assert unknown.decide() is None
    move = known.decide(KNOWN)
    assert move is not None
    assert move.after.batch_size == (16 if policy == "doubling" else 32)


def test_a_named_policy_shrinks_and_the_learning_rate_with_it() -> None:
    optimizer = sgd()
    controller = BatchSizeController(Plan(32, 512), optimizer, Gate(RatioRule()))

    move = controller.decide(KNOWN, GradientMoments(grad_sq_norm=1.0, noise_trace=600.0))

    assert move is not None
    assert move.after == Plan(32, 128)
    gain = (1 + 600 / (32 * 512)) / (1 + 600 / (32 * 128))
    assert move.lr_factor == controller.lr_factor == pytest.approx(gain)


@pytest.mark.parametrize("lr_scaling", ["sqrt", "adascale"])
def test_a_schedule_is_kept_to_the_step_whatever_the_learning_rate_goes_by(lr_scaling: Any) -> None:
    schedule = {0: 16, 2: 32, 100: 64, 101: 48}
    controller = BatchSizeController(Plan(16, 1), sgd(), schedule, lr_scaling=lr_scaling)
    sizes = []
    for _ in range(103):
        sizes.append(controller.plan.batch_size)
        controller.step()
        if controller.due:
            controller.decide()

    assert sizes == [16] * 2 + [32] * 98 + [64] + [48] * 2


@pytest.mark.parametrize(
    ("average", "b"),
    [
        (GradientMoments(1.0, 100.0), 100.0),
        (GradientMoments(-0.1, 100.0), 500.0),  # lost in the noise: what the steps so far tell
        (GradientMoments(0.01, 100.0), 500.0),  # huge by chance
        (GradientMoments(1.0, -1.0), 0.0),
        (None, 0.0),
    ],
)
def test_the_gain_goes_by_the_least_that_the_noise_scale_of_the_run_can_be(
    average: GradientMoments | None, b: float
) -> None:
    controller = BatchSizeController(Plan(32, 1), sgd(), Gate(RatioRule()), lr_scaling="adascale")
    for _ in range(8):
        controller.step()

    controller.decide(KNOWN, average)

    assert controller.plan.batch_size == 128
    assert controller.gain == controller.lr_factor == pytest.approx((1 + b / 32) / (1 + b / 128))


def test_every_step_counts_once_in_what_the_run_was_worth() -> None:
    controller, decided = BatchSizeController(Plan(500, 1), sgd(), Gate(RatioRule())), 0
    for _ in range(30):
        controller.step()
        if controller.due:
            controller.decide(KNOWN)
            decided = controller.steps

    assert controller.run.min_steps == pytest.approx(decided / (1 + 500 / 500))
    assert controller.run.critical_batch_size == pytest.approx(500)


def test_steps_before_a_plan_that_is_adopted_between_decisions_count_at_their_batch_size() -> None:
    controller = BatchSizeController(Plan(500, 1), sgd(), Gate(RatioRule()))

    for _ in range(3):
        controller.step()
    controller.adopt(Plan(250, 1), "micro-batches of another size")
    controller.step()
    controller.decide(KNOWN)

    assert controller.run.min_steps == pytest.approx(3 / (1 + 500 / 500) + 1 / (1 + 500 / 250))


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


def trained(
    steps: int, *, half: bool = False, policy: Callable[[], Any] = lambda: Gate(RatioRule())
) -> list[Any]:
    """Batch sizes, factors and parameters of a run; `half`: saved and loaded in its middle."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    def made() -> tuple[NoiseScaleMeter, BatchSizeController]:
        meter = NoiseScaleMeter(model, small_batch="example")
        meter.follow()
        return meter, BatchSizeController(
            Plan(4, 1), optimizer, policy(), lr_scaling="adascale", max_batch_size=256
        )

    meter, controller = made()
    generator, seen = torch.Generator().manual_seed(1), []
    for step in range(steps):
        if half and step == steps // 2:
            saved = meter.state_dict(), controller.state_dict()
            torch.save(saved, buffer := BytesIO())
            meter.close()
            controller.close()
            meter, controller = made()
            buffer.seek(0)
            of_meter, of_controller = torch.load(buffer, weights_only=True)
            meter.load_state_dict(of_meter)
            controller.load_state_dict(of_controller)
        optimizer.zero_grad()
        size = int(controller.plan.batch_size)
        x = torch.randn(size, 20, generator=generator)
        y = x[:, :1] + torch.randn(size, 1, generator=generator)
        meter.backward(((model(x) - y) ** 2).mean(), local_batch_size=size)
        meter.step()
        optimizer.step()
        schedule.step()
        controller.update(meter)
        seen.append((controller.plan, controller.lr_factor, controller.gain))
    return [seen, [p.detach().clone() for p in model.parameters()], controller.state_dict()]


def test_all_of_the_state_is_loaded() -> None:
    def made(plan: Plan) -> BatchSizeController:
        return BatchSizeController(plan, sgd(), Gate(RatioRule()), max_device_batch_size=64)

    controller, fresh = made(Plan(8, 4)), made(Plan(16, 4))
    average = GradientMoments(grad_sq_norm=1.0, noise_trace=600.0)
    controller.step()
    controller.decide(KNOWN, average, measured_step=1)
    controller.step()
    controller.decide(
        NoiseScale(math.nan, 40.0, math.inf, math.nan, math.nan, 9.0), average, measured_step=2
    )
    controller.clock.advance(1.5)
    controller.lower_max_device_batch_size(48)
    saved, before = controller.state_dict(), fresh.state_dict()
    fresh.load_state_dict(saved)

    assert {k for k in saved if before[k] == saved[k]} == {
        "same_schedule",
        "policy",
        "policy_kind",
    }
    assert fresh.state_dict() == saved


@pytest.mark.parametrize(
    ("within", "name", "message"),
    [
        (None, "gain", "The state of BatchSizeController must have `gain`, got only `plan`, "),
        ("clock", "time", "The state of BatchSizeController, `clock`, must have `time`, got only "),
        ("run", "last", "The state of BatchSizeController, `run`, must have `last`, got only "),
    ],
)
def test_a_state_that_lacks_something_is_refused_by_its_name(
    within: str | None, name: str, message: str
) -> None:
    controller = BatchSizeController(Plan(8, 4), sgd())
    state = controller.state_dict()
    del (state[within] if within else state)[name]

    with pytest.raises(
        ValueError, match=f"^{re.escape(message)}.* Resume from a complete checkpoint"
    ):
        controller.load_state_dict(state)


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
    first = BatchSizeController(Plan(8, 4), sgd(), Counts())
    first.update()
    counts = Counts()
    same, other = (BatchSizeController(Plan(8, 4), sgd(), p) for p in (counts, "seesaw"))

    same.load_state_dict(first.state_dict())
    with pytest.warns(
        UserWarning, match="^`policy` is InsteadOfDecay, and the saved run had Counts"
    ):
        other.load_state_dict(first.state_dict())

    assert counts.asked == 1
    assert other.settings.policy.state_dict() == {"start": 0.0}
    assert (other.steps, other.examples) == (1, 32.0)


class Ramp(Policy):
    """A policy of a user's own that says all that there is to say."""

    needs_noise_scale = True
    by_reduced_values = True

    def __init__(self, checksum: int | None = None) -> None:
        self.checksum = checksum
        self.seen: list[float] = []

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> float:
        self.seen.append(noise_scale.value)
        return 64.0


def test_a_policy_of_ones_own_is_asked_as_it_says() -> None:
    policy = Ramp()
    controller = BatchSizeController(Plan(8, 4), sgd(), policy)
    for _ in range(8):
        controller.step()
        if controller.due:
            controller.decide(KNOWN)

    assert controller.settings.policy is policy
    assert policy.seen == [500.0] * 5  # after 4, 5, 6, 7 and 8 steps
    assert controller.plan.batch_size == 64
    assert controller.state_dict()["policy"] == {}
    assert controller.state_dict()["policy_kind"] == "Ramp"


@pytest.mark.parametrize(("says", "needs", "takes"), [(True, 1, 1), (False, 0, 0), (None, 0, 1)])
def test_a_function_says_by_an_attribute_whether_it_needs_the_noise_scale(
    says: bool | None, needs: bool, takes: bool
) -> None:
    def policy(*_: Any) -> float:
        return 32.0

    if says is not None:
        policy.needs_noise_scale = says  # type: ignore[attr-defined]
    settings = BatchSizeController(Plan(8, 4), sgd(), policy, lr_scaling="sqrt").settings

    assert (settings.needs_noise_scale, settings.takes_noise_scale) == (needs, takes)


def test_half_and_half_is_a_whole_run() -> None:
    seen, parameters, state = trained(100)
    resumed_seen, resumed_parameters, resumed_state = trained(100, half=True)

    halves = seen[:50], seen[50:]
    assert [len({plan.batch_size for plan, _, _ in half}) for half in halves] == [2, 2]
    assert resumed_seen == seen
    assert all(torch.equal(a, b) for a, b in zip(resumed_parameters, parameters, strict=True))
    assert resumed_state == state


def test_resuming_a_schedule_takes_no_decision_that_was_not_due() -> None:
    """The learning rate, which follows the noise scale, would change with it."""

    def factors(half: int | None = None) -> list[float]:
        def made() -> BatchSizeController:
            return BatchSizeController(
                Plan(16, 1), sgd(), {0: 16, 10: 64}, lr_scaling="adascale", decide_every_n_steps=8
            )

        controller, seen = made(), []
        for step in range(60):
            if step == half:
                state = controller.state_dict()
                controller = made()
                controller.load_state_dict(state)
            controller.step()
            if controller.due:
                controller.decide(KNOWN, GradientMoments(1.0, 100.0 + step))
            seen.append(controller.lr_factor)
        return seen

    assert len(set(factors())) > 5
    assert factors(half=30) == factors()


@pytest.mark.parametrize(
    ("plan", "options", "made_anew"),
    [
        (Plan(8, 1, devices=4), {}, Plan(8, 6, devices=4)),
        (Plan(16, 1, devices=2), {}, Plan(16, 6, devices=2)),
        (Plan(8, 1, devices=3), {"max_device_batch_size": 32}, Plan(32, 2, devices=3)),
        (Plan(8, 1, devices=2), {}, Plan(8, 12, devices=2)),
    ],
)
def test_on_other_devices_the_global_batch_and_the_factor_stay(
    plan: Plan, options: dict[str, Any], made_anew: Plan
) -> None:
    first = BatchSizeController(Plan(8, 2, devices=2), sgd(), {0: 192}, lr_scaling="linear")
    first.update()
    assert first.plan == Plan(8, 12, devices=2)

    second = BatchSizeController(plan, sgd(), {0: 192}, lr_scaling="linear", **options)
    second.load_state_dict(first.state_dict())

    assert second.plan == made_anew
    assert second.plan.batch_size == 192
    assert second.lr_factor == first.lr_factor == 6.0
    assert (second.steps, second.examples, second.base_batch_size) == (1, 32.0, 32.0)


def test_ranks_that_disagree_are_told_on_all_of_them() -> None:
    def wanted() -> str:
        rank = dist.get_rank()
        controller = BatchSizeController(Plan(8, 1, devices=2), sgd(), lambda *_: 32.0 + 16 * rank)
        try:
            controller.update()
        except RuntimeError as error:
            return str(error)
        return "agreed"

    messages = on_ranks(2, wanted)

    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "`policy` must give the same batch size on all ranks, got 32 to 48. Compute it"
    )


def test_a_gated_policy_is_checked_before_a_move_and_at_the_next_decision_where_it_stays() -> None:
    def told(sizes: tuple[float, float]) -> list[str]:
        controller = BatchSizeController(
            Plan(8, 4, devices=2), sgd(), Gate(lambda *_: sizes[dist.get_rank()])
        )
        answers = []
        for _ in range(2):
            try:
                move = controller.decide(KNOWN)
                answers.append("stays" if move is None else "moves")
            except RuntimeError as error:
                return [*answers, str(error)[:66]]
        return answers

    differ = "`policy` must give the same batch size on all ranks, got 64 to 128"

    assert on_ranks(2, told, (64.0, 64.0)) == [["stays", "stays"]] * 2
    assert on_ranks(2, told, (128.0, 128.0)) == [["moves", "stays"]] * 2
    assert on_ranks(2, told, (64.0, 128.0)) == [["stays", differ], [differ]]


@pytest.mark.parametrize("failing", [[0], [0, 1]], ids=["one", "all"])
def test_a_policy_that_fails_leaves_no_rank_waiting(failing: list[int]) -> None:
    def told() -> str:
        def policy(*_: Any) -> float:
            if dist.get_rank() in failing:
                raise ZeroDivisionError("mine")
            return 32.0

        controller = BatchSizeController(Plan(8, 1, devices=2), sgd(), policy)
        try:
            controller.update()
        except (RuntimeError, ZeroDivisionError) as error:
            return f"{type(error).__name__} {error.__context__!r}"
        return "agreed"

    assert on_ranks(2, told) == (
        ["ZeroDivisionError None"] * 2
        if len(failing) == 2
        else ["RuntimeError ZeroDivisionError('mine')", "RuntimeError None"]
    )


def test_a_learning_rate_that_fails_leaves_no_rank_waiting() -> None:
    def told() -> str:
        def scaling(*_: float) -> float:
            return 1.0 if dist.get_rank() else 0.0

        plan = Plan(8, 1, devices=2)
        controller = BatchSizeController(plan, sgd(), lambda *_: 32.0, lr_scaling=scaling)
        try:
            controller.update()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__} {type(error.__context__).__name__}"
        return "agreed"

    assert on_ranks(2, told) == ["RuntimeError Refusal", "RuntimeError NoneType"]


def test_what_a_controller_tells_is_read_alone() -> None:
    controller = BatchSizeController(Plan(8, 4), sgd())

    for name in ("plan", "wanted", "steps", "examples", "gain", "max_device_batch_size"):
        with pytest.raises(AttributeError):
            setattr(controller, name, getattr(controller, name))


@pytest.mark.parametrize("resumed", [False, True])
def test_ranks_with_schedules_of_their_own_are_told_on_all_of_them_before_a_step_differs(
    resumed: bool,
) -> None:
    def agreed() -> str:
        def made(last: float) -> BatchSizeController:
            return BatchSizeController(Plan(8, 1, devices=2), sgd(), {0: 16, 1000: last})

        first, other = made(32), made(32 + 16 * dist.get_rank())
        try:
            if resumed:
                first.update()
                other.load_state_dict(first.state_dict())
            else:
                other.update()
        except RuntimeError as error:
            return str(error)
        return "agreed"

    assert set(on_ranks(2, agreed)) == {
        "`policy` must be the same schedule on all ranks, got different ones. Make it from values"
        " that are equal on all ranks."
    }


def test_ranks_agree_where_a_schedule_changes_and_at_every_step_on_a_function() -> None:
    def collectives(policy: Any) -> int:
        controller = BatchSizeController(Plan(8, 1, devices=2), sgd(), policy)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
            for _ in range(20):
                controller.update()
        assert controller.plan.batch_size == 32
        return reduce.call_count

    def counts() -> list[int]:
        sizes = {0: 16, 7: 32}
        policies: list[Any] = [sizes, Given(sizes, by="examples"), lambda *_: 32.0]
        return [collectives(policy) for policy in policies]

    assert on_ranks(2, counts) == [[1, 1, 20]] * 2


def test_ranks_decide_alike_on_what_they_measured_together() -> None:
    def run() -> list[Any]:
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

    first, second = on_ranks(2, run)

    assert first == second
    assert len(first) > 1


@pytest.mark.parametrize(
    ("policy", "kinds", "scaling"),
    [
        ("tradeoff", (torch.optim.SGD,), "adascale"),
        (RatioRule(), (torch.optim.SGD,), "sqrt"),  # a function: nothing need be measured
        (Gate(RatioRule()), (torch.optim.SGD, torch.optim.SGD), "adascale"),
        ("tradeoff", (torch.optim.AdamW,), "sqrt"),
        ("auto", (torch.optim.SGD,), "adascale"),
        ("bounded_seesaw", (torch.optim.SGD,), "adascale"),
        ("bounded_seesaw", (torch.optim.AdamW,), "sqrt"),
        ("norm_test", (torch.optim.SGD, torch.optim.Adam), "sqrt"),
        ("doubling", (torch.optim.SGD,), "sqrt"),
        ({0: 32}, (torch.optim.SGD,), "sqrt"),
        ("seesaw", (torch.optim.SGD,), "sqrt"),
        ("smith", (torch.optim.Adam,), "linear"),
    ],
)
def test_the_learning_rate_follows_as_optimizer_and_policy_ask_for(
    policy: Any, kinds: tuple[Any, ...], scaling: str
) -> None:
    optimizers = [kind([torch.nn.Parameter(torch.ones(1))], lr=0.1) for kind in kinds]

    assert BatchSizeController(Plan(8, 4), optimizers, policy).settings.lr_scaling == scaling


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"policy": "best"},
            ValueError,
            '`policy` must be one of "auto", "tradeoff", "ratio", "norm_test"',
        ),
        ({"policy": 7}, TypeError, "`policy` must be a name, a mapping or a function, got 7."),
        (
            {"policy": "smith", "lr_scaling": "sqrt"},
            ValueError,
            '`lr_scaling` must be "linear" with `policy="smith"`',
        ),
        ({"lr_scaling": "cubic"}, ValueError, '`lr_scaling` must be one of "auto", "none"'),
        ({"max_batch_size": 16}, ValueError, "`max_batch_size` must be at least the batch size"),
        ({"min_batch_size": 41, "max_batch_size": 47}, ValueError, "`min_batch_size` and `max"),
        ({"max_device_batch_size": 0}, ValueError, "`max_device_batch_size` must be a positive"),
        ({"decide_every_n_steps": 0}, ValueError, "`decide_every_n_steps` must be a positive"),
        ({"decide_every_n_steps": None}, ValueError, "`decide_every_n_steps` must be a positive"),
        ({"base_batch_size": 0}, ValueError, "`base_batch_size` must be positive and finite, got"),
        ({"examples_per_row": 0.0}, ValueError, "`examples_per_row` must be positive and finite"),
        ({"min_accumulation": 0}, ValueError, "`min_accumulation` must be a positive whole number"),
        ({"lr_scaling": "malladi"}, ValueError, '`lr_scaling="malladi"` must be used with an'),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        BatchSizeController(Plan(8, 4), sgd(), **options)


@pytest.mark.parametrize(
    "options", [{"policy": "ratio"}, {"policy": {0: 32}, "lr_scaling": "adascale"}]
)
def test_a_noise_scale_that_nobody_measures_is_asked_for(options: dict[str, Any]) -> None:
    controller = BatchSizeController(Plan(8, 4), sgd(), **options)
    message = (
        "`meter` must be given if the policy or the learning rate uses the noise scale, got None."
        " Pass the `NoiseScaleMeter` of the run."
    )

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        controller.update()


def test_steps_that_cannot_be_measured_are_refused() -> None:
    meter = NoiseScaleMeter(torch.nn.Linear(4, 1), small_batch="micro_batch")
    meter.follow()
    message = (
        "`min_accumulation` must be at least 2 if one process compares micro-batches, got 1. Pass"
        " `meter.least_micro_batches`: with fewer micro-batches nothing is measured, and the batch"
        " size never changes."
    )

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        BatchSizeController(Plan(8, 4), sgd()).update(meter)
    BatchSizeController(Plan(8, 4), sgd(), min_accumulation=2).update(meter)


def test_optimizers_that_train_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^`optimizers` must have parameters to train, got none"):
        BatchSizeController(Plan(8, 4), [])


def test_the_learning_rate_may_have_been_chosen_for_more_than_the_largest_batch() -> None:
    controller = BatchSizeController(
        Plan(8, 4), sgd(), lambda *_: 128.0, base_batch_size=256, max_batch_size=64
    )

    controller.update()

    assert (controller.plan.batch_size, controller.lr_factor) == (64, 0.5)


@pytest.mark.parametrize("wanted", [math.nan, 0, -8, math.inf, "64", None])
def test_a_policy_that_gives_no_batch_size_is_told(wanted: Any) -> None:
    controller = BatchSizeController(Plan(8, 4), sgd(), lambda *_: wanted)
    message = f"`policy` must give a positive number of examples, got {wanted!r} at step 1."

    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        controller.update()


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


def test_a_policy_by_schedule_and_noise_scale_moves_between_measurements() -> None:
    optimizer = sgd()
    controller = BatchSizeController(
        Plan(8, 4), optimizer, BoundedSeesaw(lift=0.25), lr_scaling="sqrt"
    )
    decided, batch_sizes = [], []

    for step in range(1, 41):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, 10 / step)
        controller.step()
        measured = 8 * (step // 8)
        if controller.due_after(measured):
            controller.decide(KNOWN, measured_step=measured)
            decided.append(step)
        batch_sizes.append(controller.plan.batch_size)

    assert batch_sizes[:7] == [32] * 7  # nothing is measured before
    assert batch_sizes[7] == 128  # the first measurement lifts it, to a quarter of 500
    assert batch_sizes[-1] == pytest.approx(128, rel=0.1)  # 32·4, by the decay
    between = [step for step in decided if step % 8]
    assert len(between) < 3
    assert controller.lr_factor == pytest.approx(math.sqrt(batch_sizes[-1] / 32))


def test_a_schedule_moves_a_bounded_batch_at_its_own_steps() -> None:
    optimizer = sgd()
    controller = BatchSizeController(
        Plan(8, 4), optimizer, BoundedSeesaw(lift=0.25), lr_scaling="sqrt"
    )
    controller.step()
    controller.decide(KNOWN, measured_step=1)  # lifted to 128
    seen = []

    for rate in (0.1, 0.02, 0.015, 0.0149, 0.01, 0.001):
        optimizer.param_groups[0]["lr"] = rate
        controller.step()
        seen.append(controller.due_after(1))
        if seen[-1]:
            controller.decide(KNOWN, measured_step=1)

    assert seen == [False, True, True, False, True, True]
    assert controller.plan.batch_size == pytest.approx(500, abs=8)


def test_the_batches_that_came_take_the_place_of_those_that_were_planned() -> None:
    controller = BatchSizeController(Plan(8, 4), sgd(), {0: 32, 2: 160}, max_batch_size=200)
    controller.step()

    controller.follow_batches(20.0, 43.0, max_batch_size=500)

    assert controller.plan == Plan(20.0, 4)
    assert (controller.base_batch_size, controller.examples) == (80, 75)
    controller.step()
    move = controller.decide()
    assert move is not None
    assert controller.plan == Plan(20.0, 8)
    assert controller.lr_factor == pytest.approx(math.sqrt(2))


def test_batches_that_meet_no_bound_are_trained_with_all_the_same() -> None:
    controller = BatchSizeController(Plan(8, 4), sgd(), {0: 32}, max_batch_size=40)

    controller.follow_batches(200.0)
    controller.step()

    controller.decide()
    assert controller.plan == Plan(200.0, 1)  # the nearest to 32 that there is


@pytest.mark.parametrize("lr_scaling", ["sqrt", "capped_sqrt"])
def test_a_schedule_by_examples_is_due_where_it_changes_alone(lr_scaling: Any) -> None:
    controller = BatchSizeController(
        Plan(8, 4), sgd(), {"0": 32, "0.1k": 64, "1k": 96}, lr_scaling=lr_scaling
    )
    due = []

    for _ in range(24):
        controller.step()
        if controller.due_after(0):
            controller.decide()
            due.append(controller.steps)

    assert due[0] == 4  # after 128 examples
    assert len(due) == 2
    assert controller.plan.batch_size == 96


def test_of_several_ranks_a_learning_rate_moves_nothing_without_a_new_measurement() -> None:
    """Each rank may have a learning rate of its own, and would meet nobody in a decision."""

    def due() -> list[bool]:
        optimizer = sgd()
        controller = BatchSizeController(
            Plan(8, 4, devices=2), optimizer, BoundedSeesaw(lift=0.25), lr_scaling="sqrt"
        )
        controller.step()
        controller.decide(KNOWN, measured_step=1)
        optimizer.param_groups[0]["lr"] = 0.01
        found = []
        for measured_step in (1, 1, 1, 1, 9):
            controller.step()
            found.append(controller.due_after(measured_step))
        return found

    assert on_ranks(2, due) == [[False] * 4 + [True]] * 2


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
