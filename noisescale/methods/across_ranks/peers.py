# SPDX-License-Identifier: Apache-2.0
"""Tensors sent from one rank of a process group to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from noisescale.checks import refuse


class Message(NamedTuple):
    """Tensors for ranks of a group, and room for those of ranks of the group."""

    sent: Sequence[tuple[Tensor, int]]
    received: Sequence[tuple[Tensor, int]]


class Peers:
    """The ranks of a process group, by their place in the group.

    Args:
        group: Any process group that this process is in; None: all processes.

    Raises:
        RuntimeError: If no process group was made.
        ValueError: If this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "No process group was made, so there are no ranks to combine. Call"
                " `torch.distributed.init_process_group` first, or start with torchrun."
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            remedy = "Call this on the ranks of the group alone."
            refuse(
                "group", "contain this process", f"a group without rank {dist.get_rank()}", remedy
            )

    def swap(self, sent: Tensor, received: Tensor, peer: int) -> None:
        """Send one tensor to a rank of the group and receive one from it, both without gaps.

        Either may be empty if the other rank knows that.
        """
        self._exchange(Message([(sent, peer)], [(received, peer)]))

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor to a rank of the group."""
        self._exchange(Message([(tensor, peer)], []))

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Receive a tensor from a rank of the group, in place."""
        self._exchange(Message([], [(tensor, peer)]))

    def stream(self, messages: Iterable[Message], under_way: int) -> Iterator[Message]:
        """Send and receive messages in turn, and yield each when all of it has arrived.

        Between two ranks tensors arrive in the order in which they are sent.

        Args:
            messages: The tensors of a message are in use until it is yielded.
            under_way: How many messages are on their way at once.
        """
        started: deque[tuple[Message, list[dist.Work]]] = deque()
        for message in messages:
            if len(started) == under_way:
                yield _wait_for_first(started)
            started.append((message, self._start(message)))
        while started:
            yield _wait_for_first(started)

    def _exchange(self, message: Message) -> None:
        for work in self._start(message):
            work.wait()

    def _start(self, message: Message) -> list[dist.Work]:
        ops = [
            dist.P2POp(op, tensor, group=self.group, group_peer=peer)
            for op, some in ((dist.irecv, message.received), (dist.isend, message.sent))
            for tensor, peer in some
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(ops) if ops else []


def _wait_for_first(started: deque[tuple[Message, list[dist.Work]]]) -> Message:
    message, works = started.popleft()
    for work in works:
        work.wait()
    return message
