# SPDX-License-Identifier: Apache-2.0
"""Runs in MLflow's database and folders: what its logger shows, or the record among artifacts."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from logged_runs import log_run
from refused import refused

from noisescale import predict
from noisescale.history.following import FollowedRun
from noisescale.history.reading import read_metric, read_run
from noisescale.history.run_files import runs_in
from noisescale.refusal import Refusal

AS_LOGGED = pytest.mark.filterwarnings("ignore:.* has only what a logger shows")

TABLES = """
CREATE TABLE runs (run_uuid VARCHAR(32) NOT NULL PRIMARY KEY, lifecycle_stage VARCHAR(20),
                   artifact_uri VARCHAR(200), start_time BIGINT);
CREATE TABLE metrics ("key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL,
                      run_uuid VARCHAR(32) NOT NULL, step BIGINT NOT NULL, is_nan BOOLEAN NOT NULL);
"""

Row = tuple[int, dict[str, float]]


def rows(steps: range, batch_size: float = 64) -> list[Row]:
    """What a logger shows at each of these steps."""
    shown = {"simple": 192.0, "lower_bound": 150.0, "simple_high": 250.0, "seconds_per_step": 0.1}
    return [(step, shown | {"batch_size": batch_size}) for step in steps]


TEN = rows(range(10, 110, 10))


def database(path: Path, runs: dict[str, list[Row]], *, artifacts: str = "s3://here") -> Path:
    """As MLflow writes it, as far as it is read."""
    is_new = not path.exists()
    with closing(sqlite3.connect(path)) as connection, connection:
        if is_new:
            connection.executescript(TABLES)
        for begun, (run, of_run) in enumerate(runs.items()):
            known = (run, "active", artifacts, begun)
            connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?)", known)
            for step, metrics in of_run:
                named = {f"noise_scale/{name}": value for name, value in metrics.items()}
                for name, value in {**named, "loss": 1 / step}.items():
                    row = (name, value, 1_700_000_000_000 + 100 * step, run, step, False)
                    connection.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", row)
    return path


def store(folder: Path, of_run: list[Row]) -> Path:
    """As MLflow writes folders."""
    run = folder / "1/b118"
    for step, metrics in of_run:
        for name, value in metrics.items():
            file = run / "metrics/noise_scale" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as opened:
                opened.write(f"{1_700_000_000_000 + 100 * step} {value} {step}\n")
    (run / "meta.yaml").touch()
    return folder


@pytest.mark.parametrize("kind", ["database", "folder of it", "store", "run of the store"])
def test_what_the_logger_shows_is_a_history_as_logged(tmp_path: Path, kind: str) -> None:
    if kind in ("database", "folder of it"):
        made = database(tmp_path / "mlflow.db", {"a1": TEN})
    else:
        made = store(tmp_path / "mlruns", TEN)
    made = {"folder of it": made.parent, "run of the store": made / "1/b118"}.get(kind, made)

    with pytest.warns(UserWarning, match=r"not noise_scale\.jsonl"):
        history = read_run(made)

    assert history["step"].tolist() == [*range(10, 110, 10)]
    assert history["examples"].tolist() == [*range(640, 7040, 640)]
    shown = {name: set(history[name]) for name in ("noise_scale", "low", "seconds_per_step")}
    assert shown == {"noise_scale": {192.0}, "low": {150.0}, "seconds_per_step": {0.1}}
    assert predict(history).own_batch_size == 64


@AS_LOGGED
def test_steps_that_were_trained_again_count_once_and_one_of_several_runs_is_named_by_its_id(
    tmp_path: Path,
) -> None:
    again = rows(range(60, 90, 10), batch_size=128)
    history = read_run(database(tmp_path / "again.db", {"a1": [*TEN, *again]}))
    assert history["step"].tolist() == [*range(10, 90, 10)]
    assert history["examples"].tolist()[4:] == [3200, 4480, 5760, 7040]

    path = database(tmp_path / "mlflow.db", {"a1": TEN, "b2": TEN[:5]})

    with refused(f"{path}", requirement="contain one run", got="2: a1, b2"):
        read_run(path)
    assert len(read_run(path / "b2")) == 5
    assert runs_in(path) == [path / "a1", path / "b2"]
    with refused(f"{path / 'c3'}", got="a log without metrics"):
        read_run(path / "c3")


def test_the_record_among_the_artifacts_goes_before_what_is_shown(tmp_path: Path) -> None:
    log_run(tmp_path / "artifacts")
    artifacts = (tmp_path / "artifacts").as_uri()

    history = read_run(database(tmp_path / "mlflow.db", {"a1": TEN}, artifacts=artifacts))

    assert len(history) == 100
    assert history["devices"].tolist() == [2.0] * 100
    # Rows of an earlier version are a whole history.
    whole = [(s - 1, {**r, "step": s, "examples": 64.0 * s, "devices": 2}) for s, r in TEN]
    history = read_run(database(tmp_path / "earlier.db", {"a1": whole}))
    assert history["step"].tolist() == [*range(10, 110, 10)]
    assert history["devices"].tolist() == [2.0] * 10


@AS_LOGGED
def test_a_run_that_is_still_written_is_followed_and_other_metrics_are_read_beside_it(
    tmp_path: Path,
) -> None:
    path = database(tmp_path / "mlflow.db", {"a1": TEN})
    steps, losses = read_metric(path, "loss")
    followed = FollowedRun(path)
    first = followed.read(), followed.history
    nothing = followed.read()
    database(path, {"a1": rows(range(110, 130, 10))})

    again = followed.read(), followed.history

    assert losses.tolist() == [1 / step for step in steps.tolist()]
    assert steps.tolist() == [*range(10, 110, 10)]
    assert (first[0], nothing, again[0]) == (True, False, True)
    assert first[1] is not None
    assert again[1] is not None
    assert (len(first[1]), len(again[1])) == (10, 12)


def test_what_is_no_log_of_ours_is_refused_with_its_place(tmp_path: Path) -> None:
    others = database(tmp_path / "others.db", {"a1": [(step, {}) for step, _ in TEN]})
    damaged = database(tmp_path / "mlflow.db", {"a1": TEN})
    content = damaged.read_bytes()[:5000]
    damaged.write_bytes(content)
    study = tmp_path / "study.db"
    with closing(sqlite3.connect(study)) as connection, connection:
        connection.execute("CREATE TABLE trials (number INTEGER)")
    file = store(tmp_path / "mlruns", TEN) / "1/b118/metrics/noise_scale/simple"
    with file.open("a") as opened:
        opened.write("1700000000 19")

    with refused(f"{others}", word="unmeasured", remedy="`NoiseScaleMonitor()`"):
        read_run(others)
    for path in (study, damaged):
        with refused(f"{path}", requirement="be a database of MLflow"):
            read_run(path)
    assert damaged.read_bytes() == content
    with pytest.raises(Refusal) as of_line:
        read_run(tmp_path / "mlruns")
    assert of_line.value.at == (str(file), 11)


def test_the_times_of_a_run_in_a_database_need_a_file_of_their_own(tmp_path: Path) -> None:
    from noisescale import profile

    path: Any = database(tmp_path / "mlflow.db", {"a1": TEN})

    with pytest.raises(Refusal, match="a folder, for the times"):
        profile("train.py:make", run=path)
