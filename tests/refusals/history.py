"""Errors of ``gas.history``: what can't be stored, where there is no room, and files."""

import copy
import errno
import os
import pickle
import sys
import types
from typing import ClassVar

import torch

import gas
from gas.contrib.rocks import open_rows, write_rows
from gas.history import store
from refusals import Model, raising

ids = torch.tensor
ROWS = torch.ones(2, 3)


def history(**options):
    return gas.History(4, 3, **options)


def push(x=ROWS, *args, **where):
    history().push(x, *args, **where)


def unpinned(t):
    native = types.SimpleNamespace(WITH_CUDA=True, cuda_pin=raising(RuntimeError("out of memory")))
    t.patch.setattr("gas.native.extension.C", native)
    store.MemoryStore(1000, 3, torch.float32, pin=True)


def closed(use):
    table = history()
    table.close()
    use(table)


def in_file(t, rows=4, **options):
    return gas.History(rows, 3, store="disk", path=t.path / "h", **options)


def after(t, change, **options):
    """Open a file again once something has happened to it."""
    in_file(t).close()
    change(t.path / "h")
    in_file(t, **options)


def in_use(t):
    first = in_file(t)
    try:
        in_file(t)
    finally:
        first.close()


def below_a_file(t):
    (t.path / "file").touch()
    gas.History(4, 3, store="disk", path=t.path / "file" / "h")


def folder(t):
    (t.path / "h").mkdir()
    in_file(t)


def full_disk(t):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    t.patch.setattr("os.posix_fallocate", raising(full), raising=False)
    in_file(t)


def no_memory(t, use):
    t.patch.setattr("gas.history.tiers.free_memory", lambda *_: 10)
    t.patch.setattr("gas.history.store.free_memory", lambda *_: 10)
    t.patch.setattr("gas.history.tiers.free_disk", lambda *_: 10)
    t.patch.setattr("gas.history.store.free_disk", lambda *_: 10)
    use()


def windows(t):
    t.patch.setattr("gas.history.disk.fcntl", None)
    t.patch.setattr("platform.system", lambda: "Windows")
    in_file(t)


class ListStore(store.Store):
    """A store of the user's own, without clone()."""

    def read(self, index, out):
        out.zero_()

    def write(self, index, rows):
        pass


def failing_write(t):
    table = history(store=lambda *size: ListStore(*size))
    t.patch.setattr(ListStore, "write", raising(OSError("the disk is gone")))
    table.push(ROWS, ids([0, 1]))
    table.wait()


def encode(x=ROWS, *args, **options):
    return gas.quantize(x, *args, **options)


def encoded_to_a_file_that_is_there(t):
    (t.path / "x").touch()
    encode(store="disk", path=t.path / "x")


def encoded_without_memory(t):
    t.patch.setattr("gas.history.features.free_memory", lambda *_: 10)
    encode()


def written(write):
    write(encode())


def cancelled():
    pull = Model().histories[0].start_pull(ids([0]))
    pull.cancel()
    pull.wait()


def copied(t):
    with in_file(t).store as file:
        pickle.dumps(file)


def impossible_ages(t):
    path = t.path / "history"
    history = gas.History(4, 2, store="disk", path=path)
    history.push(torch.ones(4, 2))
    history.close()
    data = bytearray((t.path / "history.age").read_bytes())
    data[-1] = 255
    (t.path / "history.age").write_bytes(data)
    gas.History(4, 2, store="disk", path=path)


def another_is_faster(t):
    """Return a file is there by the time that the new one is to get its name."""
    opened = os.open

    def slowly(*args):
        (t.path / "history").write_bytes(b"")
        return opened(*args)

    t.patch.setattr("os.open", slowly)
    gas.History(4, 2, store="disk", path=t.path / "history")


class Rows(dict):
    """A database that is there as long as a case."""

    there: ClassVar = {}

    def __new__(cls, path, _):
        return cls.there.setdefault(path, super().__new__(cls))

    def __init__(self, path, _):
        if path.endswith("broken"):
            raise Exception("Corruption")

    def close(self):
        pass


def rocks(t, name="db", rows=4, **options):
    """Return features in a database that is made up: the package needn't be there."""
    made_up = types.ModuleType("rocksdict")
    made_up.Rdict, made_up.Options = Rows, lambda raw_mode: None
    t.patch.setitem(sys.modules, "rocksdict", made_up)
    return open_rows(t.path / name, rows, 3, **options)


def rocks_elsewhere(t):
    x = rocks(t)
    t.patch.setattr("os.getpid", lambda: -1)
    x[:]


def no_rocks(t):
    t.without_package("rocksdict")
    open_rows(t.path / "db", 4, 3)


CASES = {
    "History, no device": lambda t: gas.History(2, 2, device="foo"),
    "History, ages that can't be": impossible_ages,
    "History, another process is faster": another_is_faster,
    "open_rows, without rocksdict": no_rocks,
    "open_rows, no database": lambda t: rocks(t, "broken"),
    "open_rows, other rows": lambda t: [rocks(t), rocks(t, rows=5)],
    "open_rows, read by another process": rocks_elsewhere,
    "open_rows, pickled": lambda t: pickle.dumps(rocks(t).store),
    "write_rows, of something else": lambda t: write_rows(ROWS, ids([0]), ROWS[:1]),
    "write_rows, too few": lambda t: write_rows(rocks(t), ids([0, 1]), ROWS[:1]),
    "gas.History, a negative size": lambda t: gas.History(-1, 3),
    "gas.History, no whole width": lambda t: gas.History(4, 2.5),
    "gas.History, an unknown type": lambda t: history(dtype="int4"),
    "gas.History, an unknown store": lambda t: history(store="tape"),
    "gas.History, pinned without a GPU": lambda t: history(store="pinned"),
    "gas.History, memory that CUDA doesn't pin": unpinned,
    "gas.History, a disk on a system without POSIX": windows,
    "gas.History, a path for memory": lambda t: history(path="h"),
    "gas.History, a function that makes another store": lambda t: history(
        store=lambda rows, columns, dtype: store.MemoryStore(1, columns, dtype)
    ),
    "gas.History, no memory": lambda t: no_memory(t, history),
    "gas.History, auto, neither memory nor disk": lambda t: no_memory(
        t, lambda: history(store="auto")
    ),
    "gas.History, no room for a file": full_disk,
    "gas.History, a folder that can't be made": below_a_file,
    "gas.History, a path that is a folder": folder,
    "gas.History, a file in use": in_use,
    "gas.History, a file of something else": lambda t: after(
        t, lambda path: path.write_text("letters")
    ),
    "gas.History, a file of more nodes": lambda t: after(t, lambda path: None, rows=5),
    "gas.History, a file of another type": lambda t: after(t, lambda path: None, dtype=torch.int8),
    "gas.History, a file cut off": lambda t: after(t, lambda path: os.truncate(path, 4100)),
    "push, another width": lambda t: push(torch.ones(2, 4)),
    "push, one row without a dimension": lambda t: push(torch.ones(3)),
    "push, a list": lambda t: push([[1.0, 1.0, 1.0]]),
    "push, a sparse matrix": lambda t: push(ROWS.to_sparse_csr(), ids([0, 1])),
    "push, ranges of real numbers": lambda t: push(ROWS, None, [0.0], [2]),
    "push, integers": lambda t: push(ROWS.long(), ids([0, 1])),
    "push, not told which rows": lambda t: push(),
    "push, ids of other rows": lambda t: push(ROWS, ids([0])),
    "push, ids that aren't int64": lambda t: push(ROWS, ids([0.0, 1.0])),
    "push, an id too many": lambda t: push(ROWS, ids([0, 4])),
    "push, an offset without a count": lambda t: push(ROWS, offset=ids([0])),
    "push, ranges of other rows": lambda t: push(ROWS, offset=ids([0]), count=ids([3])),
    "push, a range outside": lambda t: push(ROWS, offset=ids([3]), count=ids([2])),
    "push, ranges and ids of other rows": lambda t: push(
        ROWS, ids([0]), offset=ids([0]), count=ids([2])
    ),
    "push, ranges and ids that disagree": lambda t: push(
        ROWS, ids([1, 2]), offset=ids([0]), count=ids([2])
    ),
    "History, the old name of a method": lambda t: history().stored(ids([0])),
    "push, a store that fails": failing_write,
    "pull, an id too many": lambda t: history().pull(ids([4])),
    "pull, ids that aren't int64": lambda t: history().pull(ids([True])),
    "pull, rows that were never pushed": lambda t: history().pull(ids([0, 1])),
    "pull, closed": lambda t: closed(lambda h: h.pull(ids([0]))),
    "push, closed": lambda t: closed(lambda h: h.push(ROWS, ids([0, 1]))),
    "emb, closed": lambda t: closed(lambda h: h.emb),
    "a pull that was cancelled": lambda t: cancelled(),
    "gas.quantize, no tensor": lambda t: encode([[1.0]]),
    "gas.quantize, sparse features": lambda t: encode(ROWS.to_sparse()),
    "gas.quantize, one number for each row": lambda t: encode(ROWS[:, 0]),
    "gas.quantize, integers": lambda t: encode(ROWS.long()),
    "gas.quantize, an unknown type": lambda t: encode(ROWS, "int4"),
    "gas.quantize, on a device": lambda t: encode(store="device"),
    "gas.quantize, a path for memory": lambda t: encode(path="x"),
    "gas.quantize, a file that is there": encoded_to_a_file_that_is_there,
    "gas.quantize, no memory": encoded_without_memory,
    "gas.quantize, a value too large": lambda t: encode(1e6 * ROWS, "float16"),
    "encoded rows, x[0] = 1": lambda t: written(lambda x: x.__setitem__(0, 1)),
    "encoded rows, x.add_(1)": lambda t: written(lambda x: x.add_(1)),
    "encoded rows, out=x": lambda t: written(lambda x: torch.add(x, 1, out=x)),
    "encoded rows, x.data_ptr()": lambda t: encode().data_ptr(),
    "a copy of a store of one's own": lambda t: copy.deepcopy(
        history(store=lambda *size: ListStore(*size))
    ),
    "pickle, a history on disk": lambda t: pickle.dumps(in_file(t)),
    "TableStore, a transposed table": lambda t: store.TableStore(torch.ones(2, 3).t()),
    "check_fits, histories beyond memory": lambda t: no_memory(t, lambda: store.check_fits(2**40)),
    "check_fits_disk, histories beyond the disk": lambda t: no_memory(
        t, lambda: store.check_fits_disk(2**40, t.path)
    ),
    "model.io, an unknown mode": lambda t: Model(io="parallel"),
    "model.io = 'none'": lambda t: Model(io="none"),
}
