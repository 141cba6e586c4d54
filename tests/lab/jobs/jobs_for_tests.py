# SPDX-License-Identifier: Apache-2.0
"""A job whose trainings are short scripts, for tests of workers."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescale.lab.jobs.jobs import NOTHING, Entry, Record, Task

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

    def finished(
        self, results: Mapping[str, Record], entries: Mapping[str, Entry] = NOTHING
    ) -> bool:
        return not self.wanted(results)

    def wanted(
        self, results: Mapping[str, Record], entries: Mapping[str, Entry] = NOTHING
    ) -> list[Task]:
        first = [Task(f"n={n}", {"n": n}) for n in range(self.count)]
        missing = [task for task in first if task.key not in results]
        if missing:
            return missing
        total = sum(results[task.key].get("square", 0) for task in first)
        last = Task(f"sum={total}", {"n": total})
        return [] if last.key in results else [last]

    def limit_of(self, key: str, results: Mapping[str, Record]) -> float:
        return 1000.0 + len(results)


def script(path: Path, body: str = "") -> list[str]:
    """The command of a training that does something before its result is written."""
    path.write_text(SCRIPT.format(body=body))
    return [sys.executable, str(path)]


def squares_in(results: Mapping[str, Record]) -> dict[str, int]:
    return {key: json.loads(json.dumps(result))["square"] for key, result in results.items()}
