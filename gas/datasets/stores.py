"""Graph folders as stores of PyG, for its loaders; and import from stores of PyG."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.index import ptr2index

from gas.datasets.roles import leave_out
from gas.graph import (
    COL,
    KEY,
    PARTS,
    PERM,
    ROWPTR,
    TORCH_TYPES,
    Array,
    Description,
    Edges,
    NewFolder,
    array_of,
    check_finite,
    dtype_name,
    is_row_per_node,
    open_folder,
    open_if_path,
    read_csr,
    read_edges,
    to_csr,
)
from gas.history import Encoded
from gas.native import gather_sparse_rows, is_sparse

BLOCK_BYTES = 1 << 24  # Bytes of features that are read from a store at a time.


class FolderStore(FeatureStore, GraphStore):
    """Read-only ``FeatureStore`` and ``GraphStore`` of PyG for a graph folder.

    PyG's loaders sample from it, and read the rows of a batch from the mapped files::

        store = gas.datasets.FolderStore("graph")
        loader = NeighborLoader((store, store), num_neighbors=[10, 10], batch_size=512)

    Nodes and edges have no type (``None``). The layout of edges is ``"csc"``. PyG's samplers need
    int64 ids: int32 ids of the folder are copied once, 8 bytes per edge.

    Args:
        graph: The path of the folder, or its graph from :func:`gas.open_graph`.

    Raises:
        ValueError: If there is no graph folder, or the graph has no edges.
    """

    def __init__(self, graph: str | Path | Data) -> None:
        FeatureStore.__init__(self)
        GraphStore.__init__(self)
        data = open_if_path(graph, "graph")
        csr, _ = read_csr(data, edge_weight=False)
        num_nodes = csr.rowptr.numel() - 1
        keys = [key for key, _ in data if key != PERM and is_row_per_node(data, key)]
        attr = EdgeAttr(None, EdgeLayout.CSC, True, (num_nodes, num_nodes))
        self.__dict__.update(_data=data, _csr=csr, _ids=None, _keys=keys, _edge_attr=attr)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Return the tensors with a row for each node."""
        return [TensorAttr(group_name=None, attr_name=key) for key in self._keys]

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        if attr.group_name is not None or attr.attr_name not in self._keys:
            return None
        value, index = self._data[attr.attr_name], attr.index
        if index is None or (isinstance(index, slice) and index == slice(None)):
            return value
        if is_sparse(value):
            return gather_sparse_rows(value, torch.arange(value.size(0))[index].view(-1))
        return value[index]

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        known = attr.group_name is None and attr.attr_name in self._keys
        return tuple(self._data[attr.attr_name].shape) if known else None

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Return the layout of the edges."""
        return [copy.copy(self._edge_attr)]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        if edge_attr.edge_type is not None or edge_attr.layout != EdgeLayout.CSC:
            return None
        if self._ids is None:
            self.__dict__["_ids"] = self._csr.col.long(), self._csr.rowptr.long()
        return self._ids

    def _refuse_change(self, *args: Any) -> bool:
        """Refuse to write or remove; the last argument describes a tensor or edges."""
        attr = args[-1]
        what = f"the tensor {attr.attr_name!r}" if isinstance(attr, TensorAttr) else "edges"
        raise ValueError(
            f"{what} can't be written or removed: a graph folder is as it was written; write "
            "another, gas.cluster(data, num_parts, out=folder)"
        )

    _put_tensor = _remove_tensor = _put_edge_index = _remove_edge_index = _refuse_change

    def __repr__(self) -> str:
        num_nodes, _ = self._edge_attr.size
        return f"{type(self).__name__}({num_nodes} nodes, {self._csr.col.numel()} edges)"


# As a source --------------------------------------------------------------------------------------


def get_stores(source: Any) -> tuple[FeatureStore, GraphStore] | None:
    """Return a pair of PyG's stores, or one object that is both; ``None`` for anything else."""
    if isinstance(source, FeatureStore) and isinstance(source, GraphStore):
        return source, source
    if isinstance(source, tuple) and len(source) == 2:
        features, graph = source
        if isinstance(features, FeatureStore) and isinstance(graph, GraphStore):
            return features, graph
    return None


def import_stores(
    features: FeatureStore, graph: GraphStore, folder: NewFolder, check: bool = True
) -> Data:
    """Write the graph of PyG's stores into a folder; see :func:`gas.datasets.import_graph`.

    All edges are loaded into memory; rows of tensors are read in blocks.
    """
    edges = _read_edges(features, graph)
    csr, num_nodes = to_csr(edges, small=True), edges.num_nodes
    index = "int32" if csr.col.dtype == torch.int32 else "int64"
    arrays = {
        ROWPTR: Array(f"{ROWPTR}.npy", index, (num_nodes + 1,)),
        COL: Array(f"{COL}.npy", index, (csr.col.numel(),)),
    }
    tensors: dict[str, TensorAttr] = {}
    left = []
    for attr in features.get_all_tensor_attrs():
        key = attr.attr_name
        array = _describe(features, attr, num_nodes)
        if array is None:
            left.append(f"the tensor {key!r} of {attr.group_name}")
        else:
            arrays[key], tensors[key] = array, attr
    leave_out(left, "'source'")
    arrays[PERM] = Array(f"{PERM}.npy", "int64", (num_nodes,))
    arrays[PARTS] = Array(f"{PARTS}.npy", "int64", (2,))
    said = Description(num_nodes, csr.col.numel(), dict(arrays), {})
    folder.begin((array.file for array in arrays.values()), said.nbytes)
    whole = {
        ROWPTR: csr.rowptr.to(csr.col.dtype),
        COL: csr.col,
        PERM: torch.arange(num_nodes),
        PARTS: torch.tensor([0, num_nodes]),
    }
    for key, ids in whole.items():
        folder.write(arrays[key], [array_of(ids)])
    for key, attr in tensors.items():
        rows = _read_rows(features, attr, arrays[key], check and key == "x")
        folder.write(arrays[key], rows)
    folder.finish(said)
    return open_folder(folder.path, check=False)


def _read_edges(features: FeatureStore, graph: GraphStore) -> Edges:
    """Read the edges of PyG's stores, which must hold one type of nodes and of edges."""
    attrs = graph.get_all_edge_attrs()
    kinds = {attr.edge_type for attr in attrs}
    groups = {attr.group_name for attr in features.get_all_tensor_attrs()}
    groups = {group for group in groups if not isinstance(group, tuple)}
    if len(kinds) != 1 or len(groups) > 1:
        raise ValueError(
            f"'source' has the types of edges {sorted(map(str, kinds))} and of nodes "
            f"{sorted(map(str, groups))}, expected one of each: gas trains on one graph"
        )
    by_layout = {attr.layout: attr for attr in attrs}
    layout = next(kind for kind in (EdgeLayout.COO, EdgeLayout.CSC, EdgeLayout.CSR)
                  if kind in by_layout)  # fmt: skip
    attr = by_layout[layout]
    row, col = graph.get_edge_index(attr)
    if layout == EdgeLayout.CSC:
        col = ptr2index(col.long())
    elif layout == EdgeLayout.CSR:
        row = ptr2index(row.long())
    of_nodes = [a for a in features.get_all_tensor_attrs() if not isinstance(a.group_name, tuple)]
    shapes = [features.get_tensor_size(replace(attr, index=None)) for attr in of_nodes]
    sizes = [shape[0] for shape in shapes if shape]
    sizes += [size for size in attr.size or () if size is not None]
    return read_edges(torch.stack([row.long(), col.long()]), max(sizes, default=None))


def _describe(features: FeatureStore, attr: TensorAttr, num_nodes: int) -> Array | None:
    """Describe how a tensor of nodes is stored; return ``None`` for others, which are left out."""
    key = attr.attr_name
    if isinstance(attr.group_name, tuple) or key in (PERM, PARTS):
        return None
    shape = features.get_tensor_size(replace(attr, index=None))
    first = features.get_tensor(replace(attr, index=torch.arange(min(1, num_nodes))))
    if isinstance(first, Encoded):
        first = first.dequantize()
    first = torch.as_tensor(first)
    fits = shape is not None and len(shape) > 0 and shape[0] == num_nodes
    is_dense = first.layout == torch.strided and dtype_name(first.dtype) in TORCH_TYPES
    if not fits or not is_dense or KEY.fullmatch(str(key)) is None or key in (ROWPTR, COL):
        found = f"{first.layout} of {first.dtype} and shape {shape and list(shape)}"
        raise ValueError(
            f"the tensor {key!r} of 'source' is {found}, expected a dense one with a row for each "
            f"of {num_nodes} nodes, and a name of letters, digits and _: leave it out"
        )
    assert shape is not None
    return Array(f"{key}.npy", dtype_name(first.dtype), tuple(shape))


def _read_rows(
    features: FeatureStore, attr: TensorAttr, array: Array, check: bool
) -> Iterator[np.ndarray]:
    """Yield all rows of a tensor in blocks."""
    num_rows = array.shape[0]
    step = max(1, BLOCK_BYTES * num_rows // max(1, array.nbytes))
    for first in range(0, num_rows, step):
        index = torch.arange(first, min(first + step, num_rows))
        rows = torch.as_tensor(features.get_tensor(replace(attr, index=index)))
        if check:
            check_finite(attr.attr_name, rows, first)
        yield array_of(rows)
