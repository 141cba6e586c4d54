# SPDX-License-Identifier: Apache-2.0
"""A growing batch size in the words of launchers, from runs whose noise scale is known."""

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logged_runs import log_run, record
from program import refused as refusal_of
from program import run as run_program
from refused import refused
from reported_runs import history

from noisescale import History, predict
from noisescale.history.history import as_history
from noisescale.history.reading import read_run
from noisescale.prediction.launchers import LAUNCHERS, Stage, lines_for
from noisescale.prediction.prediction import Prediction

EXAMPLES = 128_000
STAGES = [Stage(0, 64), Stage(4000, 128), Stage(16_000, 256)]


def rising(rows: int = 400, power: float = 1.0, **changed: Any) -> History:
    """A run of 2,000 steps of 64 whose noise scale rises as a power of the share that is over."""
    shares = (np.arange(rows) + 0.5) / rows
    noise_scale = 400 * shares**power
    known = {"noise_scale": noise_scale, "low": 0.9 * noise_scale, "high": 1.1 * noise_scale}
    return as_history(history(rows=rows, every=2000 // rows, **{**known, **changed}))


def of(launcher: str, run: Any = None, **options: Any) -> Prediction:
    return predict(rising() if run is None else run, calibration=1.0, ramp=launcher, **options)


def sizes_of(p: Prediction) -> list[int]:
    assert p.ramp is not None
    return [stage.batch_size for stage in p.ramp.stages]


def lines_of(p: Prediction) -> str:
    return "\n".join(p.document().to_copy[0].lines)


def notes_of(p: Prediction) -> str:
    return " ".join(p.document().to_copy[0].notes)


def test_it_grows_with_the_root_of_the_noise_scale_around_the_recommended_batch_size() -> None:
    p = of("lightning")

    assert p.ramp is not None
    sizes = sizes_of(p)
    assert all(one < other for one, other in pairwise(sizes))
    assert sizes[-1] / sizes[0] == pytest.approx((0.75 / (1 / 64)) ** 0.5, rel=0.5)
    assert min(sizes) < p.recommended_batch_size <= max(sizes)
    assert p.ramp.examples == EXAMPLES


@pytest.mark.parametrize("end", [400.0, 1600.0])
def test_the_command_for_a_learning_rate_runs_even_if_the_first_batch_size_is_the_runs(
    end: float,
) -> None:
    noise_scale = 20 + end * (np.arange(400) + 0.5) / 400
    p = of(
        "lightning", rising(noise_scale=noise_scale, low=0.9 * noise_scale, high=1.1 * noise_scale)
    )

    assert (sizes_of(p)[0] == 64) == (end == 1600)
    assert run_program(*shlex.split(notes_of(p).partition(": noisescale ")[2].split(" Both")[0]))


def test_its_steps_and_examples_are_those_of_a_walk_over_every_example() -> None:
    """The walk sums 1/(B + c) of single examples, from the noise scale of the run itself."""
    p = of("lightning")
    assert p.ramp is not None
    shares = (np.arange(EXAMPLES) + 0.5) / EXAMPLES
    critical = 400 * shares
    starts = [stage.start for stage in p.ramp.stages]
    sizes = np.array(sizes_of(p))[np.searchsorted(starts, np.arange(EXAMPLES), side="right") - 1]

    made, wanted = (float((1 / (b + critical)).sum()) for b in (sizes, p.ramp.batch_size))

    steps = float((1 / sizes).sum()) / (EXAMPLES / p.ramp.batch_size)
    assert p.ramp.examples_ratio == pytest.approx(wanted / made, rel=0.08)
    assert p.ramp.steps_ratio == pytest.approx(steps * wanted / made, rel=0.08)
    assert p.ramp.steps_ratio < 0.9


def test_a_noise_scale_that_stays_or_falls_asks_for_one_batch_size() -> None:
    for power in (0.0, -0.3):
        p = of("megatron", rising(power=power), sequence_length=10)

        assert sizes_of(p) == [p.recommended_batch_size]
        assert "does not rise enough" in notes_of(p)
        assert "rampup" not in notes_of(p)


def test_a_ramp_that_saves_no_steps_once_it_is_rounded_is_not_written() -> None:
    """Noise that rises early: half the batch there takes more steps than the rest can save."""
    for factor in (2.5, 3.0, 4.0, 8.0):
        noise_scale = np.where(np.arange(40) < 5, 100.0, 100.0 * factor)
        ends = {"low": 0.9 * noise_scale, "high": 1.1 * noise_scale}
        p = of("lightning", history(noise_scale=1.0, **ends) | {"noise_scale": noise_scale})

        assert p.ramp is not None
        assert (p.ramp.steps_ratio < 1) == (len(sizes_of(p)) > 1)


def test_batch_sizes_are_whole_on_all_devices() -> None:
    p = of("lightning", rising(devices=48))

    assert all(size % 48 == 0 for size in sizes_of(p))


def test_a_run_without_a_known_end_is_refused_until_it_has_one() -> None:
    half = rising().until(1000)
    half.under_way = True
    with refused("ramp", got="one that is under way at step 1,000", remedy="meter.last_step"):
        of("lightning", half)

    half.planned_steps = 2000.0
    p = of("lightning", half)

    assert p.ramp is not None
    assert p.ramp.examples == EXAMPLES
    assert "known up to 50 % of the run" in notes_of(p)
    half.under_way, half.planned_steps = False, float("nan")
    assert of("lightning", half).ramp.examples == EXAMPLES / 2  # type: ignore[union-attr]


def test_a_run_whose_noise_is_not_resolved_and_an_unknown_launcher_are_refused() -> None:
    with refused("ramp", got="one that is not", remedy="every_n_steps=1"):
        of("lightning", history(unresolved=40))
    with refused("ramp", got="'slurm'"):
        of("slurm")
    for length in (0, -3, 2.5):
        with refused("sequence_length", got=f"{length!r}"):
            of("megatron", sequence_length=length)
    with refused("sequence_length", got="128 alone"):
        predict(rising(), sequence_length=128)


@pytest.mark.parametrize(("unit", "length"), [("sequences", 2048), ("tokens", 32)])
def test_megatron_reads_thresholds_in_tokens_and_batch_sizes_in_sequences(
    unit: str, length: int
) -> None:
    """Read as Megatron reads it: thresholds over the length, batch sizes as they are."""
    scale = length if unit == "tokens" else 1
    stages = [Stage(start * scale, size * scale) for start, size in STAGES]

    (line,), notes = lines_for("megatron", stages, EXAMPLES * scale, unit, length)

    schedule, samples, read_length = re.fullmatch(  # type: ignore[union-attr]
        r'--step-batch-size-schedule "(.*)" --train-samples (\d+) --seq-length (\d+)', line
    ).groups()
    pairs = [map(int, entry.split(":")) for entry in schedule.split()]
    assert [(since // length, size) for since, size in pairs] == STAGES
    assert (int(samples), int(read_length)) == (EXAMPLES, length)
    assert any("refuses both" in note for note in notes)


def test_the_old_ramp_of_megatron_is_the_same_with_two_batch_sizes() -> None:
    """Walked by its rule: equal parts of the samples, each with one increment more."""
    _, notes = lines_for("megatron", STAGES[:2], EXAMPLES, "sequences", 8)

    (numbers,) = re.findall(
        r"-size (\d+) --rampup-batch-size (\d+) (\d+) (\d+) \(the same", notes[1]
    )
    top, first, increment, samples = map(int, numbers)
    each = samples / ((top - first) // increment)
    for seen in (0, 3999, 4001, 9000):
        size = top if seen > samples else first + int(seen / each) * increment
        assert size == max(stage for stage in STAGES[:2] if stage.start <= seen).batch_size
    assert "equal parts" in lines_for("megatron", STAGES, EXAMPLES, "sequences", 8)[1][1]


def test_torchtitan_has_a_training_for_each_batch_size_and_all_take_the_tokens_of_the_run() -> None:
    lines, notes = lines_for("torchtitan", STAGES, EXAMPLES, "sequences", 100)

    tokens = [int(line.split()[-1]) for line in lines if "num_tokens_per_train_step" in line]
    ends = [int(line.split()[-1]) for line in lines if "training.steps" in line]
    assert tokens == [6400, 12_800, 25_600]
    taken = np.diff([0, *ends]) @ tokens
    assert abs(taken - EXAMPLES * 100) <= sum(tokens)
    assert f"total_steps = {ends[-1]}" in lines[0]
    assert "config.checkpoint.last_save_model_only = False" in lines
    assert "has no ramp" in notes[0]
    assert "64, 128, 256" in notes[-1]


def test_nanochat_gets_its_own_ramp_and_what_that_cannot_be() -> None:
    (line,), notes = lines_for("nanochat", STAGES, EXAMPLES, "tokens", None)

    assert line == "--total-batch-size=256 --batch-ramp=1"
    assert "64 from 0 % on, 128 from 3.12 % on, 256 from 12.5 % on" in " ".join(notes)
    assert lines_for("nanochat", STAGES[:1], 8, "tokens", None)[0] == ["--total-batch-size=64"]


def test_lightning_reads_what_is_printed_by_its_own_parser() -> None:
    pytest.importorskip("lightning")
    from noisescale import BatchSizeScheduler, Plan
    from noisescale.scheduling.policies import Progress, given_in_words

    p = of("lightning")

    assert eval(lines_of(p), {"BatchSizeScheduler": BatchSizeScheduler})
    (words,) = re.findall(r'"(.*)"', lines_of(p))
    policy = given_in_words(words)
    for start, size in p.ramp.stages:  # type: ignore[union-attr]
        assert float(policy(None, Plan(64, 1), Progress(1, start))) == size
    assert "between epochs alone" in notes_of(p)


def test_a_unit_is_never_guessed() -> None:
    for launcher in LAUNCHERS.keys() - {"lightning"}:
        with refused("sequence_length", got="none, for a run that counts examples"):
            of(launcher)
    with refused("sequence_length", got="none, for a run that counts tokens"):
        of("megatron", unit="tokens")
    assert "num_tokens_per_train_step" in lines_of(of("torchtitan", unit="tokens"))
    assert "--total-batch-size" in lines_of(of("nanochat", unit="tokens"))
    assert "Both numbers count examples" in notes_of(of("lightning"))


def test_a_run_of_tokens_has_batch_sizes_of_whole_sequences() -> None:
    p = of("megatron", unit="tokens", sequence_length=16)

    assert all(size % 32 == 0 for size in sizes_of(p))  # two devices


def test_it_stands_in_text_json_and_page_and_the_words_are_those_of_the_command(
    tmp_path: Path,
) -> None:
    pytest.importorskip("plotly")
    columns = {name: column for name, column in rising(80).items() if name != "window"}
    record(tmp_path / "run", **columns)
    p = predict(read_run(tmp_path / "run"), ramp="megatron", sequence_length=128)
    words = ("--ramp", "megatron", "--sequence-length", 128)

    said = json.loads(run_program("predict", tmp_path / "run", *words, "--json"))

    assert said["ramp"] == p.to_dict()["ramp"]
    (line,) = said["ramp"]["lines"]
    assert f"Ramp for Megatron-LM\n{line}\n" in p.to_text(60)
    page = p.to_html(tmp_path / "page.html").read_text()
    assert f"<pre>{line}</pre>" in page
    assert line.replace('"', "&quot;") in p._repr_html_()
    assert predict(read_run(tmp_path / "run")).to_dict()["ramp"] is None


def test_of_several_optimizers_it_is_that_of_the_least_batch_size(tmp_path: Path) -> None:
    log_run(tmp_path, noise_scale=300.0)
    log_run(tmp_path, optimizer=1, noise_scale=50.0)

    p = predict(tmp_path, ramp="lightning", devices=1, same_batch=True)

    assert (p.number, len(p.same_batch)) == (1, 1)
    assert "**Critical batch size** of optimizer 1, which allows least: 50" in p.model_card
    assert sizes_of(p) == [p.recommended_batch_size]
    assert replace(p, ramp=None).to_dict()["decision"] == p.to_dict()["decision"]


def test_several_runs_in_a_folder_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log_run(tmp_path / name)

    for words in (("--ramp", "lightning"), ("--same-batch", "--devices", "1")):
        said = refusal_of("predict", tmp_path, *words)
        assert said.startswith(f"`{words[0]}` must be used with one run, got 2 runs")


def test_it_says_where_its_lines_end_short_of_the_result_or_beyond() -> None:
    """The lines have the examples of one batch size, and the ramp needs another number."""
    p = of("lightning", rising(power=2.0))

    assert p.ramp is not None
    more = f"{round(EXAMPLES * p.ramp.examples_ratio):,}"
    assert abs(p.ramp.examples_ratio - 1) > 0.05
    assert f"of that batch size. The same result takes {more}." in notes_of(p)
    nearly = replace(p.ramp, examples_ratio=1.01).to_copy().notes
    assert "The same result" not in " ".join(nearly)
