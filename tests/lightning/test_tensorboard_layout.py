# SPDX-License-Identifier: Apache-2.0
"""The Custom Scalars page as TensorBoard's own plugin reads it back."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from fits import fit
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from noisescale import NoiseScaleMonitor
from noisescale.lightning.tensorboard_layout import merged_into

OURS = {"Noise scale": {"B_simple": ["Margin", ["value", "low", "high"]]}}
THEIRS = {"Losses": {"both": ["Multiline", ["train/loss", "val/loss"]]}}


def titles(folder: Path) -> dict[str, list[str]]:
    """Category -> charts of the layout that counts: the last one of the run."""
    events = EventAccumulator(str(folder)).Reload()
    last = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(last)
    return {category.title: [c.title for c in category.chart] for category in layout.category}


def test_ours_is_written_where_there_is_none(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer, merged_into(writer, OURS):
        pass

    assert titles(tmp_path) == {"Noise scale": ["B_simple"]}


def test_a_layout_written_before_is_kept(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(THEIRS)
        with merged_into(writer, OURS):
            pass

    assert titles(tmp_path) == {"Losses": ["both"], "Noise scale": ["B_simple"]}


def test_a_layout_of_an_earlier_writer_of_the_run_is_kept(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(THEIRS)
    with SummaryWriter(str(tmp_path), filename_suffix=".resumed") as writer:
        with merged_into(writer, OURS):
            pass
        with merged_into(writer, OURS):
            pass

    assert titles(tmp_path) == {"Losses": ["both"], "Noise scale": ["B_simple"]}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("add_custom_scalars", (THEIRS,)),
        ("add_custom_scalars_multilinechart", (["train/loss"], "Losses", "both")),
        ("add_custom_scalars_marginchart", (["a", "b", "c"], "Losses", "both")),
    ],
)
def test_a_layout_written_while_we_are_there_is_merged(
    tmp_path: Path, method: str, arguments: Any
) -> None:
    with SummaryWriter(str(tmp_path)) as writer, merged_into(writer, OURS):
        getattr(writer, method)(*arguments)

    assert titles(tmp_path) == {"Losses": ["both"], "Noise scale": ["B_simple"]}


def test_a_category_of_the_same_name_has_both_charts(tmp_path: Path) -> None:
    theirs = {"Noise scale": {"mine": ["Multiline", ["a"]], "B_simple": ["Multiline", ["old"]]}}
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(theirs)
        with merged_into(writer, OURS):
            pass

    assert titles(tmp_path) == {"Noise scale": ["mine", "B_simple"]}


def test_the_writer_is_as_before_when_we_leave(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        before = dict(vars(writer))
        with merged_into(writer, OURS):
            assert vars(writer) != before
        assert vars(writer) == before


def test_a_fit_leaves_the_users_charts_and_ours(tmp_path: Path) -> None:
    class WritesLayouts(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                trainer.logger.experiment.add_custom_scalars(THEIRS)

    logger = TensorBoardLogger(tmp_path, name="", version="")

    fit(NoiseScaleMonitor(), WritesLayouts(), logger=logger)

    assert titles(tmp_path) == {
        "Losses": ["both"],
        "Noise scale": [
            "Simple noise scale and its 95 % interval [examples]",
            "Noise scale against batch size [examples]",
            "Efficiency: progress per example",
            "Signal: |G|²",
            "Noise: tr(Σ)",
        ],
    }
