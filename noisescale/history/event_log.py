# SPDX-License-Identifier: Apache-2.0
"""The metrics of a run in TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from noisescale.extras import need
from noisescale.history.log import Metric
from noisescale.printable import printable
from noisescale.refusal import Refusal

HYPERPARAMETERS = "_hparams_/"
"""The beginning of the tags of TensorBoard's page of hyperparameters."""

_HEAD_AND_TAIL = 8 + 4 + 4
"""Bytes of an event's length and of the two checksums."""


class EventLog:
    """The event files of a run, in order. A resumed run adds a file.

    A file may end within an event, as that of a run that was killed or still trains.

    Args:
        path: The run, for errors.
        files: Its files.

    Raises:
        MissingExtraError: If TensorBoard is not installed.
        Refusal: If a file is damaged.
        OSError: If a file cannot be read.
    """

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        need("tensorboard", f"Reading the event files of {printable(path)}")
        self.hyperparameters: dict[str, float | str | bool] = {}
        """The hyperparameters that were logged for TensorBoard's page of them."""
        self._rows: dict[str, list[tuple[float, float, float]]] = {}
        before = 0.0
        for file in files:
            began, so_far = None, 0.0
            for event in events_in(file):
                began = event.wall_time if began is None else began
                so_far = event.wall_time - began
                for value in event.summary.value:
                    self._add(value, float(event.step), before + so_far)
            before += max(0.0, so_far)

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        return list(self._rows)

    def metric(self, name: str) -> Metric:
        """Return a metric. It is empty if it was not logged."""
        return Metric.of(self._rows.get(name, []))

    def _add(self, value: Any, step: float, seconds: float) -> None:
        if value.tag.startswith(HYPERPARAMETERS):
            self.hyperparameters.update(_hyperparameters(value))
        elif (number := _number_in(value)) is not None:
            self._rows.setdefault(value.tag, []).append((step, number, seconds))


def events_in(file: Path) -> Iterator[Any]:
    """Yield the events of a file, by TensorBoard's reader.

    TensorBoard itself stops at a damaged event without a word.

    Raises:
        Refusal: If an event is damaged. One that ends too early is left out.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader, whole, end = PyRecordReader_New(str(file)), 0, 0
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return
        except DataLossError as error:
            if "truncated" in str(error) or not any(file.read_bytes()[end:]):  # of a killed run
                return
            raise Refusal(
                printable(file),
                "have whole events",
                f"a damaged one after {whole:,} events",
                "What follows it cannot be read: copy the file again, or leave it out.",
            ) from None
        record = reader.record()
        whole, end = whole + 1, end + _HEAD_AND_TAIL + len(record)
        yield Event.FromString(record)


def _hyperparameters(value: Any) -> Iterator[tuple[str, float | str | bool]]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logged = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for name, each in logged.session_start_info.hparams.items():
        if (kind := each.WhichOneof("kind")) in ("number_value", "string_value", "bool_value"):
            yield name, getattr(each, kind)


def _number_in(value: Any) -> float | None:
    """Return the number of a value; None if it is something else than a scalar."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = make_ndarray(value.tensor)
    return float(tensor.item()) if tensor.size == 1 and tensor.dtype.kind in "fiu" else None
