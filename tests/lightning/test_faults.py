# SPDX-License-Identifier: Apache-2.0
"""A fault in whatever is not training ends no training, and changes none."""

import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from faults import OF_A_METER, Faults
from fits import FsdpAnywhere, both_loggers, classifier, fit_here, fits_on_ranks, loader
from lightning.pytorch.strategies import ModelParallelStrategy
from tiers import slow

from noisescale import NoiseScaleMonitor
from noisescale.lightning.monitor import meters

STEPS, FEW, FEWEST = 200, 40, 8
"""Most functions are called at every step, which has one fault; the rest once or twice a fit."""
CALLED_BY_LIGHTNING = {name for name in dir(L.Callback) if not name.startswith("_")}
CALLED_BY_LIGHTNING |= {"_begin_batch", "examples_in"}  # of which the first may fail

COLLECTIVE = OF_A_METER | {
    "MeasuringCallback._close_step",
    "MeasuringCallback._measuring",
    "MeasuringCallback._look_for_shared_examples",
    "SharedExamples.look",
    "SharedExamples._largest_share",
    "tensors_of",
}
"""And that of the monitor."""
OF_AN_ENGINE = {"Unit.allocate", "Unit.__call__"}
"""What FSDP calls instead of its own: it passes that on, within which what measures is guarded."""


def spared(module: str, name: str) -> bool:
    """The functions that guards are in, and what guards are made of."""
    monitor, _, hook = name.partition(".")
    return (
        (monitor == "NoiseScaleMonitor" and hook in CALLED_BY_LIGHTNING)
        or name in COLLECTIVE | OF_AN_ENGINE
        or name == "MeasuringCallback._leaving_step_out"
        or name.startswith("_show_calls.<locals>.")
        or name in ("_register_hook", "_retain_grad")  # torch's, while batches are halved
        or module == "guard.py"
    )


def spared_but_collectors(module: str, name: str) -> bool:
    return not module.startswith("collectors/") or spared(module, name)


class Faulty(L.Callback):
    """Raises in one function a step, on the rank that is given."""

    def __init__(self, faults: Faults, rank: int) -> None:
        self.faults, self.rank = faults, rank
        self.catching = warnings.catch_warnings()

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank:
            self.faults.next_step()

    on_train_end = on_train_start

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.catching.__enter__()
        warnings.simplefilter("ignore")
        self.on_train_start(trainer)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.faults.stop()
        if batch_idx:  # what fails at the first one is told
            self.on_train_start(trainer)

    def teardown(self, *_: Any, **__: Any) -> None:
        self.faults.stop()
        self.catching.__exit__(None, None, None)


def left(fitting: Any) -> dict[str, Any]:
    """What this rank has after a fit."""
    faults = [c.faults for c in fitting.callbacks if isinstance(c, Faulty)]
    monitors = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
    parameters = fitting.lightning_module.parameters()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    return {
        "steps": fitting.global_step,
        "parameters": [p.detach().clone() for p in local],
        "done": faults[0].done if faults else set(),
        "measured": [m.noise_scale.steps for m in monitors],
    }


def fitted(
    fits: list[list[Any]], folder: Path, ranks: int, *, engine: Any = dict, **options: Any
) -> list[dict[str, Any]]:
    """What is left on the last rank by fits with these callbacks."""

    def one(number: int, callbacks: list[Any]) -> dict[str, Any]:
        defaults = {"train_loader": loader(4, 400), "max_epochs": -1, "log_every_n_steps": 3}
        logger = both_loggers(folder / f"{number}")
        own = {**defaults, **options, **engine()}
        return left(fit_here(*callbacks, ranks=ranks, logger=logger, **own))

    each = [partial(one, *numbered) for numbered in enumerate(fits)]
    if ranks == 1:
        return [fit() for fit in each]
    return [of_ranks[-1] for of_ranks in fits_on_ranks(*each, ranks=ranks)]


def by_fsdp1() -> dict[str, Any]:
    return {"strategy": FsdpAnywhere(), "model": classifier()}


def by_fsdp2_over_tensor_parallelism() -> dict[str, Any]:
    return {"strategy": ModelParallelStrategy(2, 2), "model": classifier(sharded=True)}


def check_alike(ours: dict[str, Any], theirs: dict[str, Any], found: Any = None) -> None:
    assert ours["steps"] == theirs["steps"]
    for one, other in zip(ours["parameters"], theirs["parameters"], strict=True):
        assert torch.equal(one, other), found


# FSDP2's of torch 2.13, over tensor parallelism: no test writes in place.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    ("ranks", "options", "least"),
    [
        (1, {}, None),
        (2, {}, None),
        slow(1, {}, 90),
        slow(1, {"accumulate_grad_batches": 2}, 70),
        slow(2, {}, 70),
        slow(2, {"engine": by_fsdp1}, 25),
        slow(4, {"engine": by_fsdp2_over_tensor_parallelism}, 25),
    ],
)
def test_a_fault_in_each_function_leaves_every_parameter_as_it_is(
    ranks: int, options: dict[str, Any], least: int | None, tmp_path: Path
) -> None:
    """Also where one rank of two has it alone. Without `least` in the functions of one fit."""
    # Under an engine steps take long, and functions outside of its collector have had theirs.
    of_engine = "engine" in options
    most = FEW if of_engine or least is None else STEPS
    plains: dict[int, dict[str, Any]] = {}
    done: set[str] = set()
    steps = most
    for attempt in itertools.count():
        spares = spared_but_collectors if of_engine else spared
        faults = Faults("NoiseScaleMonitor.on_train_start", spares, set(done))
        monitor = NoiseScaleMonitor(every_n_steps=1)
        fits = [[]] * (steps not in plains) + [[Faulty(faults, ranks - 1), monitor]]
        folder = tmp_path / f"{attempt}"
        *plain, faulty = fitted(fits, folder, ranks, max_steps=steps, **options)
        plains.setdefault(steps, *plain)
        found, done = faulty["done"] - done, faulty["done"]
        check_alike(faulty, plains[steps], found)
        assert faulty["measured"] > [0] or steps < STEPS, found
        if least is None or (steps == most and not found):
            break
        steps = most if not found else FEW if len(found) > 3 else FEWEST
    assert len(done) > (FEW - 3 if least is None else least)


@pytest.mark.parametrize("ranks", [slow(1), 2])
def test_an_unforeseen_error_while_meters_are_made_ends_no_training(
    ranks: int, tmp_path: Path
) -> None:
    """The other rank, which could measure, does not wait for ever."""

    class Broken(NoiseScaleMonitor):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
                warnings.simplefilter("error")
                if trainer.global_rank == ranks - 1:
                    patch.setattr(meters, "Meter", None)
                told = "No noise scale is measured.*(not callable|has no|another rank could not)"
                with pytest.warns(UserWarning, match=told):
                    super().on_fit_start(trainer, pl_module)

    fits = [[Broken(every_n_steps=1)], []]
    broken, plain = fitted(fits, tmp_path, ranks, max_steps=FEWEST)

    check_alike(broken, plain)
    assert (broken["steps"], broken["measured"]) == (FEWEST, [0])
