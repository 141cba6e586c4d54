# SPDX-License-Identifier: Apache-2.0
"""`python -m noisescale.lab.jobs.trial FOLDER`: one training of a job, as a worker starts it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from noisescale.extras import MissingExtraError
from noisescale.lab.jobs.jobs import TOO_LARGE, Record
from noisescale.printable import printable
from noisescale.user_code.targets import (
    module_and_data,
    refuse_out_of_memory,
    shorten_errors,
    train_and_val,
)


def train_trial(folder: Path) -> None:
    """Train the task in a folder, and write its result there."""
    from noisescale.lab.jobs.trial_imports import changes_of, write_imports
    from noisescale.lab.jobs.trial_process import IMPORTS_WANTED, SPEC, end_with_stdin
    from noisescale.lightning.training import seed_all

    end_with_stdin()
    wanted = os.environ.pop(IMPORTS_WANTED, "")
    environment = dict(os.environ)
    spec = json.loads((folder / SPEC).read_text())
    training, seed = spec["training"], spec.get("seed")

    if seed is not None:  # branches go on with the state of a checkpoint
        seed_all(seed)  # also what the user's function draws: the weights
    module, examples = module_and_data(training["target"], training["data"], spec.get("arguments"))
    changes = changes_of(environment)
    with shorten_errors(), refuse_out_of_memory("--max-device-batch-size", TOO_LARGE):
        _train(module, examples, spec, folder)
    if wanted:
        write_imports(folder, training, changes)


def _train(module: Any, examples: Any, spec: Record, folder: Path) -> None:
    if spec["kind"] == "branch":
        from noisescale.lab.branch.train_branches import train_branch_task

        train_branch_task(module, train_and_val(examples)[0], spec, folder)
        return
    from noisescale.lab.sweep.trial_fit import MadeModule, train_task
    from noisescale.lab.tune.trial_fit import train_tune_task
    from noisescale.lightning.training import seed_all

    # The function may have set a seed of its own, the same for all repetitions.
    seed_all(spec["seed"])
    os.environ["PL_GLOBAL_SEED"] = str(spec["seed"])  # of Lightning's shuffling over ranks
    train = train_tune_task if spec["kind"] == "tune" else train_task
    train(MadeModule(module, examples), spec, folder)


def main() -> None:
    """Train the task. An error of an option or a file is one line and code 2, as in commands."""
    try:
        train_trial(Path(sys.argv[1]))
    except (ValueError, OSError, MissingExtraError) as error:
        said = f"noisescale: {printable(' '.join(str(error).split()))}"
        print(said, file=sys.__stderr__)  # the script may have replaced the other one
        sys.exit(2)


if __name__ == "__main__":
    main()
