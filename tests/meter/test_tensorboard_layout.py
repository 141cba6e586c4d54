# SPDX-License-Identifier: Apache-2.0
"""The Custom Scalars page as TensorBoard's own plugin reads it back."""

import os
import struct
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from fits import fit_here, heard
from lightning.pytorch.loggers import TensorBoardLogger

from noisescale import NoiseScaleMonitor
from noisescale.guard import Guard
from noisescale.meter import tensorboard_layout
from noisescale.meter.tensorboard_layout import batch_size_charts, charts, merge_into

OURS = {"Noise scale": {"B_simple": ["Margin", ["value", "low", "high"]]}}
THEIRS = {"Losses": {"both": ["Multiline", ["train/loss", "val/loss"]]}}


def titles(folder: Path) -> dict[str, list[str]]:
    """Category -> charts of the layout that counts: the last one of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    events = EventAccumulator(str(folder)).Reload()
    last = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(last)
    return {category.title: [c.title for c in category.chart] for category in layout.category}


def writing_to(folder: Path, **options: Any) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), **options)


def merge(writer: Any) -> None:
    with merge_into(writer, OURS, Guard()):
        pass


BOTH = {"Losses": ["both"], "Noise scale": ["B_simple"]}


def test_a_layout_written_before_is_kept(tmp_path: Path) -> None:
    """Also that of an earlier writer of the run."""
    with writing_to(tmp_path) as writer:
        writer.add_custom_scalars(THEIRS)
        merge(writer)

    assert titles(tmp_path) == BOTH
    with writing_to(tmp_path, filename_suffix=".resumed") as writer:
        merge(writer)
        merge(writer)
    assert titles(tmp_path) == BOTH


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
    with writing_to(tmp_path) as writer:
        before = dict(vars(writer))
        with merge_into(writer, OURS, Guard()):
            assert vars(writer) != before
            getattr(writer, method)(*arguments)
        assert vars(writer) == before

    assert titles(tmp_path) == BOTH


def test_a_category_of_the_same_name_has_both_charts(tmp_path: Path) -> None:
    theirs = {"Noise scale": {"mine": ["Multiline", ["a"]], "B_simple": ["Multiline", ["old"]]}}
    with writing_to(tmp_path) as writer:
        writer.add_custom_scalars(theirs)
        merge(writer)

    assert titles(tmp_path) == {"Noise scale": ["mine", "B_simple"]}


def bad_files() -> list[bytes]:
    """Whose records have the right checksums."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    def record(data: bytes) -> bytes:
        header = struct.pack("<Q", len(data))
        crcs = [struct.pack("<I", masked_crc32c(part)) for part in (header, data)]
        return header + crcs[0] + data + crcs[1]

    def layout(**value: Any) -> bytes:
        summary = Summary(value=[Summary.Value(tag="custom_scalars__config__", **value)])
        return record(Event(summary=summary).SerializeToString())

    return [
        b"not an event file at all",
        b"",
        struct.pack("<Q", 2**62) + bytes(12),  # a record of 2**62 bytes
        layout(tensor=TensorProto(string_val=[b""]))[:-20],  # cut off
        record(b"\xff" * 8 + b"custom_scalars__config__"),  # no event
        layout(simple_value=1.0),  # without text
        layout(tensor=TensorProto(string_val=[b"\xff\xff"])),
    ]


@pytest.mark.parametrize("number", range(7))
def test_our_charts_are_there_beside_an_event_file_that_cannot_be_read(
    number: int, tmp_path: Path
) -> None:
    (tmp_path / "events.out.tfevents.1.bad").write_bytes(bad_files()[number])
    with heard() as told, writing_to(tmp_path) as writer:
        merge(writer)

    written = [path for path in tmp_path.glob("events*") if path.suffix != ".bad"]
    assert any(b"B_simple" in path.read_bytes() for path in written)
    assert all("cannot be read" in one for one in told)


def test_folders_and_pipes_that_are_named_like_event_files_are_passed_by(tmp_path: Path) -> None:
    (tmp_path / "folder.tfevents").mkdir()
    os.mkfifo(tmp_path / "pipe.tfevents")  # opening it would wait for a writer

    with writing_to(tmp_path) as writer:
        merge(writer)

    (tmp_path / "folder.tfevents").rmdir()
    (tmp_path / "pipe.tfevents").unlink()
    assert titles(tmp_path) == {"Noise scale": ["B_simple"]}


def test_a_layout_that_ours_cannot_be_merged_with_is_written_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no merging today")

    with writing_to(tmp_path) as writer, merge_into(writer, OURS, Guard()):
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

    fit_here(NoiseScaleMonitor(), WritesLayouts(), logger=logger)

    found = titles(tmp_path)
    assert list(found) == ["Losses", "Noise scale", "Noise scale in detail"]
    assert [len(of_category) for of_category in found.values()] == [1, 1, 4]


def test_bands_come_first_and_parameter_groups_last() -> None:
    page = charts("tokens", 0.9, groups=True, extra={"own": "One's own"}, monitor="wide")

    assert list(page) == ["Noise scale, wide", "Noise scale, wide in detail"]
    bands, details = page.values()
    # TensorBoard would show a band after all other charts of its category.
    assert [kind for kind, _ in bands.values()] == ["Margin", "Margin"]
    assert {kind for kind, _ in details.values()} == {"Multiline"}
    assert "90 %" in next(iter(bands))
    assert "groups" in [*details][-1]
    assert all("[tokens]" in one for one in (next(iter(bands)), [*details][-1]))


def test_the_levels_of_groups_of_rows_have_bands() -> None:
    page = charts("completions", 0.95, levels=True, before="train/")

    tags = [chart[1] for title, chart in page["Noise scale"].items() if "groups of rows" in title]
    ends = ("", "_low", "_high")
    assert tags == [
        [f"train/noise_scale/{name}{end}" for end in ends] for name in ("between", "within")
    ]


def test_the_scheduler_has_a_chart_of_what_its_policy_estimates() -> None:
    (plain,), (with_band,) = (
        batch_size_charts(logged).values() for logged in ((), ("best", "best_low", "best_high"))
    )

    assert len(plain) == 1
    assert [*with_band.values()][1] == [
        "Margin",
        ["batch_size/best", "batch_size/best_low", "batch_size/best_high"],
    ]
