"""The native extension: the only importer of ``gas._C``.

Every function here checks its arguments, then runs natively where the extension was built and as
its pure-torch twin elsewhere. Results are equal bit by bit, whichever ran.
"""

from __future__ import annotations

import importlib
import math
import numbers
import threading
import warnings
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gas import _buffers

# The interface of csrc/bindings.cpp that this file calls. CMake compiles it into the module.
INTERFACE = 16


def _load() -> ModuleType | None:
    """Imports ``gas._C``, or says once why the twins are used instead."""
    try:
        module = importlib.import_module("gas._C")
    except ModuleNotFoundError:
        reason = "it was not built"
    except ImportError as error:
        reason = f"it could not be loaded ({error})"
    else:
        if getattr(module, "INTERFACE", None) == INTERFACE:
            return module
        reason = f"{module.__file__} was built from other sources than these"
    warnings.warn(
        f"gas runs without its native extension: {reason}. Everything works, only slower. To "
        "build it, run 'pip install .' (or 'pip install -e .' to work on the sources) in the "
        "repository; it needs a C++17 compiler.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


C: Any = _load()


def _use(*tensors: Tensor | None) -> bool:
    return C is not None and all(t is None or t.device.type == "cpu" for t in tensors)


def has_kernels(*tensors: Tensor | None) -> bool:
    """Whether all are on the CPU, or on one CUDA device and the extension was built for such."""
    if _use(*tensors):
        return True
    devices = {t.device for t in tensors if t is not None}
    return C is not None and C.WITH_CUDA and len(devices) == 1 and devices.pop().type == "cuda"


def run_on_device(name: str, device: torch.device, *arguments: object) -> None:
    """Calls a function of csrc/cuda on the current stream; its scratch is PyTorch's."""
    scratch: list[Tensor] = []

    def allocate(size: int) -> int:
        scratch.append(torch.empty(size, dtype=torch.uint8, device=device))
        return scratch[-1].data_ptr()

    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        getattr(C, f"cuda_{name}")(*arguments, stream, allocate)


def is_integer(value: object) -> bool:
    """Whether ``value`` is a whole number of Python or numpy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_index(name: str, index: Tensor) -> None:
    """Raises ``ValueError`` unless ``index`` is a one-dimensional int64 tensor."""
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
        what = f"{index.dtype} of shape {list(index.shape)}" if isinstance(index, Tensor) else index
        raise ValueError(f"'{name}' is {what}, expected a one-dimensional int64 tensor")


def check_range(name: str, index: Tensor, size: int) -> None:
    """Raises ``IndexError`` unless every index is in ``[0, size)``."""
    if index.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(index))
    if low < 0 or high >= size:
        bad = low if low < 0 else high
        raise IndexError(f"'{name}' holds {bad}, which is outside [0, {size})")


# Rows ---------------------------------------------------------------------------------------------


def _row_bytes(table: Tensor) -> int:
    return math.prod(table.shape[1:]) * table.element_size()


def gather_rows(table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Reads rows of a table: ``table[index]``.

    Args:
        table: The table, of shape ``[rows, ...]`` and any dtype.
        index: The rows to read, of shape ``[n]``, int64.
        out: Where to write, contiguous, of shape ``[n, ...]``. (default: a new tensor)

    Raises:
        IndexError: If an index is outside ``[0, rows)``; nothing was written then.
    """
    check_index("index", index)
    shape = (index.numel(), *table.shape[1:])
    if out is None:
        if table.dim() == 2:
            out = _buffers.empty(index.numel(), table.size(1), table)
        else:
            out = table.new_empty(shape)
    elif out.shape != shape or out.dtype != table.dtype or not out.is_contiguous():
        raise ValueError(
            f"'out' is {out.dtype} of shape {list(out.shape)}, expected a contiguous "
            f"{table.dtype} tensor of shape {list(shape)}"
        )
    table = table.detach()
    if not _use(table, index, out) or not table.is_contiguous():  # Never copies a whole table.
        return _gather_rows_torch(table, index, out)
    index = index.contiguous()
    C.gather_rows(
        table.data_ptr(),
        table.size(0),
        _row_bytes(table),
        index.data_ptr(),
        index.numel(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _gather_rows_torch(table: Tensor, index: Tensor, out: Tensor) -> Tensor:
    check_range("index", index, table.size(0))
    return torch.index_select(table, 0, index, out=out)


# Dropout ------------------------------------------------------------------------------------------


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Drops elements: ``x / (1 - p)`` where the seed keeps them, 0 elsewhere.

    The same seed drops the same elements, so that nothing has to be stored for the backward pass.

    Args:
        x: A float32 or float64 tensor of any shape, on the CPU.
        p: The probability of dropping an element, in ``[0, 1)``.
        seed: Of the generator, in ``[0, 2^63)``.
    """
    threshold, scale = round(p * 2**32), 1.0 / (1.0 - p)
    x = x.contiguous()
    if not _use(x):
        return _dropout_torch(x, threshold, scale, seed)
    out = _buffers.empty(x.size(0), x.size(1), x) if x.dim() == 2 else torch.empty_like(x)
    native = getattr(C, "dropout_float32" if x.dtype == torch.float32 else "dropout_float64")
    native(x.data_ptr(), x.numel(), threshold, scale, seed, out.data_ptr(), torch.get_num_threads())
    return out


def _dropout_torch(x: Tensor, threshold: int, scale: float, seed: int) -> Tensor:
    z = random_bits((x.numel() + 1) // 2, seed, x.device)
    bits = torch.stack([z & 0xFFFFFFFF, _shift(z, 32)], dim=1).view(-1)[: x.numel()]
    factor = (bits >= threshold).to(x.dtype) * scale
    return x * factor.view(x.shape)


def random_bits(count: int, seed: int, device: torch.device) -> Tensor:
    """64 random bits for each of ``count`` counters, as int64; ``csrc/random.h`` in torch."""

    def signed(z: int) -> int:
        return (z + 2**63) % 2**64 - 2**63

    counter = torch.arange(count, device=device) + 1
    z = counter * signed(0x9E3779B97F4A7C15) + seed
    z = (z ^ _shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:  # Right, filling with zeros.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# Graphs -------------------------------------------------------------------------------------------


def coo_to_csr(row: Tensor, col: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts edges by row, then column, then position, into compressed sparse rows.

    Args:
        row: Row of each edge, of shape ``[E]``, int64, in ``[0, num_rows)``.
        col: Column of each edge, of shape ``[E]``, int64.
        num_rows: The number of rows.

    Returns:
        ``rowptr`` of shape ``[num_rows + 1]``, the sorted ``col`` of shape ``[E]``, and ``perm`` of
        shape ``[E]``, the position in the input of each sorted edge.
    """
    check_index("row", row)
    check_index("col", col)
    if row.shape != col.shape:
        raise ValueError(f"'row' has {row.numel()} entries and 'col' has {col.numel()}")
    if not _use(row, col):
        return _coo_to_csr_torch(row, col, num_rows)
    row, col = row.contiguous(), col.contiguous()
    rowptr, out_col, perm = (
        row.new_empty(num_rows + 1),
        torch.empty_like(col),
        torch.empty_like(col),
    )
    C.coo_to_csr(
        row.data_ptr(),
        col.data_ptr(),
        row.numel(),
        num_rows,
        rowptr.data_ptr(),
        out_col.data_ptr(),
        perm.data_ptr(),
        torch.get_num_threads(),
    )
    return rowptr, out_col, perm


def _coo_to_csr_torch(row: Tensor, col: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    check_range("row", row, num_rows)
    by_col = torch.sort(col, stable=True).indices
    perm = by_col[torch.sort(row[by_col], stable=True).indices]
    rowptr = row.new_zeros(num_rows + 1)
    torch.cumsum(torch.bincount(row, minlength=num_rows), 0, out=rowptr[1:])
    return rowptr, col[perm], perm


class Batch(NamedTuple):
    """The edges of one mini-batch of ``B`` nodes with ``H`` halo nodes and ``e`` edges.

    * ``rowptr`` of shape ``[B + 1]``;
    * ``col`` of shape ``[e]``: local ids, sorted in each row; duplicate edges stay;
    * ``e_id`` of shape ``[e]``: the global id of each edge;
    * ``n_id`` of shape ``[B + H]``: the batch's own nodes, then the halo in increasing order;
    * ``weight`` of shape ``[e]``, or ``None``.
    """

    rowptr: Tensor
    col: Tensor
    e_id: Tensor
    n_id: Tensor
    weight: Tensor | None


class Relabeler:
    """Cuts mini-batches out of a graph: the rows of some nodes, with columns renumbered.

    Keeps one int32 and a few bits per node as scratch, so that a batch costs no more than its
    edges. Threads take turns; a copy sent to another process starts with scratch of its own.

    Args:
        rowptr: Row pointers of the graph, of shape ``[N + 1]``, int64.
        col: Columns of shape ``[E]``, int64, in ``[0, N)``.
        e_id: The global id of each entry of ``col``, of shape ``[E]``, int64.
            (default: its position)
        weight: A weight for each entry of ``col``, of shape ``[E]``. (default: none)
    """

    def __init__(
        self,
        rowptr: Tensor,
        col: Tensor,
        e_id: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> None:
        check_index("rowptr", rowptr)
        check_index("col", col)
        self.num_nodes = rowptr.numel() - 1
        if int(rowptr[0]) != 0 or int(rowptr[-1]) != col.numel() or bool((rowptr.diff() < 0).any()):
            raise ValueError(f"'rowptr' does not rise from 0 to the {col.numel()} entries of 'col'")
        check_range("col", col, self.num_nodes)
        for name, values in (("e_id", e_id), ("weight", weight)):
            if values is not None and values.shape != col.shape:
                raise ValueError(
                    f"'{name}' has shape {list(values.shape)}, expected [{col.numel()}]"
                )
        self.rowptr, self.col = rowptr.contiguous(), col.contiguous()
        self.e_id = None if e_id is None else e_id.contiguous()
        self.weight = None if weight is None else weight.detach().contiguous()
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._native = None
        movable = self.weight is None or self.weight.element_size() in (4, 8)
        if C is not None and movable and _use(self.rowptr, self.col):
            self._native = C.Relabeler(self.num_nodes, _sorted_rows(self.rowptr, self.col))

    def __getstate__(self) -> dict[str, object]:
        keep = ("num_nodes", "rowptr", "col", "e_id", "weight")
        return {name: self.__dict__[name] for name in keep}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start()

    def __call__(self, nodes: Tensor, dtype: torch.dtype = torch.int64) -> Batch:
        """Cuts the mini-batch of some nodes.

        Args:
            nodes: The nodes, of shape ``[B]``, int64, each listed once.
            dtype: Of ``rowptr`` and ``col``: int64, or int32 for fewer than 2^31 edges.
                (default: ``torch.int64``)
        """
        check_index("nodes", nodes)
        nodes = nodes.contiguous()
        if self._native is None:
            return self._cut_torch(nodes, dtype)

        batch = (self.rowptr.data_ptr(), self.col.data_ptr(), nodes.data_ptr(), nodes.numel())
        threads = torch.get_num_threads()
        e_id, weight, out_weight = self.e_id, self.weight, None
        with self._lock:
            num_edges, num_halo = self._native.count(*batch, threads)
            out_rowptr = torch.empty(nodes.numel() + 1, dtype=dtype)
            out_col, out_eid = torch.empty(num_edges, dtype=dtype), nodes.new_empty(num_edges)
            if weight is not None:
                out_weight = weight.new_empty(num_edges)
            n_id = nodes.new_empty(nodes.numel() + num_halo)
            n_id[: nodes.numel()] = nodes
            self._native.write(
                *batch,
                0 if e_id is None else e_id.data_ptr(),
                0 if weight is None else weight.data_ptr(),
                0 if weight is None else weight.element_size(),
                out_rowptr.element_size(),
                out_rowptr.data_ptr(),
                out_col.data_ptr(),
                out_eid.data_ptr(),
                0 if out_weight is None else out_weight.data_ptr(),
                n_id[nodes.numel() :].data_ptr(),
                threads,
            )
        return Batch(out_rowptr, out_col, out_eid, n_id, out_weight)

    def _cut_torch(self, nodes: Tensor, dtype: torch.dtype = torch.int64) -> Batch:
        rowptr, col, entry, n_id = _relabel_torch(self.rowptr, self.col, nodes)
        e_id = entry if self.e_id is None else self.e_id[entry]
        weight = None if self.weight is None else self.weight[entry]
        return Batch(rowptr.to(dtype), col.to(dtype), e_id, n_id, weight)


def _sorted_rows(rowptr: Tensor, col: Tensor) -> bool:
    """Whether columns never fall but where a row starts."""
    starts = torch.zeros(col.numel() + 1, dtype=torch.bool)
    starts[rowptr] = True
    return bool((starts[1:-1] | (col[1:] >= col[:-1])).all())


def relabel_one_hop(rowptr: Tensor, col: Tensor, nodes: Tensor) -> Batch:
    """Cuts one mini-batch out of a graph; see :class:`Relabeler`, which many batches share."""
    return Relabeler(rowptr, col)(nodes)


def _relabel_torch(
    rowptr: Tensor, col: Tensor, nodes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_nodes = rowptr.numel() - 1
    check_range("nodes", nodes, num_nodes)
    local = nodes.new_full((num_nodes,), -1)
    local[nodes] = torch.arange(nodes.numel(), device=nodes.device)
    if nodes.numel() and int((local >= 0).sum()) != nodes.numel():
        raise ValueError("'nodes' lists a node twice")

    count = rowptr[nodes + 1] - rowptr[nodes]
    out_rowptr = rowptr.new_zeros(nodes.numel() + 1)
    torch.cumsum(count, 0, out=out_rowptr[1:])
    row = torch.repeat_interleave(torch.arange(nodes.numel(), device=nodes.device), count)
    e_id = torch.arange(row.numel(), device=nodes.device) + (rowptr[nodes] - out_rowptr[:-1])[row]

    is_halo = torch.zeros(num_nodes, dtype=torch.bool, device=nodes.device)
    is_halo[col[e_id]] = True
    is_halo[nodes] = False
    halo = is_halo.nonzero().view(-1)
    local[halo] = torch.arange(nodes.numel(), nodes.numel() + halo.numel(), device=nodes.device)

    _, out_col, perm = _coo_to_csr_torch(row, local[col[e_id]], nodes.numel())
    return out_rowptr, out_col, e_id[perm], torch.cat([nodes, halo])
