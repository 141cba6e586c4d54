# SPDX-License-Identifier: Apache-2.0
"""The Custom Scalars page as TensorBoard's own plugin reads it back."""

import os
import struct
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from fits import fit
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from noisescale import NoiseScaleMonitor
from noisescale.guard import Guard
from noisescale.lightning.monitor import tensorboard_layout
from noisescale.lightning.monitor.tensorboard_layout import charts, merge_into

OURS = {"Noise scale": {"B_simple": ["Margin", ["value", "low", "high"]]}}
THEIRS = {"Losses": {"both": ["Multiline", ["train/loss", "val/loss"]]}}


def titles(folder: Path) -> dict[str, list[str]]:
    """Category -> charts of the layout that counts: the last one of the run."""
    events = EventAccumulator(str(folder)).Reload()
    last = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(last)
    return {category.title: [c.title for c in category.chart] for category in layout.category}


def test_ours_is_written_where_there_is_none(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer, merge_into(writer, OURS, Guard()):
        pass

    assert titles(tmp_path) == {"Noise scale": ["B_simple"]}


def test_a_layout_written_before_is_kept(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(THEIRS)
        with merge_into(writer, OURS, Guard()):
            pass

    assert titles(tmp_path) == {"Losses": ["both"], "Noise scale": ["B_simple"]}


def test_a_layout_of_an_earlier_writer_of_the_run_is_kept(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(THEIRS)
    with SummaryWriter(str(tmp_path), filename_suffix=".resumed") as writer:
        with merge_into(writer, OURS, Guard()):
            pass
        with merge_into(writer, OURS, Guard()):
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
    with SummaryWriter(str(tmp_path)) as writer, merge_into(writer, OURS, Guard()):
        getattr(writer, method)(*arguments)

    assert titles(tmp_path) == {"Losses": ["both"], "Noise scale": ["B_simple"]}


def test_a_category_of_the_same_name_has_both_charts(tmp_path: Path) -> None:
    theirs = {"Noise scale": {"mine": ["Multiline", ["a"]], "B_simple": ["Multiline", ["old"]]}}
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(theirs)
        with merge_into(writer, OURS, Guard()):
            pass

    assert titles(tmp_path) == {"Noise scale": ["mine", "B_simple"]}


def test_the_writer_is_as_before_when_we_leave(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        before = dict(vars(writer))
        with merge_into(writer, OURS, Guard()):
            assert vars(writer) != before
        assert vars(writer) == before


def record(data: bytes) -> bytes:
    """A record of an event file, with the right checksums."""
    header = struct.pack("<Q", len(data))
    crcs = [struct.pack("<I", masked_crc32c(part)) for part in (header, data)]
    return header + crcs[0] + data + crcs[1]


def layout_record(**value: Any) -> bytes:
    summary = Summary(value=[Summary.Value(tag="custom_scalars__config__", **value)])
    return record(Event(summary=summary).SerializeToString())


BAD_FILES = {
    "no event file": b"not an event file at all",
    "empty": b"",
    "a record of 2**62 bytes": struct.pack("<Q", 2**62) + bytes(12),
    "cut off": layout_record(tensor=TensorProto(string_val=[b""]))[:-20],
    "a record that is no event": record(b"\xff" * 8 + b"custom_scalars__config__"),
    "a layout without text": layout_record(simple_value=1.0),
    "a layout that is none": layout_record(tensor=TensorProto(string_val=[b"\xff\xff"])),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_our_charts_are_there_beside_an_event_file_that_cannot_be_read(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "events.out.tfevents.1.bad").write_bytes(BAD_FILES[kind])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with SummaryWriter(str(tmp_path)) as writer, merge_into(writer, OURS, Guard()):
            pass

    written = [path for path in tmp_path.glob("events*") if path.suffix != ".bad"]
    assert any(b"B_simple" in path.read_bytes() for path in written)
    assert all("an event file cannot be read" in str(warning.message) for warning in caught)


def test_folders_and_pipes_that_are_named_like_event_files_are_passed_by(tmp_path: Path) -> None:
    (tmp_path / "folder.tfevents").mkdir()
    os.mkfifo(tmp_path / "pipe.tfevents")  # opening it would wait for a writer

    with SummaryWriter(str(tmp_path)) as writer, merge_into(writer, OURS, Guard()):
        pass

    (tmp_path / "folder.tfevents").rmdir()
    (tmp_path / "pipe.tfevents").unlink()
    assert titles(tmp_path) == {"Noise scale": ["B_simple"]}


def test_a_layout_that_ours_cannot_be_merged_with_is_written_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no merging today")

    with SummaryWriter(str(tmp_path)) as writer, merge_into(writer, OURS, Guard()):
        monkeypatch.setattr(tensorboard_layout, "_merge", fails)
        with pytest.warns(UserWarning, match="no merging today"):
            writer.add_custom_scalars(THEIRS)

    assert titles(tmp_path) == {"Losses": ["both"]}


def test_a_fit_leaves_the_users_charts_and_ours(tmp_path: Path) -> None:
    class WritesLayouts(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                trainer.logger.experiment.add_custom_scalars(THEIRS)

    logger = TensorBoardLogger(tmp_path, name="", version="")

    fit(NoiseScaleMonitor(), WritesLayouts(), logger=logger)

    assert titles(tmp_path) == {
        "Losses": ["both"],
        "Noise scale": ["Noise scale now and its 95 % interval [examples]"],
        "Noise scale in detail": [
            "Noise scale now against batch size [examples]",
            "Efficiency: progress per example",
            "Signal: |G|²",
            "Noise: tr(Σ)",
        ],
    }


def test_bands_come_first_and_parameter_groups_last() -> None:
    page = charts(
        "tokens",
        0.9,
        groups=True,
        extra={"own": "A noise scale of one's own"},
        monitor="wide",
    )

    assert list(page) == ["Noise scale, wide", "Noise scale, wide in detail"]
    bands, details = page.values()
    # TensorBoard would show a band after all other charts of its category.
    assert [kind for kind, _ in bands.values()] == ["Margin", "Margin"]
    assert {kind for kind, _ in details.values()} == {"Multiline"}
    assert next(iter(bands)) == "Noise scale now and its 90 % interval [tokens]"
    assert [*details][-1] == "Noise scale now of parameter groups [tokens]"
