# SPDX-License-Identifier: Apache-2.0
"""The charts of the noise scale on TensorBoard's Custom Scalars page, beside the user's own charts.

A run has one layout: if several are written, the last one counts. So a layout that is already in
the run is read and merged. A layout that the user writes during the fit is merged when it is
written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import custom_scalars

from noisescale.guard import Guard
from noisescale.history.metric_names import prefix_of
from noisescale.meter.meter import Meter
from noisescale.meter.options import MeterOptions

# Layouts are written when a run starts. Further into old event files we do not look for one.
_RECORDS_SEARCHED = 10_000

_USERS_WAYS_TO_WRITE_ONE = (
    "add_custom_scalars",
    "add_custom_scalars_marginchart",
    "add_custom_scalars_multilinechart",
)


def charts(
    unit: str,
    confidence: float,
    *,
    groups: bool = False,
    levels: bool = False,
    extra: Mapping[str, str] | None = None,
    monitor: str | None = None,
    before: str = "",
) -> dict[str, Any]:
    """Return the monitor's part of the Custom Scalars page. Multiline tags are patterns.

    Args:
        unit: The unit of the noise scale.
        confidence: Coverage of its interval.
        groups: Whether there is a chart with all parameter groups.
        levels: Whether there are charts of the noise between and within groups of rows.
        extra: Titles of the charts of extra noise scales, by name.
        monitor: The monitor's name, if it has one. Its charts are then in their own categories.
        before: What the host writes before each key: "train/".
    """
    prefix = before + prefix_of(0, monitor)
    interval = f"its {confidence * 100:g} % interval [{unit}]"

    def band(name: str) -> list[Any]:
        return ["Margin", [f"{prefix}{name}{end}" for end in ("", "_low", "_high")]]

    def lines(*patterns: str) -> list[Any]:
        return ["Multiline", [f"^{re.escape(prefix)}{pattern}" for pattern in patterns]]

    bands = {f"Noise scale now and {interval}": band("simple")}
    bands |= {f"{title} and {interval}": band(name) for name, title in (extra or {}).items()}
    if levels:
        of = f"its {confidence * 100:g} % interval"
        bands[f"Noise scale between groups of rows and {of} [groups]"] = band("between")
        bands[f"Noise scale within groups of rows and {of} [rows]"] = band("within")
    details = {
        f"Noise scale now against batch size [{unit}]": lines("simple$", "batch_size$"),
        "Efficiency: progress per example": lines("efficiency$"),
        "Signal: |G|²": lines("grad_sq_norm$"),
        "Noise: tr(Σ)": lines("noise_trace$"),
    }
    if groups:
        details[f"Noise scale now of parameter groups [{unit}]"] = lines("group/", "simple$")
    title = f"Noise scale, {monitor}" if monitor else "Noise scale"
    # In a category TensorBoard shows charts with a band after all others (2.21).
    return {title: bands, f"{title} in detail": details}


def batch_size_charts(metrics: Iterable[str]) -> dict[str, Any]:
    """Return the scheduler's part of the page, for the keys of a policy, `Policy.metrics`."""
    found = {
        "Batch size: planned and given": [
            "Multiline",
            ["^batch_size/planned$", "^batch_size/given$"],
        ]
    }
    if "best" in metrics:
        band = [f"batch_size/best{end}" for end in ("", "_low", "_high")]
        found["Best batch size for this budget, with its band"] = ["Margin", band]
    return {"Batch size": found}


def add_charts(
    writer: SummaryWriter,
    meters: Sequence[Meter],
    options: MeterOptions,
    guard: Guard,
    **named: Any,
) -> ExitStack:
    """Add the charts of what meters measure to the layout of a run, see `merge_into`.

    Args:
        writer: The run's writer.
        meters: At least one.
        options: Theirs.
        guard: As of `merge_into`.
        named: `levels`, `monitor` and `before` of `charts`.
    """
    groups = any(meter.group_noise_scales for meter in meters)
    extra = {one.name: one.title for one in meters[0].extra if one.title}
    page = charts(options.unit, options.confidence, groups=groups, extra=extra, **named)
    return merge_into(writer, page, guard)


def merge_into(writer: SummaryWriter, page: dict[str, Any], guard: Guard) -> ExitStack:
    """Add charts to the layout of a run, now and whenever the user writes another layout.

    Args:
        writer: The run's writer.
        page: The charts, in the form for `SummaryWriter.add_custom_scalars`.
        guard: If the charts cannot be merged, it warns, and the user's layout stays as it is.

    Returns:
        A context. Until it is closed, layouts that the user writes are merged.
    """
    ours = _layout_in(custom_scalars(page))
    writer._get_file_writer().add_summary(_summary_of(_merge(_on_disk(writer, guard), ours)))
    stack = ExitStack()
    for name in _USERS_WAYS_TO_WRITE_ONE:
        stack.enter_context(_merging(writer, name, ours, guard))
    return stack


@contextmanager
def _merging(
    writer: SummaryWriter, name: str, ours: layout_pb2.Layout, guard: Guard
) -> Iterator[None]:
    """While active, the writer's method `name` writes its layout merged with `ours`."""
    original = getattr(writer, name)

    def write_merged(*args: Any, **kwargs: Any) -> None:
        file_writer = writer._get_file_writer()
        written: list[Summary] = []
        file_writer.add_summary = lambda summary, *_: written.append(summary)
        try:
            original(*args, **kwargs)
        finally:
            del file_writer.add_summary
        summary = written[-1]
        with guard("The charts of the noise scale were not added to your layout"):
            summary = _summary_of(_merge(_layout_in(summary), ours))
        file_writer.add_summary(summary)

    setattr(writer, name, write_merged)
    try:
        yield
    finally:
        if getattr(writer, name) is write_merged:
            delattr(writer, name)


def _on_disk(writer: SummaryWriter, guard: Guard) -> layout_pb2.Layout:
    """Return the present layout of the writer's run; empty if there is none."""
    writer.flush()
    layout = layout_pb2.Layout()
    for path in sorted(Path(writer.log_dir).glob("*tfevents*")):
        if not path.is_file():  # opening a pipe would wait for ever
            continue
        with guard("The charts in an event file cannot be read and are lost"):
            for record in islice(RawEventFileLoader(str(path)).Load(), _RECORDS_SEARCHED):
                if metadata.CONFIG_SUMMARY_TAG.encode() in record:
                    layout = _layout_in(Event.FromString(record).summary)
    return layout


def _layout_in(summary: Summary) -> layout_pb2.Layout:
    for value in summary.value:
        if value.tag == metadata.CONFIG_SUMMARY_TAG:
            return layout_pb2.Layout.FromString(value.tensor.string_val[0])
    return layout_pb2.Layout()


def _merge(theirs: layout_pb2.Layout, ours: layout_pb2.Layout) -> layout_pb2.Layout:
    """Return their categories and charts, then ours. Of two charts with one title, ours stays."""
    merged = layout_pb2.Layout()
    merged.CopyFrom(theirs)
    for category in ours.category:
        there = next((c for c in merged.category if c.title == category.title), None)
        if there is None:
            merged.category.add().CopyFrom(category)
            continue
        our_titles = {chart.title for chart in category.chart}
        kept = [chart for chart in there.chart if chart.title not in our_titles]
        del there.chart[:]
        there.chart.extend([*kept, *category.chart])
    return merged


def _summary_of(layout: layout_pb2.Layout) -> Summary:
    summary: Summary = custom_scalars({})
    summary.value[0].tensor.string_val[0] = layout.SerializeToString()
    return summary
