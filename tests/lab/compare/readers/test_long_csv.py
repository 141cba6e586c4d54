# SPDX-License-Identifier: Apache-2.0
import itertools
import math
import random
from pathlib import Path

import pytest

from noisescale.lab.compare.reading import read_trials


def write(folder: Path, text: str, name: str = "sweep.csv") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_lines_in_any_order_make_trials_of_all_that_is_said_about_them(tmp_path: Path) -> None:
    lines = [
        f"{algorithm},mnist,{study},{trial},{size},{lr},{0.9},{step},{step / 100},{step * 2},{loss}"
        for algorithm, study, trial, (size, lr) in itertools.product(
            ("adam", "sgd"), (0, 1), (0, 1), ((32, "0.1"), (64, "0.20"))
        )
        for step, loss in ((100, 0.5), (200, 0.25 if algorithm == "adam" else "nan"))
    ]
    random.Random(0).shuffle(lines)
    header = "submission,workload,study,trial,batch_size,lr,momentum,steps,epoch,seconds,val_loss"

    trials = read_trials(
        write(tmp_path, "\n".join([header, *lines, ""])), "val_loss", submission="no"
    )

    assert len(trials) == len({trial.name for trial in trials}) == 2 * 2 * 2 * 2
    by_name = {trial.name: trial for trial in trials}
    adam = by_name["adam/1/trial=0/batch_size=64/lr=0.20"]
    assert (adam.submission, adam.workload, adam.study) == ("adam", "mnist", "1")
    assert (adam.batch_size, adam.learning_rate) == (64, 0.2)
    assert dict(adam.hyperparameters) == {"momentum": 0.9}
    assert adam.measurements.steps.tolist() == [100, 200]
    assert adam.measurements.values.tolist() == [0.5, 0.25]
    assert adam.measurements.clock("examples").tolist() == [6400, 12800]  # type: ignore[union-attr]
    assert adam.measurements.clock("epochs").tolist() == [1, 2]  # type: ignore[union-attr]
    assert adam.measurements.clock("seconds").tolist() == [200, 400]  # type: ignore[union-attr]
    assert [t.diverged for t in trials] == [t.submission == "sgd" for t in trials]


def test_a_last_number_that_was_cut_off_reaches_no_goal(tmp_path: Path) -> None:
    """0.1566 may have been written as far as "0.1"."""
    whole = "trial,step,val_loss\na,10,0.5\na,20,0.2\nb,10,0.5\nb,20,0.1566\n"

    cut = read_trials(write(tmp_path, whole[:-4]), "val_loss")
    whole_one = read_trials(write(tmp_path, whole), "val_loss")

    assert [trial.measurements.values.tolist() for trial in cut] == [[0.5, 0.2], [0.5], []]
    assert "cut off in line 5" in cut[-1].fault
    assert whole_one[-1].measurements.values.tolist() == [0.5, 0.1566]


@pytest.mark.parametrize("column", ["batch_size", "lr"])
def test_a_word_for_a_number_leaves_its_run_out(tmp_path: Path, column: str) -> None:
    lines = ["batch_size,lr,step,val_loss", "32,0.1,10,0.5", "32,0.1,20,0.4", "64,0.2,10,0.5"]
    lines.append("abc,0.2,20,0.3" if column == "batch_size" else "64,abc,20,0.3")

    trials = read_trials(write(tmp_path, "\n".join([*lines, ""])), "val_loss")

    assert [len(trial.measurements) for trial in trials] == [2, 1, 0]
    assert [bool(trial.fault) for trial in trials] == [False, False, True]
    assert f"`{column}` must be a number, got 'abc'" in trials[-1].fault


def test_an_empty_column_of_examples_leaves_them_to_the_batch_size(tmp_path: Path) -> None:
    text = "batch_size,step,examples,seconds,val_loss\n32,10,,,0.5\n32,20,,,0.4\n"

    (trial,) = read_trials(write(tmp_path, text), "val_loss")

    assert trial.measurements.examples is not None
    assert trial.measurements.examples.tolist() == [320, 640]
    assert trial.measurements.seconds is None


def test_a_file_of_one_trial_needs_a_step_and_the_metric_alone(tmp_path: Path) -> None:
    (trial,) = read_trials(
        write(tmp_path, "global_step,accuracy,loss\n10,0.5,3\n20,,2\n30,0.75,1\n"),
        "accuracy",
        submission="adam",
    )

    assert (trial.name, trial.submission) == ("sweep", "adam")
    assert trial.measurements.steps.tolist() == [10, 30]
    assert trial.measurements.examples is None
    assert math.isnan(trial.batch_size)
    assert dict(trial.hyperparameters) == {}


def test_without_a_column_of_trials_hyperparameters_tell_them_apart(tmp_path: Path) -> None:
    """Another metric does not: its values differ too, but each occurs at one step."""
    lines = [
        f"{step},{momentum},{optimizer},{1 / step},{momentum / step + len(optimizer)}"
        for momentum in (0.9, 0.99)
        for optimizer in ("sgd", "lars")
        for step in (10, 20, 30)
    ]
    text = "\n".join(["step,momentum,optimizer,loss,train_loss", *lines, ""])

    trials = read_trials(write(tmp_path, text), "loss")

    assert [trial.name for trial in trials] == [
        f"optimizer={optimizer}/momentum={momentum}"
        for momentum in ("0.9", "0.99")
        for optimizer in ("sgd", "lars")
    ]
    assert [dict(trial.hyperparameters) for trial in trials] == [
        {"momentum": momentum} for momentum in (0.9, 0.9, 0.99, 0.99)
    ]
    assert [trial.submission for trial in trials] == ["sgd", "lars", "sgd", "lars"]
    assert {len(trial.measurements) for trial in trials} == {3}


def test_a_column_of_seeds_tells_trials_apart_and_is_a_hyperparameter(tmp_path: Path) -> None:
    """Else they would be repetitions of which no different seeds are known."""
    text = "seed,step,val_loss\n0,10,0.5\n1,10,0.4\n"

    trials = read_trials(write(tmp_path, text), "val_loss")

    assert [dict(trial.hyperparameters) for trial in trials] == [{"seed": 0}, {"seed": 1}]


def test_one_seed_of_two_optimizers_is_two_trials(tmp_path: Path) -> None:
    lines = [f"{optimizer},0,{step},3" for optimizer in ("sgd", "lars") for step in (10, 20)]
    text = "\n".join(["optimizer,seed,step,loss", *lines, ""])

    trials = read_trials(write(tmp_path, text), "loss", submission="given")

    assert [(t.name, t.submission) for t in trials] == [
        ("optimizer=sgd", "given"),
        ("optimizer=lars", "given"),
    ]
    assert [len(t.measurements) for t in trials] == [2, 2]


def test_of_a_named_trial_the_last_evaluation_of_a_step_counts(tmp_path: Path) -> None:
    """A column that is constant for some time, as a learning rate's step, does not split it."""
    text = "run,step,loss,rate\na,1,3,1\na,2,2,1\na,2,1,1\na,3,1,0\na,4,1,0\n"

    (trial,) = read_trials(write(tmp_path, text), "loss")

    assert trial.measurements.values.tolist() == [3, 1, 1, 1]


def test_a_trial_without_the_metric_did_not_reach(tmp_path: Path) -> None:
    with_metric, without = read_trials(
        write(tmp_path, "run,step,loss,lr\na,1,3,0.1\na,2,2,0.10\nb,1,,0.1\n"), "loss"
    )

    assert len(with_metric.measurements) == 2
    assert len(without.measurements) == 0
    assert with_metric.learning_rate == without.learning_rate == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "epoch,loss\n1,2\n",
            r"`.*sweep.csv` must have a column `step`, got epoch, loss. Rename the column",
        ),
        (
            "step,val_acc,note\n1,2,good\n",
            r"`goal` must name a metric of .*sweep.csv, got 'loss'. Its metrics: val_acc\.",
        ),
        (
            "step,loss\n1,2\n2,low\n",
            r"`loss` must be a number, got 'low' in line 3 of .*sweep.csv. Correct this cell",
        ),
        ("step,loss\nten,2\n", r"`step` must be a number, got 'ten' in line 2 of .*sweep.csv"),
        (
            "step,loss,batch_size\n1,2,many\n",
            r"`batch_size` must be a number, got 'many' in line 2 of .*sweep.csv",
        ),
        (
            "step,loss\n1,2\n2,1\n1,3\n",
            r"`.*sweep.csv` must have one line for each step of a trial, got the step 1 in lines 2"
            r" and 4. Add a column `trial`",
        ),
        (
            "step,loss,lr\n1,3,0.1\n2,2,0.09\n3,1,0.08\n",
            r"`lr` must be one number for each trial, got 3 numbers from 0.08 to 0.1 at different"
            r" steps .* in line 2 of .*sweep.csv and others. Write the peak learning rate",
        ),
        (
            "step,loss,seconds\n1,3,5\n2,2,4\n",
            r"`seconds` must not be negative and must rise .* those of sweep in .*sweep.csv\.",
        ),
        ("step,loss\n1,\n", r"`goal` must name a metric of .*sweep.csv, got 'loss'"),
        ("", r"`.*sweep.csv` must have a line of column names, got an empty file"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_place(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_trials(write(tmp_path, text), "loss")


def test_optimizers_that_were_evaluated_at_other_steps_are_two_trials(tmp_path: Path) -> None:
    lines = ("100,sgd,0.5", "200,sgd,0.3", "90,adam,0.4", "190,adam,0.1")
    file = write(tmp_path, "\n".join(["step,optimizer,loss", *lines, ""]))

    trials = {trial.name: trial for trial in read_trials(file, "loss")}

    assert [*trials] == ["optimizer=sgd", "optimizer=adam"]
    assert trials["optimizer=sgd"].measurements.steps.tolist() == [100, 200]
    assert trials["optimizer=adam"].submission == "adam"


@pytest.mark.parametrize("size", ["-8", "0", "inf"])
def test_a_batch_size_that_is_none_is_refused_by_name(tmp_path: Path, size: str) -> None:
    file = write(tmp_path, f"step,batch_size,loss\n1,{size},3\n")

    with pytest.raises(ValueError, match=rf"`batch_size` must be positive .* got {size} for .*csv"):
        read_trials(file, "loss")


def test_a_trial_with_a_bad_cell_has_a_fault_and_leaves_the_others(tmp_path: Path) -> None:
    text = "run,step,batch_size,loss\na,1,64,3\nb,1,-8,3\nc,1,64,low\nd,1,64,nan\n"

    trials = read_trials(write(tmp_path, text), "loss")

    assert [(t.name, len(t.measurements)) for t in trials] == [
        ("run=a/batch_size=64", 1),
        ("run=b/batch_size=-8", 0),
        ("run=c/batch_size=64", 0),
        ("run=d/batch_size=64", 1),
    ]
    assert [trial.fault.partition(", got")[0] for trial in trials] == [
        "",
        "`batch_size` must be positive and finite",
        "`loss` must be a number",
        "",
    ]
    assert trials[3].diverged


@pytest.mark.parametrize(("gap", "column"), [("a,,0.1", "batch_size"), ("a,64,", "lr")])
def test_a_cell_that_is_empty_in_one_line_of_a_trial_makes_no_trial(
    tmp_path: Path, gap: str, column: str
) -> None:
    """Its evaluation would count as a run of one evaluation, without a batch size."""
    lines = ["run,batch_size,lr,step,loss", "a,64,0.1,1,3", f"{gap},2,1", "b,,,1,3", "b,,,2,2"]

    whole, gone, without = read_trials(write(tmp_path, "\n".join([*lines, ""])), "loss")

    assert gone.fault.startswith(f"`{column}` must be in every line of a trial, or in none, got an")
    assert "in line 3 of" in gone.fault
    assert not whole.fault
    assert not without.fault
    assert without.measurements.values.tolist() == [3, 2]


def test_lines_of_a_logger_without_the_metric_take_no_part(tmp_path: Path) -> None:
    """As a monitor of learning rates writes them."""
    lines = ["run,lr,step,loss", "a,0.1,1,", "a,,1,3", "a,0.1,2,", "a,,2,2"]

    trials = read_trials(write(tmp_path, "\n".join([*lines, ""])), "loss")

    assert [trial.fault for trial in trials] == ["", ""]


@pytest.mark.parametrize("last", ["b,2", "b,2,64"])
def test_a_last_line_that_is_cut_off_is_left_out_and_named(tmp_path: Path, last: str) -> None:
    lines = f"run,step,batch_size,loss\na,1,64,3\nb,1,64,4\n{last}"

    *whole, cut = read_trials(write(tmp_path, lines), "loss")

    assert [t.measurements.values.tolist() for t in whole] == [[3], [4]]
    assert [t.fault for t in whole] == ["", ""]
    assert cut.name == "the last line of sweep.csv"
    assert "must have 4 cells in each line" in cut.fault
    for damaged in (f"{lines}\n", lines.replace("a,1,64,3", "a,1")):
        with pytest.raises(ValueError, match="must have 4 cells in each line"):
            read_trials(write(tmp_path, damaged), "loss")


def test_words_that_are_constant_in_each_trial_are_hyperparameters(tmp_path: Path) -> None:
    text = (
        "run,step,schedule,clip,phase,loss\n"
        "a,1,cosine,0.5,warm,3\na,2,cosine,0.50,cold,2\nb,1,linear,off,warm,3\n"
    )

    trials = read_trials(write(tmp_path, text), "loss")

    assert [dict(trial.hyperparameters) for trial in trials] == [
        {"schedule": "cosine", "clip": 0.5},
        {"schedule": "linear", "clip": "off"},
    ]


def test_the_index_that_pandas_writes_is_neither_an_epoch_nor_a_learning_rate(
    tmp_path: Path,
) -> None:
    text = ",step,batch_size,loss\n0,10,32,3\n1,20,32,2\n2,10,64,3\n3,20,64,1\n"

    trials = read_trials(write(tmp_path, text), "loss")

    assert [trial.name for trial in trials] == ["batch_size=32", "batch_size=64"]
    assert [trial.measurements.epochs for trial in trials] == [None, None]
    assert all(math.isnan(trial.learning_rate) for trial in trials)
    assert [dict(trial.hyperparameters) for trial in trials] == [{}, {}]
