# SPDX-License-Identifier: Apache-2.0
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.reading import read_trials

Read = Callable[..., list[Trial]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read a file of these lines."""

    def from_lines(*lines: str, metric: str = "loss", end: str = "\n", **options: Any) -> Any:
        file = tmp_path / "sweep.csv"
        file.write_text("\n".join(lines) + end)
        return read_trials(file, metric, **options)

    return from_lines


def values_of(trials: list[Trial]) -> list[list[float]]:
    return [trial.measurements.values.tolist() for trial in trials]


def test_lines_in_any_order_make_trials_of_all_that_is_said_about_them(read: Read) -> None:
    lines = [
        f"{algorithm},mnist,{study},{trial},{size},{lr},{0.9},{step},{step / 100},{step * 2},{loss}"
        for algorithm, study, trial, (size, lr) in itertools.product(
            ("adam", "sgd"), (0, 1), (0, 1), ((32, "0.1"), (64, "0.20"))
        )
        for step, loss in ((100, 0.5), (200, 0.25 if algorithm == "adam" else "nan"))
    ]
    random.Random(0).shuffle(lines)
    header = (
        "submission,workload,study,trial,batch_size,learning_rate,momentum,step,epochs,seconds,loss"
    )

    trials = read(header, *lines, submission="no")

    by_name = {trial.name: trial for trial in trials}
    assert len(trials) == len(by_name) == 2 * 2 * 2 * 2
    adam = by_name["adam/1/trial=0/batch_size=64/learning_rate=0.20"]
    assert (adam.submission, adam.workload, adam.study) == ("adam", "mnist", "1")
    assert (adam.batch_size, adam.learning_rate) == (64, 0.2)
    assert dict(adam.hyperparameters) == {"momentum": 0.9}
    assert adam.measurements.steps.tolist() == [100, 200]
    assert adam.measurements.values.tolist() == [0.5, 0.25]
    for clock, at in (("examples", [6400, 12800]), ("epochs", [1, 2]), ("seconds", [200, 400])):
        assert adam.measurements.clock(clock) == pytest.approx(at)
    assert [t.diverged for t in trials] == [t.submission == "sgd" for t in trials]


def test_a_last_number_that_was_cut_off_reaches_no_goal(read: Read) -> None:
    """0.1566 may have been written as far as "0.1"."""
    lines = ("trial,step,loss", "a,10,0.5", "a,20,0.2", "b,10,0.5")

    cut = read(*lines, "b,20,0.1", end="")
    whole = read(*lines, "b,20,0.1566")

    assert values_of(cut) == [[0.5, 0.2], [0.5], []]
    assert "cut off in line 5" in cut[-1].fault
    assert values_of(whole)[-1] == [0.5, 0.1566]


def test_an_empty_column_of_examples_leaves_them_to_the_batch_size(read: Read) -> None:
    (trial,) = read("batch_size,step,examples,seconds,loss", "32,10,,,0.5", "32,20,,,0.4")

    assert trial.measurements.examples == pytest.approx([320, 640])
    assert trial.measurements.seconds is None


def test_a_file_of_one_trial_needs_a_step_and_the_metric_alone(read: Read) -> None:
    (trial,) = read(
        *("step,accuracy,loss", "10,0.5,3", "20,,2", "30,0.75,1"),
        metric="accuracy",
        submission="adam",
    )

    assert (trial.name, trial.submission) == ("sweep", "adam")
    assert trial.measurements.steps.tolist() == [10, 30]
    assert trial.measurements.examples is None
    assert math.isnan(trial.batch_size)
    assert dict(trial.hyperparameters) == {}


def test_a_column_of_seeds_tells_trials_apart_and_is_a_hyperparameter(read: Read) -> None:
    """Else they would be repetitions of which no different seeds are known."""
    trials = read("seed,step,loss", "0,10,0.5", "1,10,0.4")

    assert [dict(trial.hyperparameters) for trial in trials] == [{"seed": 0}, {"seed": 1}]


@pytest.mark.parametrize("of_sgd", [(10, 20), (15, 25)], ids=["alike", "other steps"])
def test_one_seed_of_two_optimizers_is_two_trials(read: Read, of_sgd: tuple[int, ...]) -> None:
    lines = [
        f"{optimizer},0,{step},3"
        for optimizer, steps in (("sgd", of_sgd), ("lars", (10, 20)))
        for step in steps
    ]

    trials = read("optimizer,seed,step,loss", *lines, submission="given")

    assert [(t.name, t.submission) for t in trials] == [
        ("optimizer=sgd", "given"),
        ("optimizer=lars", "given"),
    ]
    assert [t.measurements.steps.tolist() for t in trials] == [[*of_sgd], [10, 20]]


def test_of_a_named_trial_the_last_evaluation_of_a_step_counts(read: Read) -> None:
    """A column that is constant for some time, as a learning rate's step, does not split it."""
    trials = read("trial,step,loss,rate", "a,1,3,1", "a,2,2,1", "a,2,1,1", "a,3,1,0", "a,4,1,0")

    assert values_of(trials) == [[3, 1, 1, 1]]


def test_a_trial_without_the_metric_did_not_reach(read: Read) -> None:
    with_metric, without = read(
        *("trial,step,loss,learning_rate", "a,1,3,0.1", "a,2,2,0.10", "b,1,,0.1")
    )

    assert len(with_metric.measurements) == 2
    assert len(without.measurements) == 0
    assert with_metric.learning_rate == without.learning_rate == 0.1


@pytest.mark.parametrize(
    ("lines", "argument", "said"),
    [
        (("epoch,loss", "1,2"), "sweep.csv", "a column `step`, got epoch, loss. Rename"),
        (("step,val_acc,note", "1,2,good"), "goal", "got 'loss'. Its metrics: val_acc."),
        (("step,loss", "1,2", "2,low"), "loss", "a number, got 'low' in line 3"),
        (("step,loss", "ten,2"), "step", "a number, got 'ten' in line 2"),
        (("step,loss,batch_size", "1,2,many"), "batch_size", "a number, got 'many' in line 2"),
        *(
            (("step,batch_size,loss", f"1,{size},3"), "batch_size", f"got {size} for")
            for size in ("-8", "0", "inf")
        ),
        (("step,loss", "1,2", "2,1", "1,3"), "sweep.csv", "got the step 1 in lines 2 and 4. Add"),
        (
            ("step,loss,learning_rate", "1,3,0.1", "2,2,0.09", "3,1,0.08"),
            *("learning_rate", "got 3 numbers from 0.08 to 0.1 at different steps"),
        ),
        (("step,loss", "1,"), "goal", "got 'loss'"),
        (("",), "sweep.csv", "an empty file"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_place(
    tmp_path: Path, read: Read, lines: tuple[str, ...], argument: str, said: str
) -> None:
    name = str(tmp_path / argument) if "." in argument else argument

    with refused(name) as error:
        read(*lines, end="\n" if lines[0] else "")

    assert said in str(error.value)
    assert "sweep.csv" in str(error.value)


def test_a_clock_that_runs_back_is_refused_with_the_trial(read: Read) -> None:
    with pytest.raises(ValueError, match=r"`seconds` must .* of sweep in .*sweep.csv\."):
        read("step,loss,seconds", "1,3,5", "2,2,4")


def test_a_trial_with_a_bad_cell_has_a_fault_and_leaves_the_others(read: Read) -> None:
    trials = read(
        "trial,step,batch_size,learning_rate,loss",
        *(
            "a,1,64,1,3",
            "b,1,-8,1,3",
            "c,1,64,1,low",
            "d,1,64,1,nan",
            "e,1,abc,1,3",
            "f,1,64,abc,3",
        ),
    )

    assert [(t.name, len(t.measurements)) for t in trials][:4] == [
        ("trial=a/batch_size=64/learning_rate=1", 1),
        ("trial=b/batch_size=-8/learning_rate=1", 0),
        ("trial=c/batch_size=64/learning_rate=1", 0),
        ("trial=d/batch_size=64/learning_rate=1", 1),
    ]
    assert [trial.fault.partition(" must")[0] for trial in trials] == [
        *("", "`batch_size`", "`loss`", "", "`batch_size`", "`learning_rate`")
    ]
    assert trials[3].diverged


@pytest.mark.parametrize(("gap", "column"), [("a,,0.1", "batch_size"), ("a,64,", "learning_rate")])
def test_a_cell_that_is_empty_in_one_line_makes_no_trial(read: Read, gap: str, column: str) -> None:
    """Its evaluation would count as a run of one evaluation, without a batch size."""
    whole, gone = read("trial,batch_size,learning_rate,step,loss", "a,64,0.1,1,3", f"{gap},2,1")

    assert gone.fault.startswith(f"`{column}` must be in every line")
    assert "in line 3 of" in gone.fault
    assert not whole.fault


@pytest.mark.parametrize("last", ["b,2", "b,2,64"])
def test_a_last_line_that_is_cut_off_is_left_out_and_named(read: Read, last: str) -> None:
    head = "trial,step,batch_size,loss"

    *whole, cut = read(head, "a,1,64,3", "b,1,64,4", last, end="")

    assert values_of(whole) == [[3], [4]]
    assert [t.fault for t in whole] == ["", ""]
    assert cut.name == "the last line of sweep.csv"
    assert "must have 4 cells" in cut.fault
    for first, end in (("a,1,64,3", "\n"), ("a,1", "")):
        with pytest.raises(ValueError, match="must have 4 cells"):
            read(head, first, "b,1,64,4", last, end=end)


def test_words_that_are_constant_in_each_trial_are_hyperparameters(read: Read) -> None:
    trials = read(
        "trial,step,schedule,clip,phase,loss",
        *("a,1,cosine,0.5,warm,3", "a,2,cosine,0.50,cold,2", "b,1,linear,off,warm,3"),
    )

    assert [dict(trial.hyperparameters) for trial in trials] == [
        {"schedule": "cosine", "clip": 0.5},
        {"schedule": "linear", "clip": "off"},
    ]


def test_the_index_that_pandas_writes_is_neither_an_epoch_nor_a_learning_rate(read: Read) -> None:
    trials = read(",step,batch_size,loss", "0,10,32,3", "1,20,32,2", "2,10,64,3", "3,20,64,1")

    assert [trial.name for trial in trials] == ["batch_size=32", "batch_size=64"]
    for trial in trials:
        assert trial.measurements.epochs is None
        assert math.isnan(trial.learning_rate)
        assert dict(trial.hyperparameters) == {}
