"""Features that aren't numbers in a row: sparse ones, such as words of texts, and encoded ones.

Sparse features are read once, as ``torch.sparse_csr`` matrices.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.history import Encoded
from gas.native import (
    MOST_INT32,
    accept_beta_state,
    gather_sparse_rows,
    is_sparse,
    parts,
    sorted_rows,
    sparse_csr,
)

LAYOUTS = (torch.sparse_csr, torch.sparse_coo, torch.sparse_csc)


def with_csr_features(data: Data, name: str = "x") -> Data:
    """Return a graph whose sparse features are ready for mini-batches: itself, if they are already.

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
    if not is_matrix(x):
        return data
    made = to_csr_features(x, name)
    if made is x:
        return data
    out = copy.copy(data)
    out.x = made
    return out


def is_matrix(x: Any) -> bool:
    """Return whether features are a sparse matrix, of PyTorch or SciPy."""
    if isinstance(x, Tensor):
        return x.layout != torch.strided
    return type(x).__module__.startswith("scipy.sparse")


def to_csr_features(x: Any, name: str = "x") -> Tensor:
    """Sparse features as a ``torch.sparse_csr`` matrix: itself, if it is one in order.

    In order are columns that rise in each row, each there once, and indices of int32, where these
    can count the entries. Entries that are there twice are added up; zeros that are stored stay.

    Args:
        x: A ``torch.sparse_csr``, ``sparse_csc`` or ``sparse_coo`` matrix of shape ``[N, F]``, or
            one of SciPy, whose values become those of the default type.
        name: What errors call it. (default: ``"x"``)

    Raises:
        ValueError: If it is something else, or its indices are none of a matrix.
    """
    accept_beta_state()
    if not isinstance(x, Tensor):
        x = _of_scipy(x, name)
    elif x.layout not in LAYOUTS or x.dim() != 2 or x.dense_dim() != 0:
        raise ValueError(
            f"'{name}' is {x.layout} of shape {list(x.shape)}, expected torch.sparse_csr of shape "
            f"[N, F]: pass {name}.to_dense().flatten(1).to_sparse_csr()"
        )
    if x.layout == torch.sparse_csr:
        _check(x, name)
        if not _is_in_order(x):
            x = _coo(x)
    elif x.layout == torch.sparse_csc:
        _check(x, name)
        x = _coo(x)
    if x.layout == torch.sparse_coo:
        x = x.coalesce().to_sparse_csr()
    rowptr, col, value = parts(x)
    if rowptr.dtype == torch.int64 and max(col.numel(), x.size(1)) <= MOST_INT32:
        x = sparse_csr(rowptr.int(), col.int(), value, x.size(1))
    return x


def _of_scipy(x: Any, name: str) -> Tensor:
    """Return a SciPy matrix, or array, with its own memory where it can."""
    if x.ndim != 2 or x.dtype.kind not in "biuf":
        raise ValueError(
            f"'{name}' is a {type(x).__name__} of {x.dtype} and shape {list(x.shape)}, expected a "
            f"matrix of real numbers of shape [N, F]: pass {name}.astype('float32')"
        )
    csr = x.tocsr()
    rowptr, col = (torch.from_numpy(np.asarray(ids)) for ids in (csr.indptr, csr.indices))
    kind = torch.get_default_dtype()
    value = torch.from_numpy(np.ascontiguousarray(csr.data)).to(kind)
    if rowptr.dtype != col.dtype:
        rowptr, col = rowptr.long(), col.long()
    return sparse_csr(rowptr, col, value, csr.shape[1])


def _check(x: Tensor, name: str) -> None:
    """Refuse indices that point outside, which PyTorch looks at only if it is asked to."""
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


def _is_in_order(x: Tensor) -> bool:
    """Return whether columns rise in every row."""
    rowptr, col, _ = parts(x)
    return sorted_rows(rowptr, col, strict=True)


def _coo(x: Tensor) -> Tensor:
    """Return the same entries, of which PyTorch doesn't say that each is there once."""
    if x.layout == torch.sparse_csc:
        ptr, row, value = x.ccol_indices(), x.row_indices(), x.values()
        col = _expanded(ptr)
    else:
        ptr, col, value = parts(x)
        row = _expanded(ptr)
    index = torch.stack([row.long(), col.long()])
    return torch.sparse_coo_tensor(index, value, x.shape, check_invariants=False)


def _expanded(ptr: Tensor) -> Tensor:
    ids = torch.arange(ptr.numel() - 1, device=ptr.device)
    return torch.repeat_interleave(ids, ptr.diff())


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` in the form of ``x``: of sparse rows sparse ones, of encoded rows encoded ones.

    Args:
        x: The rows of nodes or edges, of shape ``[rows, ...]``.
        index: Which of them, of shape ``[n]``, int64.
    """
    if isinstance(x, Encoded):
        return x.rearranged(index)
    return gather_sparse_rows(x, index) if is_sparse(x) else x[index]


def dense(x: Any) -> Any:
    """Sparse features as a dense tensor, alone or in a pair; anything else as it is."""
    if isinstance(x, tuple):
        whole, own = (*x, None)[:2]
        if len(x) == 2 and is_sparse(whole) and is_sparse(own) and shares_rows(whole, own):
            rows = whole.to_dense()
            return rows, rows[: own.size(0)]
        return tuple(map(dense, x))
    return x.to_dense() if is_sparse(x) else x


def shares_rows(whole: Tensor, part: Tensor) -> bool:
    """Return whether sparse features are the first rows of others, in the same memory."""
    return (
        whole.crow_indices().data_ptr() == part.crow_indices().data_ptr()
        and whole.values().data_ptr() == part.values().data_ptr()
        and part.size(0) <= whole.size(0)
        and part.size(1) == whole.size(1)
    )
