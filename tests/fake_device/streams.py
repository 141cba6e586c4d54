# SPDX-License-Identifier: Apache-2.0
"""Find what a stream reads or overwrites before it waited for it, by vector clocks.

Each stream of the fake device has a clock, and so has the host: how many operations of each stream
are known to be over. Recording an event keeps the clock of a stream. Waiting for the event joins
what was kept to the clock of the stream that waits. A hazard is an operation on memory that another
stream has touched later than the clock knows of. A storage is one piece of memory, whatever parts
of it are touched.

Memory that is freed goes back to the stream that it was allocated on. What that stream allocates
from then on may be the same memory, so it must have waited for the other streams that used it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fake_device.dispatched import Dispatched
from fake_device.transfers import READ, TO_DEVICE, TO_HOST, is_view, kind_of, line_of_package
from fake_device.transfers import name_of as name_of

RECORD, WAIT, RECORD_STREAM, ALLOCATE, FREE, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE = range(8)
"""As in device.cpp."""

Stream = tuple[int, int]
"""The index of a device, and the id of a stream of it."""

HOST: Stream = (-1, 0)


class Operation(NamedTuple):
    """One that was launched, or run by the host."""

    name: str
    stream: Stream
    reads: frozenset[int]
    """Addresses of memory."""
    writes: frozenset[int]
    blocks: bool
    """Whether the host waits for its stream."""
    where: str
    after: int
    """Entries of the device's log before it was over."""

    def __str__(self) -> str:
        on = "the host" if self.stream == HOST else f"stream {self.stream[1]}"
        return f"{self.name} ({self.where or 'elsewhere'}) on {on}"


class Hazard(NamedTuple):
    """Two operations on the same memory, and nothing that orders them."""

    kind: str
    """"read before written", "overwritten before read", "overwritten before written" or "reused
    while in use"."""
    earlier: str
    later: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.earlier}, then {self.later}"


class Streams(Dispatched):
    """Record what is launched on which stream, of the threads of a backward pass too.

    Example:
        with Streams() as streams:
            train()
        assert not streams.hazards()
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.entries: list[list[int]] = []
        self._of_host: set[int] = set()
        """Memory of the host that the device has to do with."""
        self._kept: list[Any] = []
        """That memory, so that no other gets its address."""

    def __enter__(self) -> Self:
        torch.ops.fake_device.set_logging(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.ops.fake_device.set_logging(False)
        self.entries = torch.ops.fake_device.log(0).tolist()

    def hazards(self) -> Counter[Hazard]:
        """How often each was found. A hazard is found where it is a matter of luck, too."""
        return Clocks(self).found

    def saw(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        name = name_of(function)
        if name == "record_stream" or is_view(function):
            return
        reads, writes = self._memory(function, args, kwargs, result)
        devices = {device for device, _ in reads | writes} - {-1}
        if not devices and not reads | writes:
            return
        stream, after = HOST, torch.ops.fake_device.log_length()
        if devices:
            device = min(devices)
            stream = (device, torch.ops.fake_device.current_stream(device))
            if function.namespace == "c10d":
                on, after = torch.ops.fake_device.last_collective()
                stream = (device, on)
        kind = kind_of(function, args, kwargs, result)
        self.operations.append(
            Operation(
                name,
                stream,
                frozenset(address for _, address in reads),
                frozenset(address for _, address in writes),
                kind in (READ, TO_HOST, TO_DEVICE),
                line_of_package(),
                after,
            )
        )

    def _memory(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """What an operation reads and writes: indices of devices, and addresses."""
        reads, writes = [], []
        schema = function._schema.arguments
        collective = function.namespace == "c10d"  # their schemas do not say what is written
        given = [*zip(schema, args, strict=False)]
        given += [
            (argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs
        ]
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            written = written or (collective and argument is schema[0])
            (writes if written else reads).extend(tree_leaves(value))
        writes.extend(tree_leaves(result))
        tensors = [tensor for tensor in (*reads, *writes) if isinstance(tensor, Tensor)]
        if any(tensor.device.type == "fake" for tensor in tensors):
            self._keep(tensors)
        return set(self._addresses(reads)), set(self._addresses(writes))

    def _keep(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._of_host:
                    self._of_host.add(storage.data_ptr())
                    self._kept.append(storage)

    def _addresses(self, values: list[Any]) -> Iterator[tuple[int, int]]:
        for value in values:
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                continue
            address = value.untyped_storage().data_ptr() if value.device.type != "meta" else 0
            if value.device.type == "fake" and address:
                yield value.device.index, address
            elif address in self._of_host:
                yield -1, address


class Clocks:
    """The clocks after all of a record, and what was found on the way."""

    def __init__(self, record: Streams) -> None:
        self.found: Counter[Hazard] = Counter()
        self.clocks: defaultdict[Stream, Counter[Stream]] = defaultdict(Counter)
        self.events: dict[int, Counter[Stream]] = {}
        self.written: dict[int, tuple[Stream, int, Operation]] = {}
        """By address: the last that wrote it."""
        self.read: defaultdict[int, dict[Stream, tuple[int, Operation]]] = defaultdict(dict)
        """By address: the last that read it on each stream since."""
        self.owners: dict[int, Stream] = {}
        self.allocated: dict[int, int] = {}
        """By address: after how many entries of the log."""
        self.freed: defaultdict[Stream, list[tuple[int, Stream, int, Operation]]]
        self.freed = defaultdict(list)
        """By owner: after how many entries, and who used it last, at which time of whose clock."""
        self.entries = 0
        self.also_used: defaultdict[int, set[Stream]] = defaultdict(set)
        """By address: streams that the allocator knows of by `record_stream`."""
        for operation in record.operations:
            for entry in record.entries[self.entries : operation.after]:
                self._enter(*entry)
            self._run(operation)
        for entry in record.entries[self.entries :]:
            self._enter(*entry)

    def _enter(self, kind: int, what: int, device: int, stream_id: int) -> None:
        stream = (device, stream_id)
        self.entries += 1
        if kind == RECORD:
            self.events[what] = Counter(self.clocks[stream])
        elif kind == WAIT:
            self.clocks[stream] |= self.events.get(what, Counter())
        elif kind == RECORD_STREAM:
            self.also_used[what].add(stream)
        elif kind == ALLOCATE:
            self._forget(what)
            self.owners[what], self.allocated[what] = stream, self.entries
        elif kind == FREE:
            self._free(what)
        elif kind == SYNC_STREAM:
            self.clocks[HOST] |= self.clocks[stream]
        elif kind == SYNC_EVENT:
            self.clocks[HOST] |= self.events.get(what, Counter())
        elif kind == SYNC_DEVICE:
            for other in [s for s in self.clocks if s[0] == device]:
                self.clocks[HOST] |= self.clocks[other]

    def _knows(self, stream: Stream, other: Stream, time: int) -> bool:
        return stream == other or self.clocks[stream][other] >= time

    def _check(
        self, kind: str, other: Stream, time: int, earlier: Operation, later: Operation
    ) -> None:
        if not self._knows(later.stream, other, time):
            self.found[Hazard(kind, str(earlier), str(later))] += 1

    def _run(self, operation: Operation) -> None:
        stream = operation.stream
        if stream != HOST:
            self.clocks[stream] |= self.clocks[HOST]  # it was launched by then
        self._reuse(operation)
        self.clocks[stream][stream] += 1
        now = self.clocks[stream][stream]
        for address in operation.reads | operation.writes:
            if address in self.written:
                writer, time, earlier = self.written[address]
                reads = address in operation.reads
                kind = "read before written" if reads else "overwritten before written"
                self._check(kind, writer, time, earlier, operation)
        for address in operation.writes:
            for reader, (time, earlier) in self.read.pop(address, {}).items():
                self._check("overwritten before read", reader, time, earlier, operation)
            self.written[address] = stream, now, operation
        for address in operation.reads:
            self.read[address][stream] = now, operation
        if operation.blocks:
            self.clocks[HOST] |= self.clocks[stream]

    def _reuse(self, operation: Operation) -> None:
        """Of memory that it writes its stream may have had some before, and freed."""
        owner = operation.stream
        allocated = [self.allocated[a] for a in operation.writes if self.owners.get(a) == owner]
        unknown = [one for one in self.freed[owner] if not self._knows(owner, *one[1:3])]
        self.freed[owner] = unknown
        for freed, _, _, earlier in unknown:
            if allocated and max(allocated) > freed:
                self.found[Hazard("reused while in use", str(earlier), str(operation))] += 1

    def _free(self, address: int) -> None:
        """Its owner may have it anew from now on, but for what `record_stream` was said of."""
        owner = self.owners.get(address)
        users = dict(self.read.get(address, {}))
        if address in self.written:
            stream, time, operation = self.written[address]
            users.setdefault(stream, (time, operation))
        for stream, (time, operation) in users.items():
            if owner is not None and stream not in self.also_used[address]:
                self.freed[owner].append((self.entries, stream, time, operation))
        self._forget(address)

    def _forget(self, address: int) -> None:
        for known in (self.written, self.read, self.owners, self.also_used):
            known.pop(address, None)  # type: ignore[attr-defined]
