"""Errors of ``gas.native``, native ones and those of the twins."""

import importlib
from types import SimpleNamespace

import numpy as np
import torch

from gas import native
from gas.history import TransferEngine
from gas.native import Job, JobPolicy
from gas.native.extension import warn_of_second
from gas.native.graph import Relabeler, coo_to_csr, symmetrize_edges
from gas.native.rows import gather_rows
from gas.native.segments import read_segments
from refusals import raising

ids = torch.tensor
THREE, FOUR = torch.zeros(3, 2), torch.zeros(4, 2)


def importing(t, module=None, error=None):
    t.patch.setattr(importlib, "import_module", raising(error) if error else lambda _: module)
    native.extension._load()


def twin(t, function):
    t.without_extension()
    return function()


def cut_off(t):
    path = t.path / "segments"
    path.write_bytes(b"abc")
    with path.open("rb") as stream:
        read_segments(stream.fileno(), 0, np.array([0, 3]), 8, THREE)


def closed_engine(t, use, extension=True):
    if not extension:
        t.without_extension()
    engine = TransferEngine(threads=0)
    engine.close()
    use(engine)


def failing_job(t, extension=True):
    if not extension:
        t.without_extension()
    engine = TransferEngine(threads=0)
    engine.submit(0, Job.from_function(raising(OSError("the disk is gone"))), detached=True)
    engine.wait_lane(0)


def failing_pull(t):
    t.without_extension()
    TransferEngine(threads=0).run(0, Job.from_function(raising(OSError("the disk is gone"))))


ROWPTR, COL = ids([0, 1, 2]), ids([1, 0])

CASES = {
    "a file of segments, cut off": lambda t: cut_off(t),
    "a file of segments, cut off, the twin": lambda t: twin(t, lambda: cut_off(t)),
    "import gas, never built": lambda t: importing(t, error=ModuleNotFoundError("gas._C")),
    "import gas, built for another system": lambda t: importing(t, error=ImportError("no GLIBC")),
    "import gas, built from other sources": lambda t: importing(
        t, SimpleNamespace(__file__="_C.so", INTERFACE=0)
    ),
    "import gas, a second OpenMP runtime": lambda t: warn_of_second(
        {"libgomp.so.1"}, {"libgomp.so.1", "libomp.so"}
    ),
    "coo_to_csr, rows that aren't int64": lambda t: coo_to_csr(ids([0.0]), ids([0]), 1),
    "coo_to_csr, a list": lambda t: coo_to_csr([0], ids([0]), 1),
    "coo_to_csr, other numbers of rows and columns": lambda t: coo_to_csr(ids([0, 0]), ids([0]), 1),
    "coo_to_csr, a row too many": lambda t: coo_to_csr(ids([0, 2]), ids([0, 0]), 2),
    "coo_to_csr without extension, a row too many": lambda t: twin(
        t, lambda: coo_to_csr(ids([0, 2]), ids([0, 0]), 2)
    ),
    "symmetrize_edges, a node too many": lambda t: symmetrize_edges(ids([0, 2]), ids([0, 0]), 2),
    "symmetrize_edges without extension, a node too many": lambda t: twin(
        t, lambda: symmetrize_edges(ids([0, 2]), ids([0, 0]), 2)
    ),
    "Relabeler, rowptr that falls": lambda t: Relabeler(ids([0, 2, 1, 2]), COL),
    "Relabeler, rowptr of no nodes at all": lambda t: Relabeler(ids([], dtype=torch.long), COL),
    "Relabeler, a column too many": lambda t: Relabeler(ROWPTR, ids([1, 5])),
    "Relabeler, weights of other edges": lambda t: Relabeler(ROWPTR, COL, weight=torch.ones(3)),
    "Relabeler, ids of other edges": lambda t: Relabeler(ROWPTR, COL, ids([7])),
    "Relabeler, a node twice": lambda t: Relabeler(ROWPTR, COL)(ids([1, 1])),
    "Relabeler, a node outside": lambda t: Relabeler(ROWPTR, COL)(ids([2])),
    "Relabeler without extension, a node twice": lambda t: twin(
        t, lambda: Relabeler(ROWPTR, COL)(ids([1, 1]))
    ),
    "Relabeler without extension, a node outside": lambda t: twin(
        t, lambda: Relabeler(ROWPTR, COL)(ids([2]))
    ),
    "gather_rows, into another shape": lambda t: gather_rows(THREE, ids([0]), torch.zeros(2, 2)),
    "gather_rows, a row outside": lambda t: gather_rows(THREE, ids([0, 3])),
    "gather_rows, a negative row": lambda t: gather_rows(THREE, ids([-1])),
    "gather_rows without extension, a row outside": lambda t: twin(
        t, lambda: gather_rows(THREE, ids([3]))
    ),
    "Job.pull, into another shape": lambda t: Job.pull(FOUR, ids([0]), torch.zeros(1, 3)),
    "Job.pull, a row outside": lambda t: Job.pull(FOUR, ids([4]), torch.zeros(1, 2)).run(),
    "Job.push, another type": lambda t: Job.push(FOUR, torch.zeros(1, 2).double(), ids([0])),
    "Job.push, a row outside": lambda t: Job.push(FOUR, torch.zeros(1, 2), ids([-1])).run(),
    "Job.push, a range outside": lambda t: Job.push(FOUR, THREE, [(2, 3)]),
    "TransferEngine.submit, closed": lambda t: closed_engine(
        t, lambda e: e.submit(0, Job.from_function(print))
    ),
    "TransferEngine.submit without extension, closed": lambda t: closed_engine(
        t, lambda e: e.submit(0, Job.from_function(print), JobPolicy.ANYONE), extension=False
    ),
    "TransferEngine.wait, closed": lambda t: closed_engine(t, lambda e: e.wait(1)),
    "a push that failed, at the next wait": failing_job,
    "a push that failed without extension, at the next wait": lambda t: failing_job(t, False),
    "a pull that failed without extension": failing_pull,
}
