# SPDX-License-Identifier: Apache-2.0
"""A process that trains the scripts of a folder, the first one cold: FOLDER [SCRIPT ...].

`found.json` in the folder then tells of each training the kind of its process, its code, and what
it has found.
"""

import json
import sys
from pathlib import Path
from typing import Any

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import Training
from noisescale.lab.jobs.trial_process import TrialProcess
from noisescale.lab.jobs.warm import Starts
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import ModuleDefaults, SweepJob


def spec_of(script: str) -> Any:
    training = Training(f"{script}:make", accelerator="cpu")
    goal, own = Goal.read("val_loss<=0"), ModuleDefaults(64, 8, 0.05)
    job = SweepJob(training, own, goal, (8, 16), Search((), 3, 2), epochs=2)
    return job.task(8, {"learning_rate": 0.05}, 3).spec


def main() -> None:
    folder, *scripts = sys.argv[1:]
    events: list[str] = []
    starts = Starts(1, cold=False, on_event=events.append)
    trained = []
    for number, script in enumerate(scripts):
        starts.prepare()
        place = Path(folder, f"{number}-{Path(script).stem}")
        process = TrialProcess(place, spec_of(script), 1, starts.start)
        ended = process.process.wait(60)
        process.process.kill()
        running: Any = process.process
        trained.append(
            {
                "script": script,
                "kind": type(running).__name__,
                "ended": ended,
                "code": running.code,
                "found": process.result(),
                "reason": process.reason(),
                "printed": (place / "output.txt").read_text(),
            }
        )
        written = Path(folder, "found.json.part")
        written.write_text(json.dumps({"events": events, "trained": trained}))
        written.replace(Path(folder, "found.json"))


if __name__ == "__main__":
    main()
