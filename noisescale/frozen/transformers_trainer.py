# SPDX-License-Identifier: Apache-2.0
"""The model and the data of transformers' Trainer, for a fit at fixed weights."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from noisescale.frozen.wrapped_network import WrappedNetwork
from noisescale.history.optimizers import OptimizerMix
from noisescale.hugging_face.trainer_access import makes_its_own_loader, takes_token_ids
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
    if makes_its_own_loader(trainer):
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


class _OfTrainer(WrappedNetwork):
    """The model of a Trainer, whose loss the Trainer computes."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.model)
        self._of = [trainer]  # no module of this one, and not copied with it
        args = trainer.args
        self.own_precision = "bf16-mixed" if args.bf16 else "16-mixed" if args.fp16 else None
        self.own_unit = "sequences" if takes_token_ids(self.network) else "examples"
        with suppress(ImportError, TypeError, ValueError):  # of an optimizer that is not installed
            self.own_kind = OptimizerMix.of(trainer.optimizer or _optimizer_of(args))

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfTrainer:
        made = type(self)(self._of[0])
        made.network = copy.deepcopy(self.network, memo)
        return made

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        """Load weights, also under other names, which transformers gives many models in files."""
        try:
            return super().load_state_dict(state_dict, *args, **options)
        except RuntimeError:
            with suppress(AttributeError, TypeError):  # a network that is not made of its `config`
                how = {"ignore_mismatched_sizes": True, "output_loading_info": True}
                made, misfits = type(self.network).from_pretrained(
                    None, config=self.network.config, state_dict=state_dict, **how
                )
                if not any(misfits.values()):
                    return self.network.load_state_dict(made.state_dict())
            raise

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Any = self._of[0].compute_loss(self.network, batch)
        return loss  # type: ignore[no-any-return]  # without `return_outputs` it is a tensor


def _optimizer_of(args: transformers.TrainingArguments) -> torch.optim.Optimizer:
    """Return an optimizer as the arguments name it, of a parameter that is of no model."""
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    made: torch.optim.Optimizer = kind([nn.Parameter(torch.zeros(1))], **options)
    return made
