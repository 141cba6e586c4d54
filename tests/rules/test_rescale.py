# SPDX-License-Identifier: Apache-2.0
"""What rules set at another batch size, against their formulas, and which one is recommended."""

import math
from typing import Any

import program
import pytest
from refused import refused

from noisescale import Rescale, rescale
from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.tradeoff.learning_rate_rules import RULES, Change, Settings

ADAM = Settings(
    learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, momentum=None
)


def by(name: str, settings: Settings, change: Change) -> Settings:
    (rule,) = [rule for rule in RULES if rule.name == name]
    return rule.apply(settings, change)


def asked(new: float, **options: Any) -> Rescale:
    defaults = {"from_batch_size": 64, "noise_scale": 30.0, "learning_rate": 0.1}
    return rescale(None, new, **{**defaults, **options})


def test_formulas() -> None:
    change = Change(64, 256)

    assert by("linear", ADAM, change).learning_rate == pytest.approx(4e-3)
    assert by("square root", ADAM, change).learning_rate == pytest.approx(2e-3)
    sde = by("SDE of Adam", ADAM, change)
    assert sde.learning_rate == pytest.approx(2e-3)
    assert sde.beta1 == pytest.approx(0.6)
    assert sde.beta2 == pytest.approx(0.96)
    assert sde.eps == pytest.approx(0.5e-8)
    assert by("half-life in tokens", ADAM, change).beta2 == pytest.approx(0.99**4)
    lines = by("Power Lines", ADAM, change)
    assert (lines.learning_rate, lines.weight_decay) == (1e-3, pytest.approx(0.4))
    assert by("no change", ADAM, change) == ADAM
    muon = Settings(learning_rate=0.02, momentum=0.95)
    assert by("SDE of Muon", muon, change).momentum == pytest.approx(0.95**4)


def test_the_gain_is_the_linear_rule_far_below_the_noise_scale_and_none_above() -> None:
    assert Change(1, 4, 1e9).gain == pytest.approx(4)
    assert Change(1e6, 4e6, 1.0).gain == pytest.approx(1, abs=1e-5)
    # A step at B' is as many steps at B as the law of McCandlish et al. says.
    assert Change(32, 128, 64).gain == pytest.approx((1 + 64 / 32) / (1 + 64 / 128))


def test_back_again_all_rules_give_the_old_settings() -> None:
    there, back = Change(64, 256, 100.0), Change(256, 64, 100.0)
    for rule in RULES:
        settings = Settings(0.1, 0.9, None, 0.9999, 1e-8, 0.1)
        again = rule.apply(rule.apply(settings, there), back)
        for name, value in vars(settings).items():
            assert vars(again)[name] == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("optimizer", "noise_scale", "recommended"),
    [
        ("sgd", 1000.0, "gain"),
        ("momentum", 1000.0, "linear"),
        ("momentum", 10.0, "gain"),
        ("adam", 1000.0, "square root"),
        ("adam", 10.0, "square root of the gain"),
        ("muon", 1000.0, "power 2/3"),
    ],
)
def test_what_is_recommended_goes_by_the_place(
    optimizer: Any, noise_scale: float, recommended: str
) -> None:
    found = asked(256, optimizer=optimizer, noise_scale=noise_scale)

    assert (found.recommended, found.advice.swept) == (recommended, True)
    assert found.advice.why in " ".join(found.to_text().split())


@pytest.mark.parametrize(("new", "ends"), [(256, (0.1, 0.4)), (16, (0.025, 0.1))])
@pytest.mark.parametrize(
    ("optimizer", "noise_scale"), [("muon", 10.0), (None, 1000.0), ("adam", None), (None, None)]
)
def test_where_no_rule_was_swept_the_answer_is_a_safe_range(
    optimizer: Any, noise_scale: float | None, new: float, ends: tuple[float, float]
) -> None:
    """From the old rate to k times it, with the square root first."""
    found = asked(new, optimizer=optimizer, noise_scale=noise_scale)

    low, high = ends
    document = found.document()
    rate = document.answers[0].bounds
    assert rate is not None
    assert (rate.value, rate.low, rate.high) == pytest.approx((math.sqrt(low * high), low, high))
    assert not found.advice.swept
    assert f"{low:.3g}00"[:5] in document.headline
    assert ("halve it" in found.to_text()) == (new > 64)
    for one in found.answers:  # all rules lie in it
        if one.learning_rate.known:
            assert low * 0.999 <= one.learning_rate.value <= high * 1.001


def test_an_answer_says_how_far_off_its_rules_were() -> None:
    adam, sgd = (" ".join(asked(256, optimizer=kind).to_text().split()) for kind in ("adam", "sgd"))

    assert "square root of the gain was 1.44 x off and the square root was 1.33 x off" in adam
    assert "the gain was 1.70 x off, and 2 of 6 trainings at its rate diverged" in sgd


def test_a_run_with_a_monitor_is_only_asked_for_where_none_was_given(recorded: Any) -> None:
    recorded.optimizer = None

    assert "A run with a monitor" in rescale(None, 64, from_batch_size=16).to_text()
    assert "A run with a monitor" not in rescale(recorded, 64).to_text()


@pytest.mark.parametrize(
    ("beta1", "beta2", "unusable"),
    [
        (0.9, 0.95, {"SDE of Adam": False, "half-life in tokens": False}),  # 0.8, 0.81
        (0.9, 0.99, {"SDE of Adam": True, "half-life in tokens": True}),  # 0.96, 0.96
        (0.7, 0.99, {"SDE of Adam": False, "half-life in tokens": True}),  # beta1 becomes 0
        (0.0, 0.8, {"SDE of Adam": False, "half-life in tokens": False}),
    ],
)
def test_betas_that_a_rule_makes_too_short_are_marked(
    beta1: float, beta2: float, unusable: dict[str, bool]
) -> None:
    found = asked(256, optimizer="adam", betas=(beta1, beta2))

    usable = {one.rule.name: one.usable for one in found.answers}
    assert {name: usable[name] for name in unusable} == unusable
    assert usable[found.recommended]
    bad = not all(usable.values())
    said = {one.label: one.sentence for one in found.document().answers}
    assert ("Betas" in said) == bad
    if bad:
        assert f"not below {min(beta2, 0.95):g}" in said["Betas"]


def test_what_lasts_for_steps_lasts_for_as_many_examples() -> None:
    found = asked(256, optimizer="adam", steps=1000, warm_up_steps=100, ema_decay=0.999)

    assert found.steps == (1000, 250)
    assert found.warm_up_steps == (100, 25)
    assert found.ema_decay == (0.999, pytest.approx(0.999**4))


def test_bounds_of_the_noise_scale_are_those_of_the_rate(recorded: dict[str, Any]) -> None:
    found = rescale(recorded, 256)

    assert found.old == 16
    assert found.kind == "sgd"
    (gain,) = [one for one in found.answers if one.rule.name == "gain"]
    rate, scale = gain.learning_rate, found.noise_scale
    for end in ("value", "low", "high"):
        change = Change(16, 256, getattr(scale, end))
        assert getattr(rate, end) == pytest.approx(0.1 * change.gain)
    assert found.recommended == "gain"
    assert "of the whole run" in found.to_text()
    assert "as given" in asked(256).to_text()


@pytest.mark.parametrize(
    ("mix", "kind"),
    [
        (OptimizerMix(OptimizerKind.SPECTRAL, OptimizerKind.ADAM, 0.6), "muon"),
        (OptimizerMix(OptimizerKind.ADAM, OptimizerKind.SPECTRAL, 0.6), "adam"),
        (OptimizerMix(OptimizerKind.SIGN), None),
        (None, None),
    ],
)
def test_the_rules_are_those_of_the_main_kind(
    recorded: Any, mix: OptimizerMix | None, kind: str | None
) -> None:
    recorded.optimizer = mix

    assert rescale(recorded, 256).kind == kind


@pytest.fixture
def recorded() -> Any:
    """A run by SGD at a batch of 16 and a learning rate of 0.1, whose noise scale is known."""
    from noisescale import History
    from noisescale.estimation.moments import GradientMoments
    from noisescale.history.increments import Increments

    history, increments = History(optimizer=OptimizerMix(OptimizerKind.SGD)), Increments()
    for step in range(1, 401):
        noise = 30.0 + 5 * math.sin(step)
        increments.add(GradientMoments(1.0 + 0.2 * math.cos(2 * step), noise), 16)
        if step % 20 == 0:
            short = 6.0 if step == 400 else 0.0  # the last batch of the epoch
            row = {"batch_size": 16.0 - short, "noise_scale": 30.0, "low": 25.0, "high": 36.0}
            row |= {"step": step, "examples": 16.0 * step - short, "learning_rate": 0.1}
            history.append(**row, **increments.take())
    return history


def test_a_noise_scale_that_is_not_resolved_still_has_a_lower_bound(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    above_100 = Bounded(math.nan, 100.0, math.inf)
    monkeypatch.setattr(
        "noisescale.prediction.prediction.Prediction.critical_batch_size_by_noise_scale", above_100
    )

    assert rescale(recorded, 64).recommended == "gain"
    assert not rescale(recorded, 256).advice.swept


@pytest.mark.parametrize(
    ("options", "name", "got", "remedied"),
    [
        ({"new": 0}, "batch_size", "0", {"new": 256}),
        ({"new": math.nan}, "batch_size", "nan", {"new": 256}),
        ({"new": "many"}, "batch_size", "'many'", {"new": 256}),
        ({"new": 64}, "batch_size", "64", {"new": 256}),
        ({"new": 1e6}, "batch_size", "1.56e+04 times 64", {"new": 8192}),
        ({"new": 1e300}, "batch_size", "1.56e+298 times 64", {"new": 8192}),
        ({"optimizer": "lion"}, "optimizer", "'lion'", {"optimizer": None}),
        ({"noise_scale": -1}, "noise_scale", "-1", {"noise_scale": 30}),
        ({"noise_scale": math.inf}, "noise_scale", "inf", {"noise_scale": 30}),
        ({"from_batch_size": None}, "from_batch_size", "none", {"from_batch_size": 64}),
        ({"from_batch_size": math.nan}, "from_batch_size", "nan", {"from_batch_size": 64}),
        ({"from_batch_size": -8}, "from_batch_size", "-8", {"from_batch_size": 64}),
        ({"learning_rate": 0.0}, "learning_rate", "0.0", {"learning_rate": None}),
        ({"learning_rate": math.nan}, "learning_rate", "nan", {"learning_rate": None}),
        ({"learning_rate": 1e9}, "learning_rate", "1000000000.0", {"learning_rate": None}),
        ({"momentum": 1.0}, "momentum", "1.0", {"momentum": 0.9}),
        ({"betas": (0.9, 1.5)}, "beta2", "1.5", {"betas": (0.9, 0.95)}),
        ({"betas": (-0.1, 0.9)}, "beta1", "-0.1", {"betas": (0.9, 0.95)}),
        ({"betas": (0.9,)}, "betas", "(0.9,)", {"betas": (0.9, 0.95)}),
        ({"eps": 0.0}, "eps", "0.0", {"eps": None}),
        ({"weight_decay": -0.1}, "weight_decay", "-0.1", {"weight_decay": None}),
        ({"ema_decay": 1.0}, "ema_decay", "1.0", {"ema_decay": 0.999}),
        ({"steps": 0}, "steps", "0", {"steps": None}),
        ({"steps": math.inf}, "steps", "inf", {"steps": None}),
        ({"warm_up_steps": -1}, "warm_up_steps", "-1", {"warm_up_steps": None}),
        (
            {"warm_up_steps": 9, "steps": 3},
            "warm_up_steps",
            "9 > 3",
            {"warm_up_steps": 3, "steps": 9},
        ),
        ({"optimizer": "sgd", "betas": (0.9, 0.95)}, "betas", "(0.9, 0.95)", {"betas": None}),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum", "0.9", {"momentum": None}),
        ({"optimizer": "sgd", "momentum": 0.9}, "momentum", "0.9", {"optimizer": "momentum"}),
    ],
)
def test_bad_input_is_refused_and_the_remedy_works(
    options: dict[str, Any], name: str, got: str, remedied: dict[str, Any]
) -> None:
    with refused(name, got=got) as raised:
        asked(**{"new": 256, **options})

    assert raised.value.remedy.endswith(".")
    asked(**{"new": 256, **options, **remedied})


def test_settings_that_the_optimizer_of_a_run_does_not_have_are_refused(recorded: Any) -> None:
    with refused("betas", got="(0.9, 0.95)"):
        rescale(recorded, 64, betas=(0.9, 0.95))


def test_adam_may_be_called_as_its_class_is() -> None:
    assert asked(256, optimizer="AdamW").kind == "adam"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--noise-scale", "-1"), ("--beta1", "0.9"), ("--learning-rate", "nan"), ("--steps", "0")],
)
def test_the_command_names_its_flags(flag: str, value: str) -> None:
    words = ["--batch-size", "256", "--from-batch-size", "64", flag, value]

    assert program.refused("rescale", *words).startswith(f"`{flag}`")


def test_the_command_names_the_flags_of_betas_that_an_optimizer_does_not_have() -> None:
    words = ["--from-batch-size", "64", "--beta1", "0.9", "--beta2", "0.999"]

    of_sgd = program.refused("rescale", "--batch-size", "256", "--optimizer", "sgd", *words)

    assert of_sgd.startswith("`--beta1 --beta2` must not be given for sgd")


def test_the_command_needs_two_batch_sizes() -> None:
    assert "'--batch-size'" in program.refused("rescale", "--from-batch-size", "64")
    alone = program.refused("rescale", "--batch-size", "256")
    assert alone.startswith("`--from-batch-size` must be given without a run")
    assert "1.00 to 4.00 x" in program.run(
        *("rescale", "--batch-size", "256", "--from-batch-size", "64", "--optimizer", "adamw")
    )
