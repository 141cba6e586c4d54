# SPDX-License-Identifier: Apache-2.0
"""Put faults into the core, one at a time, and count those that the tests find.

Each fault of `_mutations.py` is put into a copy of the repository. The tests of its room, the
contract of the collectors and the tests of levels run there until one fails. They may be the tests
of another commit.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.strength._mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
NAME = "strength/mutations"
CONTRACTS = ["tests/collectors/test_contract.py", "tests/meter/test_levels.py"]
SECONDS = 1200
"""After which a run counts as failed: some faults have tests wait for each other."""

TIERS = {"test": [], "test-all": ["-m", "slow"]}
WHOLE: dict[str, list[str]] = {"whole": []}
"""The only tier of commits before there were two."""


def copy_of(folder: Path, revision: str) -> Path:
    """A copy of what is committed, with the tests of a revision."""
    for commit, paths in (("HEAD", []), (revision, ["tests", "pyproject.toml"])):
        archive = subprocess.run(
            ["git", "archive", commit, *paths], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        shutil.rmtree(folder / "tests", ignore_errors=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def first_failure(copy: Path, mutation: Mutation, options: list[str]) -> tuple[str, float]:
    """The test that finds a fault, "" if none does; and seconds."""
    room = Path("tests", mutation.file).parent
    while not any((copy / room).glob("test_*.py")):
        room = room.parent
    file = copy / "noisescale" / mutation.file
    right = file.read_text()
    assert right.count(mutation.old) == 1, mutation
    file.write_text(right.replace(mutation.old, mutation.new))
    begun = time.perf_counter()
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *options, room, *CONTRACTS],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": f"{copy}", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        lines = [*run.stdout.splitlines(), *run.stderr.splitlines()]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        assert run.returncode in (0, 5) or failed, lines[-20:]
        found = failed[0].split(" - ")[0] if failed else ""
    except subprocess.TimeoutExpired:
        found = "none ended in time"
    finally:
        file.write_text(right)
    return found, round(time.perf_counter() - begun, 1)


def row_of(copy: Path, mutation: Mutation, tests: str, tiers: dict[str, list[str]]) -> Any:
    row: dict[str, Any] = {"tests": tests, **mutation._asdict(), "tier": "", "by": "", "seconds": 0}
    for tier, options in tiers.items():
        by, seconds = first_failure(copy, mutation, options)
        row["seconds"] += seconds
        if by:
            return {**row, "tier": tier, "by": by}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", default="HEAD", help="the commit whose tests run")
    parser.add_argument("--whole", action="store_true", help="the tests have one tier")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="also run what is saved")
    options = parser.parse_args()

    tests = "whole" if options.whole else "tiers"
    saved = saved_rows(NAME)
    others = [row for row in saved if row["tests"] != tests or not options.again]
    done = {(row["file"], row["old"]) for row in others if row["tests"] == tests}
    left = [m for m in chain(*MUTATIONS.values()) if (m.file, m.old) not in done]
    with tempfile.TemporaryDirectory() as name:
        copies: SimpleQueue[Path] = SimpleQueue()
        for process in range(options.processes):
            (Path(name) / str(process)).mkdir()
            copies.put(copy_of(Path(name) / str(process), options.tests))

        def run(mutation: Mutation) -> Any:
            copy = copies.get()
            try:
                return row_of(copy, mutation, tests, WHOLE if options.whole else TIERS)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(options.processes) as pool:
            for row in pool.map(run, left):
                others.append(row)
                write_results(NAME, others, quiet=True)
                print(row["file"], "->", row["new"], ":", row["tier"], row["by"], row["seconds"])

    for drawn, mutations in MUTATIONS.items():
        faults = {(m.file, m.old) for m in mutations}
        by = Counter(
            r["tier"] for r in others if (r["file"], r["old"]) in faults and r["tests"] == tests
        )
        print(f"{drawn}:", ", ".join(f"{n} found by {tier or 'no test'}" for tier, n in by.items()))


if __name__ == "__main__":
    main()
