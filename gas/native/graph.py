"""Graphs as compressed rows, and mini-batches cut out of them; with pure-torch twins."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.index import ptr2index
from torch_geometric.utils import cumsum

from gas.native import extension as native
from gas.native.checks import check_index, check_range

BLOCK = 1 << 24  # Columns that are checked at a time.


def coo_to_csr(
    row: Tensor, col: Tensor, num_rows: int, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort edges by row, then column, then position, into compressed sparse rows.

    Args:
        row: Row of each edge, of shape ``[E]``, int64, in ``[0, num_rows)``.
        col: Column of each edge, of shape ``[E]``, int64.
        num_rows: The number of rows.
        dtype: The type of the sorted ``col`` and ``perm``: int64, or int32 where columns and
            positions are below 2^31. (default: ``torch.int64``)

    Returns:
        ``rowptr`` of shape ``[num_rows + 1]``, int64, the sorted ``col`` of shape ``[E]``, and
        ``perm`` of shape ``[E]``, the position in the input of each sorted edge.
    """
    check_index("row", row)
    check_index("col", col)
    if row.shape != col.shape:
        raise ValueError(
            f"'row' has {row.numel()} entries and 'col' has {col.numel()}, expected one of each "
            "for every edge"
        )
    if not native.on_cpu(row, col):
        rowptr, out_col, perm = _coo_to_csr_torch(row, col, num_rows)
        return rowptr, out_col.to(dtype), perm.to(dtype)
    row, col = row.contiguous(), col.contiguous()
    rowptr = row.new_empty(num_rows + 1)
    out_col, perm = (torch.empty_like(col, dtype=dtype) for _ in range(2))
    name = "coo_to_csr_int32" if dtype == torch.int32 else "coo_to_csr_int64"
    native.run(name, row.device, row, col, row.numel(), num_rows, rowptr, out_col, perm)
    return rowptr, out_col, perm


def _coo_to_csr_torch(row: Tensor, col: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    check_range("row", row, num_rows)
    by_col = torch.sort(col, stable=True).indices
    perm = by_col[torch.sort(row[by_col], stable=True).indices]
    return cumsum(torch.bincount(row, minlength=num_rows)), col[perm], perm


def symmetrize_edges(
    src: Tensor,
    dst: Tensor,
    num_nodes: int,
    weight: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each edge in both directions, without duplicates and self-loops, for partitioners.

    In addition to the result, it needs memory for an eighth of the entries.

    Args:
        src: One end of each edge, of shape ``[E]``, int64, in ``[0, num_nodes)``.
        dst: The other end, likewise.
        num_nodes: The number of nodes.
        weight: The weight of each edge, of shape ``[E]``, int32, not negative. Weights of
            duplicates and of both directions add up; edges of weight 0 are left out.
            (default: none)
        dtype: The type of ``col``: int64 or int32. (default: ``torch.int64``)

    Returns:
        ``rowptr`` of shape ``[num_nodes + 1]``, ``col`` of shape ``[entries]``, sorted in each row,
        and the weight of each entry, int64, or ``None``.
    """
    check_index("src", src)
    check_index("dst", dst)
    if not native.on_cpu(src, dst, weight):
        return _symmetrize_edges_torch(src, dst, num_nodes, weight, dtype)
    src, dst = src.contiguous(), dst.contiguous()
    weight = None if weight is None else weight.contiguous()
    rowptr = src.new_empty(num_nodes + 1)
    room = 2 * src.numel()  # The system allocates only pages that are written.
    col = torch.empty(room, dtype=dtype)
    out_weight = None if weight is None else src.new_empty(room)
    sizes = src.numel(), num_nodes, col.element_size()
    out = rowptr, col, out_weight
    kept = native.run("undirected", src.device, src, dst, weight, *sizes, *out)
    return rowptr, col[:kept], None if out_weight is None else out_weight[:kept]


def _symmetrize_edges_torch(
    src: Tensor, dst: Tensor, num_nodes: int, weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    both = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
    check_range("src", src, num_nodes)
    check_range("dst", dst, num_nodes)
    keep = both[0] != both[1]
    (row, col), which = both[:, keep].unique(dim=1, return_inverse=True)
    if weight is not None:
        weight = weight.new_zeros(row.numel(), dtype=torch.int64).index_add_(
            0, which, weight.long().repeat(2)[keep]
        )
        row, col, weight = row[weight > 0], col[weight > 0], weight[weight > 0]
    return cumsum(torch.bincount(row, minlength=num_nodes)), col.to(dtype), weight


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
    """Cut mini-batches out of a graph: the rows of some nodes, with columns renumbered.

    It keeps one int32 per node as scratch memory, and one bit for each thread, so that the time of
    a batch depends on its edges and nodes only, not on the size of the graph. Threads take turns; a
    copy in another process has its own scratch memory.

    Args:
        rowptr: Row pointers of the graph, of shape ``[N + 1]``, int64.
        col: Columns of shape ``[E]``, int32 or int64, in ``[0, N)``; int32 is what is kept.
        e_id: The global id of each entry of ``col``, of shape ``[E]``, int32 or int64.
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
        if col.dtype != torch.int32:
            check_index("col", col)
        self.num_nodes = rowptr.numel() - 1
        if not is_valid_rowptr(rowptr, col.numel()):
            raise ValueError(f"'rowptr' does not rise from 0 to the {col.numel()} entries of 'col'")
        check_range("col", col, self.num_nodes)
        for name, values in (("e_id", e_id), ("weight", weight)):
            if values is not None and values.shape != col.shape:
                raise ValueError(
                    f"'{name}' has shape {list(values.shape)}, expected [{col.numel()}]"
                )
        self.rowptr, self.col = rowptr.contiguous(), col.to(torch.int32).contiguous()
        self.e_id = None if e_id is None else e_id.contiguous()
        self.weight = None if weight is None else weight.detach().contiguous()
        self._make_native()

    def _make_native(self) -> None:
        """Make what isn't pickled: the lock and the native object."""
        self._lock = threading.Lock()
        self._native = None
        movable = self.weight is None or self.weight.element_size() in (4, 8)
        if native.C is not None and movable and native.on_cpu(self.rowptr, self.col):
            self._native = native.C.Relabeler(
                self.num_nodes, has_sorted_rows(self.rowptr, self.col)
            )

    @property
    def scratch_bytes(self) -> int:
        """The bytes of its scratch: an int32 and two bits for each node, for one thread."""
        return 0 if self._native is None else self.num_nodes * 4 + self.num_nodes // 4

    def __getstate__(self) -> dict[str, object]:
        keep = ("num_nodes", "rowptr", "col", "e_id", "weight")
        return {name: self.__dict__[name] for name in keep}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._make_native()

    def __call__(self, nodes: Tensor, dtype: torch.dtype = torch.int64) -> Batch:
        """Cut the mini-batch of some nodes.

        Args:
            nodes: The nodes, of shape ``[B]``, int64, each listed once.
            dtype: The type of ``rowptr`` and ``col``: int64, or int32 for fewer than 2^31 edges.
                (default: ``torch.int64``)
        """
        check_index("nodes", nodes)
        nodes = nodes.contiguous()
        if self._native is None:
            return self._cut_torch(nodes, dtype)

        rowptr, e_id, weight, out_weight = self.rowptr.data_ptr(), self.e_id, self.weight, None
        size, empty = nodes.numel(), torch.empty
        with self._lock:
            num_edges = self._native.start(rowptr, nodes.data_ptr(), size)
            out_rowptr, out_col = empty(size + 1, dtype=dtype), empty(num_edges, dtype=dtype)
            out_eid = empty(num_edges, dtype=torch.int64)
            if weight is not None:
                out_weight = empty(num_edges, dtype=weight.dtype)
            id_bytes = 8 if e_id is None else e_id.element_size()
            weight_bytes = 0 if weight is None else weight.element_size()
            given = rowptr, self.col, e_id, id_bytes, weight, weight_bytes, dtype.itemsize
            out = native.to_addresses((*given, out_rowptr, out_col, out_eid, out_weight))
            num_halo = self._native.cut(*out, torch.get_num_threads())
            n_id = empty(size + num_halo, dtype=torch.int64)
            self._native.list(n_id.data_ptr())
        return Batch(out_rowptr, out_col, out_eid, n_id, out_weight)

    def _cut_torch(self, nodes: Tensor, dtype: torch.dtype = torch.int64) -> Batch:
        rowptr, col, entry, n_id = _relabel_torch(self.rowptr, self.col, nodes)
        e_id = entry if self.e_id is None else self.e_id[entry].long()
        weight = None if self.weight is None else self.weight[entry]
        return Batch(rowptr.to(dtype), col.to(dtype), e_id, n_id, weight)


def is_valid_rowptr(rowptr: Tensor, num_entries: int) -> bool:
    """Return whether row pointers increase from 0 to ``num_entries``, checked by blocks."""
    if rowptr[:1].tolist() + rowptr[-1:].tolist() != [0, num_entries]:
        return False
    firsts = range(0, rowptr.numel(), BLOCK)
    return all(bool((rowptr[first : first + BLOCK + 1].diff() >= 0).all()) for first in firsts)


def has_sorted_rows(rowptr: Tensor, col: Tensor, strict: bool = False) -> bool:
    """Return whether columns are sorted in each row, checked by blocks.

    Args:
        rowptr: First entry of each row, increasing from 0 to ``E``, of shape ``[rows + 1]``.
        col: The columns, of shape ``[E]``.
        strict: Also check that no row has a column twice. (default: ``False``)
    """
    for first in range(1, col.numel(), BLOCK):
        last = min(first + BLOCK, col.numel())
        before, after = col[first - 1 : last - 1], col[first:last]
        rises = after > before if strict else after >= before
        ends = torch.tensor([first, last], dtype=rowptr.dtype, device=rowptr.device)
        begin, end = torch.searchsorted(rowptr, ends).tolist()
        rises[rowptr[begin:end].long() - first] = True
        if not bool(rises.all()):
            return False
    return True


def _relabel_torch(
    rowptr: Tensor, col: Tensor, nodes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_nodes = rowptr.numel() - 1
    check_range("nodes", nodes, num_nodes)
    local = nodes.new_full((num_nodes,), -1)
    local[nodes] = torch.arange(nodes.numel(), device=nodes.device)
    if nodes.numel() and int((local >= 0).sum()) != nodes.numel():
        raise ValueError("'nodes' lists a node twice")

    out_rowptr = cumsum(rowptr[nodes + 1] - rowptr[nodes])
    row = ptr2index(out_rowptr)
    e_id = torch.arange(row.numel(), device=nodes.device) + (rowptr[nodes] - out_rowptr[:-1])[row]

    is_halo = torch.zeros(num_nodes, dtype=torch.bool, device=nodes.device)
    source = col[e_id].long()
    is_halo[source] = True
    is_halo[nodes] = False
    halo = is_halo.nonzero().view(-1)
    local[halo] = torch.arange(nodes.numel(), nodes.numel() + halo.numel(), device=nodes.device)

    _, out_col, perm = _coo_to_csr_torch(row, local[source], nodes.numel())
    return out_rowptr, out_col, e_id[perm], torch.cat([nodes, halo])
