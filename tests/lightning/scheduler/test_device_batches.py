# SPDX-License-Identifier: Apache-2.0
"""Batches of the loader of another size, from one epoch to the next."""

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fits import classifier, fit, loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from named_batches import Names, mean_of, names
from ranks import as_torchrun, on_ranks
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


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_batches_have_the_wanted_size_from_the_next_epoch_on(shuffle: bool) -> None:
    """16 are eight batches of two, then two of 8; 6 is one of 6 then, and 12 are two of those."""
    module = Validated(EXAMPLES)

    trainer(1, strategy="auto", callbacks=[scheduler()], max_epochs=4).fit(
        module, DataLoader(range(EXAMPLES), batch_size=2, shuffle=shuffle)
    )

    assert module.batches == [20, 5, 7, 7]
    assert [[len(b) for b in epoch] for epoch in module.epochs] == [
        [2] * 20,
        [8] * 5,
        [6] * 6 + [4],
        [6] * 6 + [4],
    ]
    for epoch in module.epochs:
        assert sorted(chain(*epoch)) == list(range(EXAMPLES))
    assert module.validations == 4
    lengths = [8, 8, 4] + [1] * 5 + [2, 2, 2, 1] * 2
    begin = 0
    for length, gradient in zip(lengths, module.gradients, strict=True):
        window = range(begin, begin + length)
        assert gradient == pytest.approx(mean_of(window, [module.arrived], EXAMPLES))
        begin += length


def test_the_default_bound_is_of_full_micro_batches() -> None:
    """1/50 of 5,050 is 101: twelve batches of 8. That prime would take 101 of one row."""
    growing = BatchSizeScheduler(max_device_batch_size=8)

    trainer(1, strategy="auto", callbacks=[growing], max_epochs=5, accumulate_grad_batches=2).fit(
        classifier(), loader(2, 1010)
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


@pytest.mark.parametrize("estimates", [False, True])
def test_a_run_resumed_in_mid_epoch_has_the_resized_batches(
    tmp_path: Path, estimates: bool
) -> None:
    """Lightning begins an unstateful loader anew, and takes what is left to take of an epoch.

    `estimated_stepping_batches` makes Lightning ask for the loader before callbacks are there.
    """

    class Module(Validated):
        def configure_optimizers(self) -> Any:
            if estimates:
                assert self.trainer.estimated_stepping_batches == 60
            return super().configure_optimizers()

    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    options: dict[str, Any] = {"strategy": "auto", "max_epochs": 3}
    whole, resumed = Module(EXAMPLES), Module(EXAMPLES)
    trainer(1, callbacks=[scheduler(), saves], enable_checkpointing=True, **options).fit(
        whole, names(EXAMPLES, 2)
    )
    trainer(1, callbacks=[scheduler()], **options).fit(
        resumed, names(EXAMPLES, 2), ckpt_path=tmp_path / "step=5.ckpt"
    )

    assert [len(batch) for batch in whole.arrived[20:]] == [8] * 5 + [6] * 6 + [4]
    assert [len(batch) for batch in resumed.arrived] == [8] * 3 + [6] * 6 + [4]
    assert len(resumed.gradients) == len(whole.gradients) - 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_another_number_of_devices_the_plan_is_of_the_batches_that_arrive(
    tmp_path: Path, ranks: int
) -> None:
    """Two devices had batches of 16, so has one, until an epoch has passed; and one had 32."""

    def fitted(ranks: int, *callbacks: Any, **options: Any) -> list[Any]:
        return fit(
            scheduler({0: 32}, max_batch_size=32, max_device_batch_size=32 // ranks),
            *callbacks,
            ranks=ranks,
            strategy="ddp_fork" if ranks > 1 else "auto",
            model=Validated(128),
            train_loader=names(128, 2),
            results=lambda fitting, module: (
                [len(batch) for batch in module.arrived],
                len(module.gradients),
                str(next(c.plan for c in fitting.callbacks if isinstance(c, BatchSizeScheduler))),
            ),
            **options,
        )

    saves = ModelCheckpoint(tmp_path)
    fitted(3 - ranks, saves, max_epochs=1, enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")

    for sizes, steps, plan in fitted(ranks, ckpt_path=path, max_epochs=3):
        assert sizes == {1: [16] * 8 + [32] * 4, 2: [16] * 8}[ranks]
        assert steps == 8
        assert (
            plan
            == {
                1: "32 = 32 x 1 micro-batch x 1 device",
                2: "32 = 16 x 1 micro-batch x 2 devices",
            }[ranks]
        )


def test_ranks_that_differ_in_what_they_wait_to_do_are_told_before_batches_are_resized() -> None:
    """By less than a micro-batch: a gated policy stays on both, which compare in the background."""

    def message() -> str:
        def rule(noise_scale: float, plan: Any, progress: Any) -> float:
            return float(plan.batch_size) * (1.2 if dist.get_rank() else 1.0)

        callback = BatchSizeScheduler(
            Gate(rule, hysteresis=1.1, min_dwell=0), max_batch_size=64, max_device_batch_size=64
        )
        fitting = trainer(2, strategy="ddp", callbacks=[callback], max_epochs=2)
        with pytest.raises(RuntimeError) as refused:
            fitting.fit(classifier(), loader(8, examples=80))  # one decision, at the fourth step
        return str(refused.value)

    assert {text[:68] for text in on_ranks(2, as_torchrun(message))} == {
        "`policy` must give the same batch size on all ranks, got 16 to 19.2."
    }


def test_rows_are_rows_where_examples_are_counted_otherwise() -> None:
    """At ten tokens a row, 160 wanted are 16 rows: two batches of 8."""
    module = Validated(EXAMPLES)
    monitor = NoiseScaleMonitor(batch_size_fn=lambda batch: 10 * len(batch), unit="tokens")
    callback = scheduler({0: 160}, max_batch_size=160)

    trainer(
        1,
        strategy="auto",
        callbacks=[monitor, callback],
        max_epochs=2,
        accumulate_grad_batches=2,
    ).fit(module, names(EXAMPLES, 2))

    assert [len(batch) for batch in module.arrived[20:]] == [8] * 5
    assert str(callback.plan) == "160 = 80 x 2 micro-batches x 1 device"


def test_batches_of_a_stream_are_resized_too() -> None:
    module = Names(EXAMPLES)

    trainer(1, strategy="auto", callbacks=[scheduler()], max_epochs=3).fit(
        module, names(EXAMPLES, 2, sized=False)
    )

    assert [len(b) for b in module.arrived] == [2] * 20 + [8] * 5 + [6] * 6 + [4]


def test_the_users_loaders_stay_as_they_are() -> None:
    loader = names(EXAMPLES, 2)
    for given in (loader, CombinedLoader({"a": loader, "b": names(EXAMPLES, 2)})):
        fitting = trainer(1, strategy="auto", callbacks=[scheduler()], max_epochs=3)
        source = fitting.fit_loop._data_source

        class OfDict(Names):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return super().training_step(batch["a"] if isinstance(batch, dict) else batch, 0)

        module = OfDict(EXAMPLES)
        fitting.fit(module, given)

        assert fitting.fit_loop._data_source is source
        assert loader.batch_size == 2
        assert [len(b) for b in module.arrived] == [2] * 20 + [8] * 5 + [6] * 6 + [4]


def test_a_limit_below_what_the_loader_gives_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least") as refused:
        trainer(1, strategy="auto", callbacks=[scheduler(max_batch_size=64)]).fit(
            Names(EXAMPLES), names(EXAMPLES, 16)
        )

    assert str(refused.value) == (
        "`max_device_batch_size` must be at least the `batch_size` of the loader, got 8 < 16. Raise"
        " it, or start with smaller batches."
    )


class Sampled(DataLoader[Any]):
    pass


@pytest.mark.parametrize(
    "loader",
    [
        Sampled(range(8), batch_size=2),
        DataLoader(range(8), batch_size=None),
    ],
    ids=["subclass", "no batches"],
)
def test_only_plain_loaders_are_resized(loader: Any) -> None:
    callback = scheduler()
    fitting = trainer(1, strategy="auto", callbacks=[callback])

    class Unbatched(Names):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.weight[torch.as_tensor(batch)].mean()

    with pytest.raises(MisconfigurationException) as refused:
        fitting.fit(Unbatched(8), loader)

    assert type(fitting.fit_loop._data_source).__name__ == "_DataLoaderSource"
    assert str(refused.value) == (
        "`max_device_batch_size` must be left out for data that do not come from a plain torch"
        f" DataLoader with a `batch_size`, got {type(loader).__name__}. Micro-batches then stay as"
        " they are, and only their number changes."
    )


def test_loaders_of_different_batch_sizes_are_not_resized() -> None:
    fitting = trainer(1, strategy="auto", callbacks=[scheduler()])

    with pytest.raises(MisconfigurationException) as refused:
        fitting.fit(Names(8), {"labelled": names(8, 1), "unlabelled": names(8, 4)})

    assert str(refused.value).startswith(
        "`max_device_batch_size` must be left out for loaders of different `batch_size`, got 1 and"
        " 4. Micro"
    )
