# SPDX-License-Identifier: Apache-2.0
"""A job whose trainings are short scripts, for tests of workers."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescale.lab.jobs.jobs import Entry, Record, State, Task
from noisescale.lab.jobs.ledger import results_of

SCRIPT = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
spec = json.loads((folder / "task.json").read_text())
{body}
(folder / "result.json").write_text(json.dumps({{"ended": "reached", "square": spec["n"] ** 2}}))
"""


@dataclass(frozen=True)
class Squares:
    """Two rounds of tasks: 0 to `count` - 1, and then their sum."""

    count: int = 3
    devices: int = 1
    kind: str = "squares"
    adjustable: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def is_finished(self, entries: Mapping[str, Entry]) -> bool:
        return not self.next_tasks(entries)

    def next_tasks(self, entries: Mapping[str, Entry]) -> list[Task]:
        results = results_of(entries)
        first = [Task(f"n={n}", {"n": n}) for n in range(self.count)]
        missing = [task for task in first if task.key not in results]
        if missing:
            return missing
        total = sum(results[task.key].get("square", 0) for task in first)
        last = Task(f"sum={total}", {"n": total})
        return [] if last.key in results else [last]

    def limit_of(self, spec: Record, entries: Mapping[str, Entry]) -> float:
        return 1000.0 + len(results_of(entries))


def ended(task: Task, result: Record) -> Entry:
    """What a ledger has of a task once it has a result."""
    return Entry(task.key, State.DONE, 0, 1, task.spec, {}, math.nan, result)


def script(path: Path, body: str = "") -> list[str]:
    """The command of a training that does something before its result is written."""
    path.write_text(SCRIPT.format(body=body))
    return [sys.executable, str(path)]


def squares_in(results: Mapping[str, Record]) -> dict[str, int]:
    return {key: json.loads(json.dumps(result))["square"] for key, result in results.items()}
