"""Write a clustered graph into a folder, array by array, so that it needn't fit memory twice."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import cumsum

from gas.graph.attributes import PARTS, PERM, SHARDS, is_node_list, is_row_per_edge, is_row_per_node
from gas.graph.edges import Edges, to_csr
from gas.graph.folder.description import (
    COL,
    KEY,
    PARTS_OF_CSR,
    ROWPTR,
    TAKEN,
    TORCH_TYPES,
    WEIGHT,
    Array,
    Description,
    Sparse,
    dtype_name,
)
from gas.graph.folder.new import NewFolder
from gas.graph.folder.npy import array_of
from gas.graph.permute import invert_permutation, renumber_ids
from gas.history import Encoded
from gas.native import MOST_INT32, csr_parts, gather_sparse_rows, human, is_sparse

BLOCK_BYTES = 1 << 24  # Rows are renumbered in blocks of this size.


class GraphWriter:
    """Writes a graph with its nodes renumbered. The constructor checks that this is possible.

    Args:
        folder: The folder.
        data: The graph before renumbering.
        edges: Its edges, from :func:`gas.graph.read_graph`.

    Raises:
        ValueError: If an attribute can't be written, naming it; nothing has been written then.
    """

    def __init__(self, folder: NewFolder, data: Data, edges: Edges) -> None:
        self._folder, self._data, self._edges = folder, data, edges
        num_nodes, num_edges = self._edges.num_nodes, self._edges.src.numel()
        small = max(num_nodes, num_edges) <= MOST_INT32
        self._index_type = torch.int32 if small else torch.int64
        index = dtype_name(self._index_type)
        arrays: dict[str, Array | Sparse] = {
            ROWPTR: Array(f"{ROWPTR}.npy", index, (num_nodes + 1,)),
            COL: Array(f"{COL}.npy", index, (num_edges,)),
        }
        weight = self._edges.weight
        if weight is not None:
            arrays[WEIGHT] = Array(f"{WEIGHT}.npy", dtype_name(weight.dtype), (num_edges,))
        _check_weights(data, weight)
        attributes: dict[str, Any] = {}
        left_out = (*TAKEN, PERM, PARTS, WEIGHT)
        for key, value in data:
            if key in left_out:
                continue
            if KEY.fullmatch(key) is None or key in (ROWPTR, COL):
                raise ValueError(
                    f"'data' has an attribute {key!r}, which a graph folder can't have: rename it, "
                    "to a word of letters, digits and _ that isn't 'rowptr' or 'col'"
                )
            if isinstance(value, Tensor | np.ndarray):
                files = Description(0, 0, arrays, {}).iter_arrays()
                file = _choose_file_name(key, {array.file for _, array in files})
                arrays[key] = describe_array(key, value, file)
            else:
                attributes[key] = _to_json(key, value)
        arrays[PERM] = Array(f"{PERM}.npy", "int64", (num_nodes,))
        self._said = Description(num_nodes, num_edges, arrays, attributes)

    def write(
        self,
        perm: Tensor,
        ptr: Tensor,
        shards: Tensor | None = None,
        before: Tensor | None = None,
        log: bool = True,
    ) -> None:
        """Write everything.

        Args:
            perm: The row of ``data`` that each node was, of shape ``[N]``, int64.
            ptr: The parts, of shape ``[num_parts + 1]``.
            shards: The first row of each shard, of shape ``[shards + 1]``. (default: no shards)
            before: The original row of each node of ``data``. (default: its row in ``data``)
            log: Report progress on standard error. (default: ``True``)
        """
        start = time.perf_counter()
        first = perm if before is None else before[perm]
        found = {PERM: first, PARTS: ptr} | ({} if shards is None else {SHARDS: shards})
        arrays = {
            **self._said.arrays,
            **{key: Array(f"{key}.npy", "int64", tuple(of.shape)) for key, of in found.items()},
        }
        said = self._said._replace(arrays=arrays)
        self._folder.begin((array.file for _, array in said.iter_arrays()), said.nbytes)
        new_id = invert_permutation(perm)
        e_id = self._write_edges(said, new_id)
        for key, array in arrays.items():
            if key in found:
                write_rows(self._folder, array, found[key])
            elif key not in (ROWPTR, COL, WEIGHT):
                write_rows(self._folder, array, *self._renumber(key, perm, new_id, e_id))
        self._folder.finish(said)
        if log:
            took = f"{human(said.nbytes)} [{time.perf_counter() - start:.2f} s]"
            print(f"Wrote the graph into {self._folder.path}: {took}", file=sys.stderr)

    def _write_edges(self, said: Description, new_id: Tensor) -> Tensor | None:
        """Write rows, columns and weights; return the position of each entry in ``data``."""
        src, dst, weight, _ = self._edges
        new = self._edges._replace(src=new_id[src.cpu()], dst=new_id[dst.cpu()])
        csr = to_csr(new, small=self._index_type == torch.int32)
        del new
        rowptr, col = said.arrays[ROWPTR], said.arrays[COL]
        write_rows(self._folder, rowptr, csr.rowptr.to(self._index_type))
        write_rows(self._folder, col, csr.col)
        if weight is not None:
            write_rows(self._folder, said.arrays[WEIGHT], weight, csr.e_id)
        return csr.e_id

    def _renumber(
        self, key: str, perm: Tensor, new_id: Tensor, e_id: Tensor | None
    ) -> tuple[Any, Tensor | None]:
        """Return an attribute with new node ids, and the order in which its rows are written."""
        data, value = self._data, self._data[key]
        if key == "edge_label_index":
            return new_id[value.long().cpu()], None
        if is_node_list(key, value):
            return renumber_ids(key, value, new_id), None
        if is_row_per_node(data, key):
            return value, perm
        return value, e_id if is_row_per_edge(data, key) else None


def _check_weights(data: Data, weight: Tensor | None) -> None:
    """Refuse an ``edge_weight`` that differs from the values of ``adj_t``: it would be lost."""
    other = data.get(WEIGHT)
    if "adj_t" not in data or other is None:
        return
    if weight is None or not torch.equal(weight.view(-1), other.view(-1)):
        raise ValueError(
            "'data' has an 'adj_t' and an 'edge_weight' that isn't its values: delete one of them"
        )


def _choose_file_name(key: str, taken: set[str]) -> str:
    """Choose a file name that is unique, also if case is ignored."""
    lower, name, number = {file.lower() for file in taken}, key, 1
    ours = {f"{own}.npy" for own in (PERM, PARTS, SHARDS, WEIGHT)}
    while f"{name}.npy".lower() in lower | ours:
        number += 1
        name = f"{key}-{number}"
    return f"{name}.npy"


def describe_array(key: str, value: Tensor | np.ndarray, file: str) -> Array | Sparse:
    """Describe how an array or a tensor is stored in a file."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "U":
            return Array(file, f"<U{max(value.dtype.itemsize // 4, 1)}", value.shape, numpy=True)
        if value.dtype.name in TORCH_TYPES:
            return Array(file, value.dtype.name, value.shape, numpy=True)
        raise _unwritable_error(key, f"an array of {value.dtype}", "numbers or text")
    shape = tuple(value.shape)
    if isinstance(value, Encoded):
        store = value.store
        stored = (store.num_rows, store.columns)
        return Array(file, dtype_name(store.dtype), stored, value.codec.name, value.size(1))
    if is_sparse(value) and value.dim() == 2:
        stem = file.removesuffix(".npy")
        made = (
            Array(f"{stem}.{name}.npy", dtype_name(part.dtype), tuple(part.shape))
            for name, part in zip(PARTS_OF_CSR, csr_parts(value), strict=True)
        )
        return Sparse(shape, *made)
    dtype = dtype_name(value.dtype)
    if value.layout != torch.strided or dtype not in TORCH_TYPES:
        raise _unwritable_error(
            key, f"{value.layout} of {value.dtype}", "a dense tensor of numbers"
        )
    return Array(file, dtype, shape)


def _unwritable_error(key: str, found: str, expected: str) -> ValueError:
    return ValueError(
        f"'{key}' is {found}, which can't be written into a graph folder: make it {expected}, or "
        "delete it"
    )


def _to_json(key: str, value: Any) -> Any:
    """Convert a value to JSON; tuples become lists."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, list | tuple):
        return [_to_json(key, part) for part in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _to_json(key, part) for name, part in value.items()}
    try:
        if value is None or isinstance(value, bool | int | float | str):
            return json.loads(json.dumps(value, allow_nan=False))
    except ValueError:  # NaN and the infinite.
        raise _unwritable_error(key, repr(value), "a finite number") from None
    raise _unwritable_error(
        key, f"of type {type(value).__name__}", "a tensor, or text and numbers"
    ) from None


def write_rows(
    folder: NewFolder, array: Array | Sparse, value: Any, index: Tensor | None = None
) -> None:
    """Write the rows of a tensor or an array.

    Args:
        folder: The folder.
        array: The description of what is written, from :func:`describe_array`.
        value: The tensor or the array.
        index: The rows to write, in this order, of shape ``[n]``. (default: all)
    """
    if isinstance(array, Sparse):
        count = csr_parts(value)[0].diff()
        count = count if index is None else count[index.long()]
        write_rows(folder, array.rowptr, cumsum(count))
        for number, part in ((1, array.col), (2, array.value)):
            rows = (gather_sparse_rows(value, ids) for ids in _blocks(value, index))
            folder.write(part, (array_of(csr_parts(block)[number]) for block in rows))
    elif isinstance(value, np.ndarray):
        folder.write(array, [value])
    elif isinstance(value, Encoded):
        folder.write(array, (array_of(value.read_stored(ids)) for ids in _blocks(value, index)))
    elif value.dim() == 0:
        folder.write(array, [array_of(value)])
    else:
        value = value.detach()
        folder.write(array, (array_of(value[ids]) for ids in _blocks(value, index)))


def _blocks(value: Tensor, index: Tensor | None) -> Iterator[Tensor]:
    """Yield the rows to read, in blocks."""
    num_rows = value.size(0) if index is None else index.numel()
    width = value.numel() // max(value.size(0), 1) if value.layout == torch.strided else 1
    step = max(1, BLOCK_BYTES // max(1, width * value.element_size()))
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        yield torch.arange(first, last) if index is None else index[first:last].long()
