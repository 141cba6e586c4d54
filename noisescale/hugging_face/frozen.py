# SPDX-License-Identifier: Apache-2.0
"""The model and the data of transformers' Trainer, for a fit at fixed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from noisescale.refusal import Refusal

if TYPE_CHECKING:
    from transformers import Trainer


def as_module(trainer: Trainer) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """Return the model with the Trainer's loss as a LightningModule, and its batches.

    A batch has `per_device_train_batch_size` examples, and its loss is a mean over them or over
    their labels, as the model makes it.
    """
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None:
        raise Refusal(
            "target", "come with data", "a Trainer without `train_dataset`", "Give it, or `data`."
        )
    own = type(trainer).get_train_dataloader is not transformers.Trainer.get_train_dataloader
    if own:  # a loader of the user's own
        return _OfTrainer(trainer), trainer.get_train_dataloader()
    collate = trainer.data_collator
    if getattr(dataset, "column_names", None) is not None:
        dataset = trainer._remove_unused_columns(dataset, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    stream = isinstance(dataset, IterableDataset)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=args.per_device_train_batch_size,
        sampler=None if stream else trainer._get_train_sampler(dataset),
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        drop_last=True,
    )
    return _OfTrainer(trainer), loader


class _OfTrainer(pl.LightningModule):
    """The model of a Trainer, whose loss the Trainer computes."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.network: Any = trainer.model
        self._of = [trainer]  # no module of this one, and not copied with it

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfTrainer:
        import copy

        made = type(self)(self._of[0])
        made.network = copy.deepcopy(self.network, memo)
        return made

    @property
    def own_precision(self) -> str | None:
        """The precision that the Trainer trains in, as Lightning names it."""
        args = self._of[0].args
        return "bf16-mixed" if args.bf16 else "16-mixed" if args.fp16 else None

    def on_train_start(self) -> None:
        """Put the model in training mode: `from_pretrained` gives it in the other one."""
        self.network.train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Any = self._of[0].compute_loss(self.network, batch)
        return loss  # type: ignore[no-any-return]  # without `return_outputs` it is a tensor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one that is not used: it says which parameters are trained."""
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.0)
