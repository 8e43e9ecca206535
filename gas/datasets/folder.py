"""Read a graph from a folder of tables and arrays; features in blocks or at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.datasets.arrays import bool_mask, load_array, map_features, tensor_of
from gas.datasets.edges import EdgeStream, set_edges
from gas.datasets.nodes import (
    NodeFile,
    Nodes,
    collect_nodes,
    merge_files,
    read_id_list,
    read_nodes,
    set_attribute,
)
from gas.datasets.roles import (
    EDGE_COLUMNS,
    NODE_COLUMNS,
    SPLITS,
    TYPE,
    find_files,
    leave_out_names,
    open_table,
    place_types,
    read_names,
    read_numbers,
)
from gas.datasets.tables import PARQUET, TEXT, format_of
from gas.graph import is_graph_folder
from gas.history import Codec

NODE_ROLES = ("node_id", "nodes", "x", "y", "node_type", "split")  # Roles of files about nodes.


def float_type(*types: np.dtype) -> type:
    """Return float32 if it holds all values of some types, else float64."""
    return np.float32 if all(np.can_cast(kind, np.float32) for kind in types) else np.float64


class FeatureSource(NamedTuple):
    """Location of the features: the role of their file, their columns, and ids of rows, if any."""

    role: str
    names: tuple[str, ...]
    ids: np.ndarray | None

    def blocks(
        self, files: Mapping[str, Path], columns: Mapping[str, str], at_once: int = 4096
    ) -> Iterator[np.ndarray]:
        """Yield features in the order of their file, of shape ``[rows, F]``.

        They are float32 if that holds the values of the file's types, else float64.

        Args:
            files: The files by role.
            columns: Names of columns by role, given by the user.
            at_once: The number of rows to read at a time. (default: ``4096``)
        """
        file = files[self.role]
        if format_of(file) == ".npy":
            array = map_features(file)
            dtype = float_type(array.dtype)
            for first in range(0, max(1, len(array)), at_once):
                yield array[first : first + at_once].astype(dtype)
            return
        table, _ = open_table(file, NODE_COLUMNS, columns)
        dtype = float_type(*map(table.numpy_type, self.names))
        types = table.number_types(self.names, dtype)
        first = 0
        for block in table.pieces(types, at_once=at_once):
            yield table.floats(block, self.names, dtype, first).astype(dtype, copy=False)
            first += block.num_rows

    def read(self, files: Mapping[str, Path], columns: Mapping[str, str], nodes: Nodes) -> Tensor:
        """Read all features in the order of the nodes, float32, of shape ``[N, F]``.

        Raises:
            ValueError: If a value is too large for float32, naming it.
        """
        file, codec, first = files[self.role], Codec("float32"), 0
        rows = self.rows(nodes, file.name)
        x = torch.empty(nodes.num_nodes, len(self.names))
        for block in self.blocks(files, columns):
            values = codec.cast(torch.from_numpy(block), first, f"'x' of {file.name}")
            if first == 0:
                x = torch.empty(nodes.num_nodes, values.size(1))
            last = first + len(values)
            x[slice(first, last) if rows is None else rows[first:last]] = values
            first = last
        return x

    def rows(self, nodes: Nodes, file: str) -> np.ndarray | None:
        """Return the node of each row; ``None`` if they are in order."""
        if self.ids is None or nodes.ids is None:
            return None
        rows = nodes.rows(self.ids, file)
        return None if bool((rows == np.arange(len(rows))).all()) else rows


def find_features(read: Mapping[str, NodeFile], nodes: Nodes, has_x: bool) -> FeatureSource | None:
    """Find the dense features among files about nodes; ``None`` if there are none."""
    roles = [role for role, file in read.items() if file.features is not None]
    if not roles:
        return None
    file = read[roles[0]]
    if len(roles) + has_x > 1:
        raise ValueError(
            f"'x' is in {file.name}, and in another file as well: take one of them out"
        )
    if file.num_rows != nodes.num_nodes:
        raise ValueError(
            f"{file.name} has {file.num_rows} rows, but {nodes.file} has {nodes.num_nodes} "
            "nodes: expected one row per node"
        )
    return FeatureSource(roles[0], file.features or (), file.ids)


def read_folder(path: Path, columns: Mapping[str, str]) -> Data:
    """Read the graph of a folder, or of a file of its edges; see :func:`gas.open_graph`."""
    check_columns(columns)
    files = find_graph_files(path)
    stream = EdgeStream(files, columns)
    [block] = stream.blocks()
    ids = (block.source.distinct, block.target.distinct)
    nodes, data, features = read_node_table(path, files, columns, lambda: ids)
    if features is not None:
        data.x = features.read(files, columns, nodes)
    set_edges(stream, block, nodes, data)
    if nodes.ids is not None:
        data.node_id = nodes.ids
    return data


def find_feature_names(
    path: str | Path, columns: Mapping[str, str] | None = None
) -> list[str] | None:
    """Find the names of the columns that are features, in their order.

    Returns:
        The names; ``None`` if there are no tables with such columns.
    """
    path = Path(path)
    if path.suffix in (".npz", ".pt") or is_graph_folder(path):
        return None
    files = find_graph_files(path)
    read = (read_nodes(files[role], role, columns or {}) for role in NODE_ROLES if role in files)
    return next((list(file.features) for file in read if file.features), None)


def read_node_table(
    path: Path,
    files: Mapping[str, Path],
    columns: Mapping[str, str],
    edge_ids: Callable[[], Iterable[np.ndarray]],
) -> tuple[Nodes, Data, FeatureSource | None]:
    """Read the nodes, a graph with their attributes, and where their dense features are.

    Args:
        path: The folder.
        files: Its files by role.
        columns: Names of columns by role, given by the user.
        edge_ids: Returns the ids in edges, in blocks; called if no file lists the nodes.
    """
    read = {role: read_nodes(files[role], role, columns) for role in NODE_ROLES if role in files}
    check_node_columns(list(read.values()), columns, files, path)
    data = Data()
    nodes = merge_files(list(read.values()), data)
    if nodes is None:
        nodes = collect_nodes(edge_ids())
    data.num_nodes = nodes.num_nodes
    for part in SPLITS:
        for role in (part, f"{part}_mask"):
            if role in files:
                mask = _mask(files[role], role, nodes)
                set_attribute(data, f"{part}_mask", mask, files[role].name)
    names = files.get("node_type_names")
    if "node_type" not in data:
        leave_out_names(names, "node_type")
    elif names is not None:
        listed = read_names(names)
        places = place_types(data.node_type_names, listed, names)
        data.node_type, data.node_type_names = torch.from_numpy(places)[data.node_type], listed
    return nodes, data, find_features(read, nodes, "x" in data)


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse unknown roles in ``columns``."""
    if not isinstance(columns, Mapping):
        raise ValueError(
            f"'columns' is a {type(columns).__name__}, expected a dictionary of names by role, "
            "such as {'source': 'from', 'target': 'to'}"
        )
    unknown = set(columns) - {*EDGE_COLUMNS, *NODE_COLUMNS, TYPE}
    if unknown:
        raise ValueError(
            f"'columns' has a name for {min(unknown)!r}, expected names for "
            f"{', '.join([*EDGE_COLUMNS, *NODE_COLUMNS, TYPE])}"
        )


def find_graph_files(path: Path) -> dict[str, Path]:
    """Return the files of a folder by role; a single file is that of the edges."""
    if not path.is_dir() and format_of(path) not in (".npy", *PARQUET, *TEXT):
        raise ValueError(
            f"'path' is {str(path)!r}, of a format that isn't known: expected "
            f"{', '.join(('.npz', '.pt', '.npy', *PARQUET, *TEXT))}, or a folder of such files"
        )
    return find_files(path) if path.is_dir() else {"edges": path}


def check_node_columns(
    tables: list[NodeFile], columns: Mapping[str, str], files: Mapping[str, Path], path: Path
) -> None:
    """Refuse names in ``columns`` that no table has."""
    for role in set(columns) - set(EDGE_COLUMNS):
        known = [name for table in tables for name in table.columns]
        if role == TYPE and format_of(files["edges"]) != ".npy":
            known += open_table(files["edges"], EDGE_COLUMNS, columns)[0].types
        if columns[role] not in known:
            of = "edges or nodes" if role == TYPE else "nodes"
            raise ValueError(
                f"'columns' calls the {role!r} of {of} {columns[role]!r}, but no table of {path} "
                "has such a column"
            )


def _mask(file: Path, role: str, nodes: Nodes) -> Tensor:
    """Read a mask, or convert a list of ids of nodes to a mask."""
    if not role.endswith("_mask"):
        mask = torch.zeros(nodes.num_nodes, dtype=torch.bool)
        mask[torch.from_numpy(nodes.rows(read_id_list(file), file.name))] = True
        return mask
    array = load_array(file) if format_of(file) == ".npy" else read_numbers(file)
    mask = bool_mask(tensor_of(array, str(file)), role)
    if len(mask) != nodes.num_nodes:
        raise ValueError(
            f"{file} has {len(mask)} values, but {nodes.file} has {nodes.num_nodes} nodes: "
            "expected one per node; lists of nodes are called train_idx, val_idx and test_idx"
        )
    return mask.squeeze(1) if mask.shape[1:] == (1,) else mask
