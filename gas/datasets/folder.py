"""Read a graph from a folder of tables and arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.datasets.arrays import bool_mask, load_array, tensor_of
from gas.datasets.edges import EdgeStream, set_edges
from gas.datasets.features import FeatureSource, find_features
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
    open_table,
    read_numbers,
)
from gas.datasets.tables import PARQUET, TEXT, format_of
from gas.datasets.types import leave_out_names, place_types, read_names
from gas.graph import is_graph_folder

NODE_ROLES = ("node_id", "nodes", "x", "y", "node_type", "split")  # Roles of files about nodes.


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
