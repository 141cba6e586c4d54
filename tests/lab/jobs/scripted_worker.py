# SPDX-License-Identifier: Apache-2.0
"""A worker process on `Squares`, whose trainings are a script: STORAGE OUTPUT SCRIPT LEASE."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.jobs.jobs_for_tests import Squares

from noisescale.lab.jobs import trial_process, worker
from noisescale.lab.jobs.ledger import Ledger


def main() -> None:
    place, output, script, lease = sys.argv[1:]
    trial_process.command_of = lambda folder, devices: [  # type: ignore[assignment]  # a function
        sys.executable,
        script,
        str(folder),
    ]
    worker.IDLE = 0.1
    ledger = Ledger.open(place, lease=float(lease))
    worker.Worker(
        ledger,
        Squares(int(ledger.job["count"])),
        Path(output),
        on_event=lambda t: print(t, flush=True),
    ).work()


if __name__ == "__main__":
    main()
