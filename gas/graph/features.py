"""Features of nodes and edges: select rows, convert to sparse matrices, refuse NaN.

Sparse features are ``torch.sparse_csr`` matrices.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.index import ptr2index

from gas.graph.folder.opening import MAPPED, get_mapped_rows
from gas.history import Encoded
from gas.native import (
    MOST_INT32,
    accept_beta_state,
    csr_parts,
    gather_sparse_rows,
    has_sorted_rows,
    is_sparse,
    sparse_csr,
    warn,
)

BLOCK = 1 << 20  # Values that are checked together.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RARE = 30  # Features become sparse if fewer than one in RARE values isn't zero.
SPARSE_LAYOUTS = (torch.sparse_csr, torch.sparse_coo, torch.sparse_csc)


def with_csr_features(data: Data, name: str = "x") -> Data:
    """Convert sparse features of a graph to CSR; return the graph itself if they need no change.

    Args:
        data: The graph.
        name: What errors call the features. (default: ``"x"``)

    Raises:
        ValueError: If they are no matrix of numbers, or an array of NumPy.
    """
    x = data.get("x")
    if isinstance(x, np.ndarray):
        raise ValueError(
            f"'{name}' is an array of NumPy, expected a tensor: data.x = torch.from_numpy(data.x)"
        )
    if not is_sparse_matrix(x):
        return data
    made = to_csr_features(x, name)
    if made is x:
        return data
    out = copy.copy(data)
    out.x = made
    return out


def is_sparse_matrix(x: Any) -> bool:
    """Return whether features are a sparse matrix, of PyTorch or SciPy."""
    if isinstance(x, Tensor):
        return x.layout != torch.strided
    return type(x).__module__.startswith("scipy.sparse")


def to_csr_features(x: Any, name: str = "x") -> Tensor:
    """Convert sparse features to a canonical ``torch.sparse_csr`` matrix, if they aren't one.

    Its columns are sorted and unique in each row, and its indices are int32 where that suffices.
    Duplicate entries are added up; stored zeros stay.

    Args:
        x: A ``torch.sparse_csr``, ``sparse_csc`` or ``sparse_coo`` matrix of shape ``[N, F]``, or
            one of SciPy, whose values become those of the default type.
        name: What errors call it. (default: ``"x"``)

    Raises:
        ValueError: If it is something else, or its indices are invalid.
    """
    accept_beta_state()
    if not isinstance(x, Tensor):
        x = _from_scipy(x, name)
    elif x.layout not in SPARSE_LAYOUTS or x.dim() != 2 or x.dense_dim() != 0:
        raise ValueError(
            f"'{name}' is {x.layout} of shape {list(x.shape)}, expected torch.sparse_csr of shape "
            f"[N, F]: pass {name}.to_dense().flatten(1).to_sparse_csr()"
        )
    if x.layout == torch.sparse_csr:
        _check_indices(x, name)
        if not has_sorted_rows(*csr_parts(x)[:2], strict=True):
            x = _to_coo(x)
    elif x.layout == torch.sparse_csc:
        _check_indices(x, name)
        x = _to_coo(x)
    if x.layout == torch.sparse_coo:
        x = x.coalesce().to_sparse_csr()
    rowptr, col, value = csr_parts(x)
    if rowptr.dtype == torch.int64 and max(col.numel(), x.size(1)) <= MOST_INT32:
        x = sparse_csr(rowptr.int(), col.int(), value, x.size(1))
    return x


def to_float32_features(x: Tensor, name: str = "") -> Tensor:
    """Convert the values of a ``torch.sparse_csr`` matrix to float32.

    Args:
        x: The matrix, of shape ``[N, F]``.
        name: What errors call it, such as its file; ``'x'`` without. (default: ``""``)

    Raises:
        ValueError: If a finite value becomes infinite, naming it.
    """
    rowptr, col, value = csr_parts(x)
    narrow = value.float()
    lost = narrow.isinf() & value.isfinite()
    if bool(lost.any()):
        entry = int(lost.nonzero()[0])
        row, largest = _row_of_entry(rowptr, entry), torch.finfo(torch.float32).max
        raise ValueError(
            f"{name or repr('x')} holds {float(value[entry]):g} in row {row}, column "
            f"{int(col[entry])}, but float32 ends at {largest:g}: scale the features"
        )
    return x if narrow is value else sparse_csr(rowptr, col, narrow, x.size(1))


def _from_scipy(x: Any, name: str) -> Tensor:
    """Convert a SciPy matrix or array; memory is shared if possible."""
    if x.ndim != 2 or x.dtype.kind not in "biuf":
        raise ValueError(
            f"'{name}' is a {type(x).__name__} of {x.dtype} and shape {list(x.shape)}, expected a "
            f"matrix of real numbers of shape [N, F]: pass {name}.astype('float32')"
        )
    if x.dtype.kind != "f":  # SciPy adds up duplicates in their type, where sums may not fit.
        x = x.astype(np.float64 if x.dtype.itemsize > 2 else np.float32)
    csr = x.tocsr()
    rowptr, col = (torch.from_numpy(np.asarray(ids)) for ids in (csr.indptr, csr.indices))
    kind = torch.get_default_dtype()
    value = torch.from_numpy(np.ascontiguousarray(csr.data)).to(kind)
    if rowptr.dtype != col.dtype:
        rowptr, col = rowptr.long(), col.long()
    return sparse_csr(rowptr, col, value, csr.shape[1])


def _check_indices(x: Tensor, name: str) -> None:
    """Refuse indices out of range, which PyTorch doesn't check by default."""
    is_csr = x.layout == torch.sparse_csr
    ptr = x.crow_indices() if is_csr else x.ccol_indices()
    ids = x.col_indices() if is_csr else x.row_indices()
    ends = ptr.numel() and ptr[0] == 0 and ptr[-1] == ids.numel() and bool((ptr.diff() >= 0).all())
    low, high = map(int, torch.aminmax(ids)) if ids.numel() else (0, -1)
    size = x.size(1) if is_csr else x.size(0)
    if not ends or low < 0 or high >= size:
        fault = f"its index {low if low < 0 else high} is outside [0, {size})"
        if not ends:
            fault = f"its pointers don't rise from 0 to its {ids.numel()} entries"
        raise ValueError(
            f"'{name}' is {x.layout} of shape {list(x.shape)}, but {fault}: make it with "
            "check_invariants=True, which says where"
        )


def _to_coo(x: Tensor) -> Tensor:
    """Convert a compressed matrix to ``torch.sparse_coo``, uncoalesced."""
    if x.layout == torch.sparse_csc:
        ptr, row, value = x.ccol_indices(), x.row_indices(), x.values()
        col = ptr2index(ptr)
    else:
        ptr, col, value = csr_parts(x)
        row = ptr2index(ptr)
    index = torch.stack([row.long(), col.long()])
    return torch.sparse_coo_tensor(index, value, x.shape, check_invariants=False)


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[index]``; sparse rows stay sparse, and encoded rows encoded.

    Args:
        x: The rows of nodes or edges, of shape ``[rows, ...]``.
        index: The rows to select, of shape ``[n]``, int64.
    """
    if isinstance(x, Encoded):
        return x.select_rows(index)
    return gather_sparse_rows(x, index) if is_sparse(x) else x[index]


def to_dense(x: Any) -> Any:
    """Convert sparse features, or a pair of them, to dense ones; return others as they are."""
    if isinstance(x, tuple):
        whole, own = (*x, None)[:2]
        if len(x) == 2 and is_sparse(whole) and is_sparse(own) and shares_rows(whole, own):
            rows = whole.to_dense()
            return rows, rows[: own.size(0)]
        return tuple(map(to_dense, x))
    return x.to_dense() if is_sparse(x) else x


def shares_rows(whole: Tensor, part: Tensor) -> bool:
    """Return whether sparse features are the first rows of others, in the same memory."""
    return (
        whole.crow_indices().data_ptr() == part.crow_indices().data_ptr()
        and whole.values().data_ptr() == part.values().data_ptr()
        and part.size(0) <= whole.size(0)
        and part.size(1) == whole.size(1)
    )


# Dense features that are mostly zeros -------------------------------------------------------------


def with_sparse_features(data: Data, wanted: bool | str, supports_sparse: bool, log: bool) -> Data:
    """Convert the dense features of a graph to sparse ones, if ``wanted``.

    Args:
        data: The graph; it is not modified.
        wanted: ``True``: always; ``"auto"``: if fewer than one in thirty values isn't zero, and it
            ``supports_sparse``; ``False``: never. Sparse features stay sparse.
        supports_sparse: Whether the model multiplies non-zero values alone.
        log: Report on standard error that they were made sparse.

    Raises:
        ValueError: If ``wanted`` is none of these, or the features can't become sparse.
    """
    if wanted not in (True, False, "auto"):
        raise ValueError(f"'sparse_features' is {wanted!r}, expected True, False or 'auto'")
    x = data.get("x")
    if wanted is False or (wanted == "auto" and not supports_sparse) or is_sparse_matrix(x):
        return data
    if wanted == "auto" and hasattr(x, MAPPED):
        return data
    if not _is_plain_matrix(x):
        if wanted is True:
            found = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(
                f"'sparse_features' is True, but 'x' is {found}: expected a matrix of "
                "float32 or float64 without gradient; leave 'sparse_features' out"
            )
        return data
    made = _find_non_zeros(x, x.numel() if wanted is True else (x.numel() - 1) // RARE)
    if made is None:
        return data
    if log:
        share = made.values().numel() / max(x.numel(), 1)
        size = f"{x.size(0):,} x {x.size(1):,}"
        print(
            f"Features stay sparse: {share:.2%} of {size} values aren't zero "
            "(sparse_features=False keeps them dense)",
            file=sys.stderr,
        )
    out = copy.copy(data)
    out.x = made
    return out


def _is_plain_matrix(x: Any) -> bool:
    """Return whether features are a plain tensor of two dimensions, without gradient."""
    return (
        type(x) is Tensor
        and x.dim() == 2
        and x.dtype in (torch.float32, torch.float64)
        and not x.requires_grad
    )


def _find_non_zeros(x: Tensor, most: int) -> Tensor | None:
    """Return dense features as a ``torch.sparse_csr`` matrix, if at most so many aren't zero."""
    width, total = x.size(1), 0
    counts, cols, values = [], [], []
    for block in x.split(max(1, BLOCK // max(width, 1))):
        flat = block.reshape(-1)
        total += int(torch.count_nonzero(flat))
        if total > most:
            return None
        place = flat.nonzero().view(-1)
        counts.append(torch.bincount(place // width, minlength=block.size(0)))
        cols.append((place % width).int())
        values.append(flat[place])
    rowptr = torch.zeros(x.size(0) + 1, dtype=torch.long, device=x.device)
    torch.cumsum(torch.cat(counts), 0, out=rowptr[1:])
    return to_csr_features(sparse_csr(rowptr, torch.cat(cols).long(), torch.cat(values), width))


# NaN and infinite values --------------------------------------------------------------------------


def check_finite(name: str, x: Any, start: int | None = None) -> None:
    """Refuse features that hold NaN or infinite values; of sparse ones those that are stored.

    Args:
        name: What errors call them.
        x: The features, of shape ``[rows, ...]``; anything that isn't a tensor of real numbers is
            accepted.
        start: The number of the first row, if ``x`` is a block of rows. (default: all rows)

    Raises:
        ValueError: Naming the first such value, and their number.
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.dim() == 0:
        return
    x = x.detach()
    found = _find_non_finite_sparse(x) if is_sparse(x) else _find_non_finite(x)
    if found is None:
        return
    row, column, value, count = found
    where = f"row {(start or 0) + row}" + f", column {column}" * (x.dim() > 1)
    many = f"{'' if start is None else 'at least '}{count} such value{'s' * (count > 1)}"
    raise ValueError(
        f"'{name}' holds a NaN or infinite value in {where} ({value}; {many}): replace it, for "
        f"example with torch.nan_to_num({name.split('.')[-1]}), or accept it by check=False"
    )


def _find_non_finite(x: Tensor) -> tuple[int, int, float, int] | None:
    """Return row, column and value of the first non-finite element, and their number.

    Blocks with a finite minimum and maximum are skipped: both are NaN if an element is.
    """
    found, count = None, 0
    rows = max(1, BLOCK // max(1, x[:1].numel()))
    for begin in range(0, x.size(0), rows):
        block = x[begin : begin + rows]
        if block.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(block))).all()):
            continue
        wrong = ~torch.isfinite(block).flatten(1) if block.dim() > 1 else ~torch.isfinite(block)
        count += int(wrong.sum())
        if found is None:
            row, *column = wrong.nonzero()[0].tolist()
            value = float(block[row].flatten()[column[0] if column else 0])
            found = begin + row, column[0] if column else 0, value
    return None if found is None else (*found, count)


def _find_non_finite_sparse(x: Tensor) -> tuple[int, int, float, int] | None:
    """Do the same for the stored values of a ``torch.sparse_csr`` matrix."""
    rowptr, col, values = csr_parts(x)
    found = _find_non_finite(values)
    if found is None:
        return None
    entry, _, value, count = found
    return _row_of_entry(rowptr, entry), int(col[entry]), value, count


def _row_of_entry(rowptr: Tensor, entry: int) -> int:
    """Return the row of a stored value."""
    return int(torch.searchsorted(rowptr, rowptr.new_tensor([entry]), right=True)) - 1


def check_data_features(data: Data, with_mapped: bool = False) -> None:
    """Refuse NaN and infinite features of nodes and edges.

    Args:
        data: The graph.
        with_mapped: Also check features that are mapped from a file, which were checked when it was
            written. (default: ``False``)

    Raises:
        ValueError: See :func:`check_finite`.
    """
    for key in ("x", "edge_attr"):
        value = data.get(key)
        is_mapped = hasattr(value, MAPPED) or get_mapped_rows(value) is not None
        if with_mapped or not is_mapped:
            check_finite(key, value)
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
            warn(
                f"'{key}' of the graph is computed of a tensor that requires a gradient, such as "
                "by gas.cluster, and PyTorch goes back through this once: set "
                f"graph.{key} = torch.nn.Parameter(graph.{key}.detach()), for the optimizer"
            )
