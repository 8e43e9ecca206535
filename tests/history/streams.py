"""A device of the imagination: the CPU, with streams and events that keep account of an order.

Operators run at once, in the order in which they are submitted. What a device guarantees is less:
of two operators one comes before the other only if they are on one stream, or events say so. Each
stream has a vector clock (Fidge, 1988; Mattern, 1989): how much of every stream comes before what
is submitted next. Two accesses to the same memory, one of which writes, are a race unless the clock
of the second knows of the first. So one run shows that *every* run has its results.
"""

import contextlib
from collections import defaultdict
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gas.history.store import MemoryStore

# Row ids are the host's until they are sent to the device.
OF_IDS = (torch.ops.aten._to_copy, torch.ops.aten.arange, torch.ops.aten.cat)


class Stream:
    """A stream, or the host."""

    def __init__(self, machine, name):
        self.machine, self.name = machine, name
        self.clock = defaultdict(int)

    def join(self, clock):
        for name, time in clock.items():
            self.clock[name] = max(self.clock[name], time)

    def record_event(self):
        event = self.machine.event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.join(event.clock)

    def wait_stream(self, other):
        self.join(other.clock)

    def synchronize(self):
        self.machine.host.join(self.clock)


class Memory(NamedTuple):
    """Uses of a piece of memory: its last write and the reads since, by stream and time."""

    tensor: torch.Tensor  # So that its address isn't another's.
    owner: str | None  # The stream it was allocated for, if that is known.
    written: dict[str, int]
    read: dict[str, int]
    users: set[str]
    recorded: set[str]


class Machine(TorchDispatchMode):
    """In this context, operators run on the current stream; see the module."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.host = Stream(self, "host")
        self.streams, self.memory, self.id_copies = [], {}, 0
        self.current = self.stream()
        machine = self

        class Event:
            def __init__(self):
                self.clock = {}

            def record(self, stream):
                self.clock = dict(stream.clock)

            def synchronize(self):
                machine.host.join(self.clock)

        class Pinned(NamedTuple):
            tensor: torch.Tensor

            def to(self, device, non_blocking):
                assert non_blocking
                machine.id_copies += 1
                return self.tensor.clone()

        empty = torch.empty

        def allocate(*args, pin_memory=False, **kwargs):
            with machine.on(machine.host if pin_memory else machine.current):
                return empty(*args, **kwargs)

        self.event = Event
        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: machine.stream())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", machine.on)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: machine.current)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, s: machine.record(self, s))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: Pinned(self))

    def stream(self):
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def of(self, tensor, owner=None):
        key = tensor.untyped_storage()._cdata
        return self.memory.setdefault(key, Memory(tensor, owner, {}, {}, set(), set()))

    def record(self, tensor, stream):
        self.of(tensor).recorded.add(stream.name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = [
            args[i] if i < len(args) else kwargs[a.name]
            for i, a in enumerate(func._schema.arguments)
            if a.is_write and (i < len(args) or a.name in kwargs)
        ]
        out = func(*args, **kwargs)
        if not written and any(r.alias_info is not None for r in func._schema.returns):
            return out  # A view.
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        ids = func.overloadpacket in OF_IDS and made[0].dtype == torch.int64
        stream = self.host if ids else self.current
        stream.join(self.host.clock)
        stream.clock[stream.name] += 1
        keys = {t.untyped_storage()._cdata for t in written}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                is_written = tensor.untyped_storage()._cdata in keys
                self.access(func, stream, self.of(tensor), is_written)
        for tensor in made if not written else ():
            self.access(func, stream, self.of(tensor, stream.name), True)
        return out

    def access(self, func, stream, memory, writes):
        for what in (memory.written, memory.read) if writes else (memory.written,):
            for name, time in what.items():
                assert stream.clock[name] >= time, f"{func} on {stream.name} races with {name}"
        now = {stream.name: stream.clock[stream.name]}
        if writes:
            memory.written.clear()
            memory.read.clear()
        (memory.written if writes else memory.read).update(now)
        memory.users.add(stream.name)

    def check_allocator(self):
        """Memory isn't used by streams that PyTorch's allocator hasn't heard of."""
        for memory in self.memory.values():
            if memory.owner not in (None, "host"):
                unknown = memory.users - memory.recorded - {memory.owner, "host"}
                assert not unknown, f"{list(memory.tensor.shape)} of {memory.owner}: {unknown}"


def staged(machine):
    """Return a store that the host alone reads and writes, and that it keeps account of."""

    class Staged(MemoryStore):
        def read(self, index, out):
            with machine.on(machine.host):
                super().read(index, out)

        def write(self, index, rows):
            with machine.on(machine.host):
                super().write(index, rows)

    return Staged
