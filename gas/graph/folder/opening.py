"""Open a graph folder: check it, and map it into memory."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, Dataset

from gas.graph.folder.description import (
    COL,
    NAME,
    PARTS_OF_CSR,
    ROWPTR,
    WEIGHT,
    Array,
    Description,
    Sparse,
    read_description,
    refuse,
)
from gas.graph.folder.new import MARK
from gas.graph.folder.npy import check_inside, map_array, tensor_of
from gas.graph.layout import implicit_ones
from gas.history import Codec, DiskStore, Encoded, TableStore
from gas.native import is_valid_rowptr, sparse_csr

BLOCK = 1 << 22  # Ids that are checked at a time.
MAPPED = "_gas_mapped"  # An attribute of tensors that are mapped from a file of a folder.


def is_graph_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with a ``graph.json``."""
    folder = Path(path)
    if (folder / NAME).is_file():
        return True
    if (folder / MARK).is_file():
        raise ValueError(
            f"{str(path)!r} is a graph folder that was left unfinished: do again what wrote it, or "
            "remove it"
        )
    return False


def open_if_path(graph: Any, name: str = "data") -> Any:
    """Open a graph folder that is given as a path; return anything else as it is."""
    if not isinstance(graph, str | Path):
        return graph
    if not is_graph_folder(graph):
        raise ValueError(
            f"'{name}' is {str(graph)!r}, which has no {NAME}: expected a folder that "
            "gas.cluster(data, num_parts, out=folder) has written; tables and arrays are read by "
            "gas.open_graph(path)"
        )
    return open_folder(graph)


def check_is_graph(graph: Any, name: str = "data", or_loader: bool = False) -> None:
    """Refuse objects that aren't graphs, such as tensors, tuples, data sets and models."""
    others = Tensor | Sequence | Dataset | numbers.Number | torch.nn.Module
    is_loader = isinstance(graph, DataLoader)
    if graph is None or isinstance(graph, others) or (is_loader and not or_loader):
        raise ValueError(
            f"'{name}' is a {type(graph).__name__}, expected a graph: a torch_geometric.data.Data, "
            "such as dataset[0]"
        )


def open_folder(folder: str | Path, check: bool = True) -> Data:
    """Map the graph of a folder into memory; see :func:`gas.open_graph`.

    Args:
        folder: The folder.
        check: Check every id of the edges, and of ``perm``. (default: ``True``)
    """
    folder = Path(folder)
    path = folder / NAME
    check_inside(path)
    said = read_description(path)
    arrays = {key: map_array(folder, array) for key, array in said.iter_arrays()}
    _check_content(folder, said, arrays, check)
    parts: dict[str, Any] = {
        key: arrays[key] if array.numpy else tensor_of(arrays[key], array)
        for key, array in said.iter_arrays()
    }
    data = Data()
    for key, array in said.arrays.items():
        if key not in (ROWPTR, COL, WEIGHT):
            data[key] = _make_attribute(key, array, parts)
    for key, value in said.attributes.items():
        data[key] = value
    weight = parts[WEIGHT] if WEIGHT in parts else implicit_ones(said.num_edges)
    data.adj_t = sparse_csr(parts[ROWPTR], parts[COL], weight, said.num_nodes)
    setattr(data.adj_t, MAPPED, True)
    data.num_nodes = said.num_nodes
    return data


def _make_attribute(key: str, array: Array | Sparse, parts: dict[str, Any]) -> Any:
    """Make an attribute: a tensor, a sparse matrix, encoded rows, or a NumPy array."""
    if isinstance(array, Sparse):
        rowptr, col, value = (parts[f"{key}.{name}"] for name in PARTS_OF_CSR)
        return sparse_csr(rowptr, col, value, array.shape[1])
    tensor = parts[key]
    if array.numpy:
        return tensor
    if array.codec is None:
        setattr(tensor, MAPPED, True)
        return tensor
    return Encoded.of(MappedStore(tensor), Codec(array.codec), array.width or 0, "disk")


def get_mapped_rows(x: Any) -> Encoded | None:
    """Return features that are mapped from a file, as encoded rows; ``None`` for others."""
    if isinstance(x, Encoded):
        return x if x.store.direct and x.store.tier == "disk" else None
    is_matrix = getattr(x, MAPPED, False) and x.dim() == 2
    if not is_matrix or x.dtype not in (torch.float32, torch.float64):
        return None
    return Encoded.of(MappedStore(x), Codec.of(x.dtype), x.size(1), "disk")


class MappedStore(TableStore):
    """Store of rows in a graph folder; copies of it are in temporary files."""

    tier = "disk"

    def clone(self) -> DiskStore:
        """See :class:`gas.history.Store`."""
        twin = DiskStore(self.num_rows, self.columns, self.dtype)
        twin.table.copy_(self.table)
        return twin


# What the arrays hold -----------------------------------------------------------------------------


def _check_content(
    folder: Path, said: Description, arrays: dict[str, np.ndarray], check: bool
) -> None:
    """Refuse decreasing pointers, and ids out of range."""
    ends = {ROWPTR: (COL, said.num_edges), "parts": (None, said.num_nodes)}
    ends["shards"] = None, said.num_nodes
    ids = {COL: said.num_nodes}
    for key, array in said.arrays.items():
        if isinstance(array, Sparse):
            ends[f"{key}.rowptr"] = f"{key}.col", array.col.shape[0]
            ids[f"{key}.col"] = array.shape[1]
    files = {key: folder / array.file for key, array in said.iter_arrays()}
    for key, (_, end) in ends.items():
        if key in arrays and not is_valid_rowptr(torch.from_numpy(arrays[key]), end):
            found = f"from {arrays[key][0]} to {arrays[key][-1]}"
            refuse(files[key], f"'{key}'", found, f"numbers that rise from 0 to {end}, never fall")
    if not check:
        return
    for key, size in ids.items():
        _check_ids(files[key], key, arrays[key], size)
    if "perm" in arrays:
        _check_ids(files["perm"], "perm", arrays["perm"], said.num_nodes)
        seen = np.zeros(said.num_nodes, bool)
        for first in range(0, said.num_nodes, BLOCK):
            seen[arrays["perm"][first : first + BLOCK]] = True
        if not seen.all():
            found = f"without {int(seen.argmin())}"
            refuse(files["perm"], "'perm'", found, "every row exactly once")


def _check_ids(path: Path, key: str, ids: np.ndarray, size: int) -> None:
    """Refuse ids outside ``[0, size)``."""
    for first in range(0, len(ids), BLOCK):
        block = ids[first : first + BLOCK]
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= size:
            at = first + int((block == (low if low < 0 else high)).argmax())
            refuse(path, f"'{key}'", f"{ids[at]} at {at}", f"ids in [0, {size})")
