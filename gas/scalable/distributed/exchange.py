"""Exchange of rows of histories with the ranks that hold replicas of them.

In the beginning, every rank sends the owners a list of the rows that it needs. After a step, a rank
sends the rows of its batch to each rank with replicas of them, those of all layers in one message.
It names ranges of the receiver's list, so that ranks may process their batches in any order. Each
row of a layer is sent once per epoch to each receiver, besides some bytes for each range.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gas.scalable.distributed.group import Group, RankError

if TYPE_CHECKING:
    from gas.graph import Shard
    from gas.history import Codec, History
    from gas.native import BufferPool

STEP, LAYER = 0, 1  # Kinds of messages: of a batch, or of one layer of all nodes.
KINDS = ("step", "layer-wise inference, layer")
ALIGNMENT = 16
RANGE_BYTES = 16
Range = tuple[int, int]  # First and number.


class _Header(NamedTuple):
    """Announcement of a message to another rank."""

    num_rows: int
    num_ranges: int
    kind: int
    number: int
    weight: int  # The bits of a float64.
    views: int


HEADER_BYTES = 8 * len(_Header._fields)


@dataclass
class _Message:
    """Message in transit, of step ``number``."""

    number: int
    work: dist.Work | None  # None: it has come.
    sent: Tensor
    headers: Sequence[_Header]
    received: Tensor
    histories: Sequence[History]
    pushes: Sequence[int]


class Exchange:
    """Publish rows of histories to the ranks that hold replicas, and receive theirs.

    Every rank has to call :meth:`begin` and :meth:`end` in turn, and :meth:`exchange_layer`, as
    often as the others.

    Args:
        group: The ranks.
        shard: What this rank owns, and whose replicas it has; ``None`` if each has every row.
        overlap: Let messages take until the next step has ended: their rows are seen one step
            later.
        codec: Precision of rows in messages; ``None`` for that of each history.
        pool: Provides the memory of messages.
    """

    def __init__(
        self,
        group: Group,
        shard: Shard | None,
        overlap: bool,
        codec: Codec | None,
        pool: BufferPool,
    ) -> None:
        self.group, self.shard, self.overlap, self.codec = group, shard, overlap, codec
        self.steps = 0
        self.sent_bytes = [0, 0]
        """Bytes of all messages so far, of steps and of layers, headers included."""
        self.weight, self.weights = 0.0, 0.0
        """What the step's batch counts for the gradient, and those of all ranks."""
        self._begun: tuple[list[list[Range]], Tensor, Tensor, dist.Work] | None = None
        self._failed = False
        self._pool = pool
        self._arriving: deque[_Message] = deque()
        self._asked: list[Tensor] | None = None if shard is None else self._request_rows(shard)

    def _request_rows(self, shard: Shard) -> list[Tensor]:
        """Tell the owners which rows to send; return the own rows that each rank has asked for."""
        group, ptr = self.group, shard.replica_ptr.tolist()
        wanted = [
            shard.replicas[begin:end] - int(shard.bounds[owner])
            for owner, (begin, end) in enumerate(itertools.pairwise(ptr))
        ]
        sizes = [rows.numel() for rows in wanted]
        counts = torch.empty(group.size, dtype=torch.long)
        ones = [1] * group.size
        what = "asking for replicas"
        group.wait(group.start_all_to_all(counts, torch.tensor(sizes), ones, ones), what)
        asked = torch.empty(int(counts.sum()), dtype=torch.long)
        work = group.start_all_to_all(asked, torch.cat(wanted), counts.tolist(), sizes)
        group.wait(work, what)
        return list(asked.split(counts.tolist()))

    # Publishing -----------------------------------------------------------------------------------

    def begin(self, ranges: Sequence[Range], weight: float, views: int = 0) -> None:
        """Begin a step: receive the rows of earlier steps, and announce the rows to send.

        Args:
            ranges: The batch's own rows, as ranges.
            weight: What the batch counts for the gradient.
            views: Tells which views the batch has, if any. (default: ``0``)

        Raises:
            RankError: If the ranks can't go on together.
        """
        if self._failed or self._begun is not None:
            raise RankError(
                f"rank {self.group.rank} has left step {self.steps} in the middle, by an error, "
                "and the others wait for its rows: end the program, and start all ranks again from "
                "their newest checkpoint"
            )
        self.receive_messages(int(self.overlap))
        self.steps += 1
        self.group.report(self.steps)
        self._send_headers(ranges, STEP, self.steps, weight, views)

    def _send_headers(
        self, ranges: Sequence[Range], kind: int, number: int, weight: float = 0.0, views: int = 0
    ) -> None:
        """Announce to every rank the rows that a step, or a layer, will send."""
        listed = [self._find_ranges(rank, ranges) for rank in range(self.group.size)]
        about = kind, number, *struct.unpack("<q", struct.pack("<d", weight)), views
        headers = torch.tensor([[sum(n for _, n in found), len(found), *about] for found in listed])
        received = torch.empty_like(headers)
        ones = [1] * self.group.size
        work = self.group.start_all_to_all(received, headers, ones, ones)
        self.sent_bytes[kind] += (self.group.size - 1) * headers[0].nbytes
        self.weight = weight
        self._begun = listed, headers, received, work

    def _find_ranges(self, rank: int, ranges: Sequence[Range]) -> list[Range]:
        """Return the ranges of a rank's list that are among some rows."""
        if rank == self.group.rank:
            return []
        found: list[Range] = []
        if self._asked is None:
            places = [(first, first + size) for first, size in ranges]
        else:
            ends = torch.tensor(ranges, dtype=torch.long).view(-1, 2)
            ends[:, 1] += ends[:, 0]
            places = torch.searchsorted(self._asked[rank], ends).tolist()
        for begin, end in places:
            if found and sum(found[-1]) == begin:
                found[-1] = (found[-1][0], found[-1][1] + end - begin)
            elif begin < end:
                found.append((begin, end - begin))
        return found

    def end(self, histories: Sequence[History]) -> None:
        """Send the rows of the step, which have been pushed.

        Raises:
            RankError: If the ranks can't go on together.
        """
        assert self._begun is not None
        (listed, headers, received, work), self._begun = self._begun, None
        _, _, kind, number, _, views = headers[0].tolist()
        what = f"agreeing on {KINDS[kind]} {number}"
        sent, sizes = self._pack(listed, histories)
        self.group.wait(work, what)
        found = [_Header(*row) for row in received.tolist()]
        self._check(found, kind, number, views)
        self.weights = sum(struct.unpack("<d", struct.pack("<q", h.weight))[0] for h in found)
        out_sizes = self._sizes_of(found, histories)
        out = self._pool.allocate(sum(out_sizes), 1, torch.uint8).view(-1)
        work = self.group.start_all_to_all(out, sent, out_sizes, sizes)
        self.sent_bytes[kind] += sent.numel()
        pushes = [history.num_pushes for history in histories]
        self._arriving.append(_Message(number, work, sent, found, out, histories, pushes))

    def fail(self) -> None:
        """Record that the step has failed between :meth:`begin` and :meth:`end`."""
        self._failed = True

    def exchange_layer(self, history: History, number: int) -> None:
        """Send all own rows of one layer that others hold, and receive theirs.

        Args:
            history: The history of the layer.
            number: The layer.

        Raises:
            RankError: If the ranks can't go on together.
        """
        self.receive_messages()
        size = history.num_embeddings if self.shard is None else self.shard.num_own
        self._send_headers([(0, size)], LAYER, number)
        self.end([history])
        self.receive_messages()

    def _check(self, found: Sequence[_Header], kind: int, number: int, views: int) -> None:
        for rank, header in enumerate(found):
            if (header.kind, header.number) != (kind, number):
                raise RankError(
                    f"rank {rank} is at {KINDS[header.kind]} {header.number}, but rank "
                    f"{self.group.rank} at {KINDS[kind]} {number}: all ranks have to call the "
                    "model equally often, with as many mini-batches each"
                )
            if header.views != views:
                raise RankError(
                    f"rank {rank} has other views of the graph than rank {self.group.rank}: give "
                    "the augmentation random numbers of its own, alike on all ranks, such as "
                    "generator=torch.Generator().manual_seed(0)"
                )

    def _pack(
        self, listed: Sequence[list[Range]], histories: Sequence[History]
    ) -> tuple[Tensor, list[int]]:
        """Return the messages to all ranks, one after the other, and their sizes in bytes."""
        row_bytes = [self._row_bytes(history) for history in histories]
        numbers = [sum(size for _, size in ranges) for ranges in listed]
        sizes = [
            _pad(len(ranges) * RANGE_BYTES + number * sum(row_bytes))
            for ranges, number in zip(listed, numbers, strict=True)
        ]
        sent = self._pool.allocate(sum(sizes), 1, torch.uint8).view(-1)
        for rank, (message, number) in enumerate(zip(sent.split(sizes), numbers, strict=True)):
            if not number:
                continue
            ranges = torch.tensor(listed[rank])
            place = ranges.nbytes
            message[:place] = ranges.view(-1).view(torch.uint8)
            index = self._rows_of(rank, listed[rank])
            for history, size in zip(histories, row_bytes, strict=True):
                self._read(history, index, message[place : place + number * size])
                place += number * size
        return sent, sizes

    def _rows_of(self, rank: int, ranges: Sequence[Range]) -> Tensor:
        """Return the own rows at some ranges of a rank's list."""
        if self._asked is None:
            return torch.cat([torch.arange(first, first + size) for first, size in ranges])
        return torch.cat([self._asked[rank][first : first + size] for first, size in ranges])

    def _row_bytes(self, history: History) -> int:
        return (self.codec or history.codec).row_bytes(history.embedding_dim)

    def _read(self, history: History, index: Tensor, out: Tensor) -> None:
        """Write rows in their encoding for messages into the bytes of a message."""
        codec = self.codec or history.codec
        width = codec.columns(history.embedding_dim)
        out = out.view(codec.dtype).view(-1, width)
        if codec == history.codec:
            history.read_stored(index, out)
            return
        out.copy_(codec.encode(history.pull(index)))

    # Taking in ------------------------------------------------------------------------------------

    def receive_messages(self, leave: int = 0) -> None:
        """Receive messages, the oldest first.

        Args:
            leave: How many may stay on their way. (default: ``0``)

        Raises:
            RankError: If a rank has gone, or doesn't come in time.
        """
        while len(self._arriving) > leave:
            message = self._arriving.popleft()
            self._wait_for(message)
            sizes = self._sizes_of(message.headers, message.histories)
            for rank, received in enumerate(message.received.split(sizes)):
                if message.headers[rank].num_ranges:
                    self._unpack(rank, message, received)

    def _wait_for(self, message: _Message) -> None:
        if message.work is not None:
            self.group.wait(message.work, f"the exchange of rows of step {message.number}")
            message.work = None

    def _sizes_of(self, headers: Sequence[_Header], histories: Sequence[History]) -> list[int]:
        """Return the bytes that each rank sends."""
        row_bytes = sum(self._row_bytes(history) for history in histories)
        return [_pad(h.num_ranges * RANGE_BYTES + h.num_rows * row_bytes) for h in headers]

    def _replicas_of(self, rank: int, num_rows: int) -> Range:
        """Return the rows of a history that a rank sends."""
        if self.shard is None:
            return 0, num_rows
        first, last = self.shard.replica_ptr[rank : rank + 2].tolist()
        return self.shard.num_own + first, last - first

    def _unpack(self, rank: int, message: _Message, received: Tensor) -> None:
        header = message.headers[rank]
        base, _ = self._replicas_of(rank, 0)
        place = header.num_ranges * RANGE_BYTES
        ranges = [
            (base + first, size)
            for first, size in received[:place].view(torch.int64).view(-1, 2).tolist()
        ]
        for history, pushes in zip(message.histories, message.pushes, strict=True):
            codec = self.codec or history.codec
            size = header.num_rows * codec.row_bytes(history.embedding_dim)
            rows = received[place : place + size].view(codec.dtype)
            place += size
            rows = rows.view(-1, codec.columns(history.embedding_dim))
            if codec != history.codec:
                rows = codec.decode(rows, history.embedding_dim)
            history.receive(rows, ranges, pushes, is_stored=codec == history.codec)

    # In checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`: the message that the next step doesn't read yet.

        What it would read is taken in now, which changes nothing.

        Raises:
            RankError: If a rank has gone, or doesn't come in time.
        """
        self.receive_messages(int(self.overlap))
        for message in self._arriving:
            self._wait_for(message)
        arriving = [
            {
                "number": message.number,
                "sizes": [[header.num_rows, header.num_ranges] for header in message.headers],
                "received": message.received,
                "pushes": list(message.pushes),
            }
            for message in self._arriving
        ]
        return {"arriving": arriving}

    def restore(self, state: Mapping[str, Any], histories: Sequence[History]) -> None:
        """Continue from a state, whose messages are in transit again.

        Args:
            state: From :meth:`state_dict`, of the same rank of as many, with the same graph.
            histories: What the messages are for.

        Raises:
            ValueError: If no such exchange has had the state; nothing has changed then.
        """
        try:
            arriving = deque(self._message(found, histories) for found in state["arriving"])
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise ValueError(str(error)) from error  # A state of another form.
        self.receive_messages()  # Messages in transit belong to another training.
        self._arriving = arriving

    def _message(self, state: Mapping[str, Any], histories: Sequence[History]) -> _Message:
        """Return a received message, after checking that its sender may send these rows."""
        number, received = int(state["number"]), state["received"]
        headers = [
            _Header(int(num_rows), int(num_ranges), STEP, number, 0, 0)
            for num_rows, num_ranges in state["sizes"]
        ]
        pushes = [int(pushes) for pushes in state["pushes"]]
        message = _Message(number, None, received[:0], headers, received, histories, pushes)
        sizes = self._sizes_of(headers, histories)
        fits = len(headers) == self.group.size and len(pushes) == len(histories)
        fits = fits and min(map(min, headers)) >= 0 and sum(sizes) == received.numel()
        if fits and received.dtype == torch.uint8:
            num_rows = histories[0].num_embeddings if histories else 0
            for rank, (header, sent) in enumerate(zip(headers, received.split(sizes), strict=True)):
                ranges = sent[: header.num_ranges * RANGE_BYTES].view(torch.int64).view(-1, 2)
                first, size = ranges.unbind(1)
                most = self._replicas_of(rank, num_rows)[1]
                known = (first >= 0) & (size >= 0) & (first <= most) & (size <= most - first)
                fits = fits and bool(known.all()) and int(size.sum()) == header.num_rows
            if fits:
                return message
        raise ValueError("what was on its way to this rank isn't what others send to it")

    def lower_bound(self, histories: Sequence[History]) -> int:
        """Return the least bytes to send in an epoch: each row once to each rank that holds it."""
        if self._asked is None:
            rows = (self.group.size - 1) * histories[0].num_embeddings if histories else 0
        else:
            rows = sum(rows.numel() for rows in self._asked)
        return rows * sum(self._row_bytes(history) for history in histories)


def _pad(num_bytes: int) -> int:
    """Round a number of bytes up to the alignment of messages."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
