# SPDX-License-Identifier: Apache-2.0
"""Batches of the loader of another size, from one epoch to the next."""

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fits import classifier, fit, loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from named_batches import Names, Stops, fitted, mean_of, names
from ranks import as_torchrun, on_ranks
from refused import refused
from tiers import slow
from torch import Tensor
from torch.utils.data import DataLoader

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.scheduling import Gate, Given

EXAMPLES = 40

WANTED = {0: 16, 40: 6, 80: 12}
"""By examples: by epochs, that is."""


class Validated(Names):
    """Notes the number of training batches of every epoch, and validates at the end of each."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches: list[float] = []
        self.validations = 0

    def on_train_epoch_start(self) -> None:
        self.batches.append(self.trainer.num_training_batches)

    def on_validation_epoch_end(self) -> None:
        self.validations += not self.trainer.sanity_checking

    def validation_step(self, batch: Tensor) -> None:
        pass

    def val_dataloader(self) -> Any:
        return names(6, 2)

    @property
    def epochs(self) -> list[list[list[int]]]:
        """The batches that arrived, by epochs."""
        ends = torch.tensor([0, *self.batches]).cumsum(0).int().tolist()
        return [self.arrived[a:b] for a, b in pairwise(ends)]


def scheduler(wanted: Any = None, **options: Any) -> BatchSizeScheduler:
    return BatchSizeScheduler(
        Given(WANTED if wanted is None else wanted, by="examples"),
        **{"max_batch_size": 16, "max_device_batch_size": 8, **options},
    )


def sizes_of(module: Names) -> list[int]:
    return [len(batch) for batch in module.arrived]


def test_batches_have_the_wanted_size_from_the_next_epoch_on() -> None:
    """16 are eight batches of two, then two of 8; 6 is one of 6 then, and 12 are two of those."""
    module = Validated(EXAMPLES)
    data = DataLoader(range(EXAMPLES), batch_size=2, shuffle=True)

    fitted(scheduler(), module=module, data=data, max_epochs=4)

    assert module.batches == [20, 5, 7, 7]
    assert [[len(b) for b in epoch] for epoch in module.epochs] == [
        [2] * 20,
        [8] * 5,
        *[[6] * 6 + [4]] * 2,
    ]
    for epoch in module.epochs:
        assert sorted(chain(*epoch)) == list(range(EXAMPLES))
    assert module.validations == 4
    ends = np.cumsum([8, 8, 4] + [1] * 5 + [2, 2, 2, 1] * 2)
    for end, begin, gradient in zip(ends, [0, *ends], module.gradients, strict=False):
        window = range(begin, end)
        assert gradient == pytest.approx(mean_of(window, [module.arrived], EXAMPLES))
    assert len(module.gradients) == len(ends)


def test_the_default_bound_is_of_full_micro_batches() -> None:
    """1/50 of 5,050 is 101: twelve batches of 8. That prime would take 101 of one row."""
    growing = BatchSizeScheduler(max_device_batch_size=8)

    fitted(
        growing,
        Stops(steps=1),
        module=classifier(),
        data=loader(2, 1010),
        max_epochs=5,
        accumulate_grad_batches=2,
    )

    assert growing.state_dict()["max_batch_size"] == 96


def test_two_ranks_are_dealt_the_resized_batches(recorded: list[StepNorms]) -> None:
    """By the DistributedSampler that Lightning puts in; the monitor counts what arrives."""
    results = fit(
        scheduler({0: 32, 40: 12}, max_batch_size=32),
        NoiseScaleMonitor(),
        model=Validated(EXAMPLES),
        train_loader=DataLoader(range(EXAMPLES), batch_size=2, shuffle=True),
        max_epochs=3,
        results=lambda _, module: (
            module.epochs,
            module.validations,
            [step.examples for step in recorded],
        ),
    )

    epochs = [of_rank for of_rank, _, _ in results]
    sizes = [[2] * 10, [8, 8, 4], [6, 6, 6, 2]]
    for epoch in range(3):
        for of_rank in epochs:
            assert [len(batch) for batch in of_rank[epoch]] == sizes[epoch]
        assert sorted(chain(*epochs[0][epoch], *epochs[1][epoch])) == list(range(EXAMPLES))
    for _, validations, examples in results:
        assert validations == 3
        assert examples == [32, 8, *(16, 16, 8), *(12, 12, 12, 4)]


def test_a_run_resumed_in_mid_epoch_has_the_resized_batches(tmp_path: Path) -> None:
    """Lightning begins an unstateful loader anew, and takes what is left to take of an epoch.

    `estimated_stepping_batches` makes Lightning ask for the loader before callbacks are there.
    """

    class Module(Validated):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 60
            return super().configure_optimizers()

    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    options: dict[str, Any] = {"data": names(EXAMPLES, 2), "max_epochs": 3}
    whole, resumed = Module(EXAMPLES), Module(EXAMPLES)

    fitted(scheduler(), saves, module=whole, enable_checkpointing=True, **options)
    fitted(scheduler(), module=resumed, ckpt_path=tmp_path / "step=5.ckpt", **options)

    assert sizes_of(whole)[20:] == [8] * 5 + [6] * 6 + [4]
    assert sizes_of(resumed) == [8] * 3 + [6] * 6 + [4]
    assert len(resumed.gradients) == len(whole.gradients) - 5


@pytest.mark.parametrize(
    ("ranks", "sizes", "plan"),
    [
        (1, [16] * 8 + [32] * 4, "32 = 32 x 1 micro-batch x 1 device"),
        slow(2, [16] * 8, "32 = 16 x 1 micro-batch x 2 devices"),
    ],
)
def test_on_another_number_of_devices_the_plan_is_of_the_batches_that_arrive(
    tmp_path: Path, ranks: int, sizes: list[int], plan: str
) -> None:
    """Two devices had batches of 16, so has one, until an epoch has passed; and one had 32."""

    def on(ranks: int, *callbacks: Any, **options: Any) -> list[Any]:
        callback = scheduler({0: 32}, max_batch_size=32, max_device_batch_size=32 // ranks)
        return fit(
            callback,
            *callbacks,
            ranks=ranks,
            model=Validated(128),
            train_loader=names(128, 2),
            results=lambda _, module: (
                sizes_of(module),
                len(module.gradients),
                str(callback.plan),
            ),
            **options,
        )

    on(3 - ranks, ModelCheckpoint(tmp_path), max_epochs=1, enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")

    assert on(ranks, ckpt_path=path, max_epochs=3) == [(sizes, 8, plan)] * ranks


def test_ranks_that_differ_in_what_they_wait_to_do_are_told_before_batches_are_resized() -> None:
    """By less than a micro-batch: a gated policy stays on both, which compare in the background."""

    def message() -> str:
        def rule(noise_scale: float, plan: Any, progress: Any) -> float:
            return float(plan.batch_size) * (1.2 if dist.get_rank() else 1.0)

        policy = Gate(rule, hysteresis=1.1, min_dwell=0)
        callback = BatchSizeScheduler(policy, max_batch_size=64, max_device_batch_size=64)
        fitting = trainer(2, strategy="ddp", callbacks=[callback], max_epochs=2)
        with pytest.raises(RuntimeError) as refused:
            fitting.fit(classifier(), loader(8, examples=80))  # one decision, at the fourth step
        return str(refused.value)

    first, second = on_ranks(2, as_torchrun(message))

    assert first == second
    assert "got 16 to 19.2" in first


def test_rows_are_rows_where_examples_are_counted_otherwise() -> None:
    """At ten tokens a row, 160 wanted are 16 rows: two batches of 8."""
    module = Validated(EXAMPLES)
    monitor = NoiseScaleMonitor(batch_size_fn=lambda batch: 10 * len(batch), unit="tokens")
    callback = scheduler({0: 160}, max_batch_size=160)
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2}

    fitted(monitor, callback, module=module, data=names(EXAMPLES, 2), **options)

    assert sizes_of(module)[20:] == [8] * 5
    assert str(callback.plan) == "160 = 80 x 2 micro-batches x 1 device"


class OfDict(Names):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"] if isinstance(batch, dict) else batch, 0)


@pytest.mark.parametrize("kind", ["a loader", "combined", "a stream"])
def test_the_users_loaders_stay_as_they_are(kind: str) -> None:
    loader = names(EXAMPLES, 2, sized=kind != "a stream")
    given = CombinedLoader({"a": loader, "b": names(EXAMPLES, 2)}) if kind == "combined" else loader
    fitting = trainer(1, callbacks=[scheduler()], max_epochs=3)
    source, module = fitting.fit_loop._data_source, OfDict(EXAMPLES)

    fitting.fit(module, given)

    assert fitting.fit_loop._data_source is source
    assert loader.batch_size == 2
    assert sizes_of(module) == [2] * 20 + [8] * 5 + [6] * 6 + [4]


class Sampled(DataLoader[Any]):
    pass


class Unbatched(Names):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight[torch.as_tensor(batch)].mean()


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (names(EXAMPLES, 16), "8 < 16"),
        (Sampled(range(8), batch_size=2), "Sampled"),
        (DataLoader(range(8), batch_size=None), "DataLoader"),  # of single examples
        ({"labelled": names(8, 1), "unlabelled": names(8, 4)}, "1 and 4"),
    ],
    ids=["larger ones", "subclass", "no batches", "several sizes"],
)
def test_loaders_whose_batches_cannot_be_resized_are_refused(data: Any, got: str) -> None:
    fitting = trainer(1, callbacks=[scheduler(max_batch_size=64)])

    with refused("max_device_batch_size", got=got):
        fitting.fit(Unbatched(EXAMPLES), data)

    assert type(fitting.fit_loop._data_source).__name__ == "_DataLoaderSource"
