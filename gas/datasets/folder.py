"""A graph in a folder of tables and arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.datasets.arrays import bool_mask, load_array, tensor_of
from gas.datasets.edges import EdgeStream, set_edges
from gas.datasets.features import Features, find_features
from gas.datasets.nodes import (
    NodeFile,
    Nodes,
    distinct_ids,
    list_of_ids,
    merge,
    read_nodes,
    set_once,
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

NODE_ROLES = ("node_id", "nodes", "x", "y", "node_type", "split")  # Files about nodes.


class NodeTable(NamedTuple):
    """The nodes of a graph, a graph with what is known of them, and where their features are."""

    nodes: Nodes
    data: Data
    features: Features | None


def read_folder(path: Path, columns: Mapping[str, str]) -> Data:
    """Read the graph of a folder, or of a file of its edges; see :func:`gas.open_graph`."""
    check_columns(columns)
    files = files_of(path)
    stream = EdgeStream(files, columns)
    [block] = stream.blocks()
    ids = (block.source.distinct, block.target.distinct)
    nodes, data, features = read_node_table(path, files, columns, lambda: ids)
    if features is not None:
        [x] = features.blocks(files, columns)
        rows = features.rows(nodes, files[features.role].name)
        data.x = torch.from_numpy(x)
        if rows is not None:
            data.x = torch.empty_like(data.x).index_copy_(0, torch.from_numpy(rows), data.x)
    set_edges(stream, block, nodes, data)
    if nodes.ids is not None:
        data.node_id = nodes.ids
    return data


def read_node_table(
    path: Path,
    files: Mapping[str, Path],
    columns: Mapping[str, str],
    edge_ids: Callable[[], Iterable[np.ndarray]],
) -> NodeTable:
    """Read everything about nodes but their features.

    Args:
        path: The folder.
        files: Its files, by what they hold.
        columns: What the user says that columns are called.
        edge_ids: Returns the ids that edges name, some at a time; called if no file has nodes.

    Raises:
        ValueError: If a file doesn't say what it should, or contradicts another.
    """
    read = {role: read_nodes(files[role], role, columns) for role in NODE_ROLES if role in files}
    check_node_columns(list(read.values()), columns, files, path)
    data = Data()
    nodes = merge(list(read.values()), data)
    if nodes is None:
        nodes = distinct_ids(edge_ids())
    data.num_nodes = nodes.num_nodes
    for part in SPLITS:
        for role in (part, f"{part}_mask"):
            if role in files:
                set_once(data, f"{part}_mask", _mask(files[role], role, nodes), files[role].name)
    names = files.get("node_type_names")
    if names is not None and "node_type" not in data:
        leave_out_names(names, "node_type")
    elif names is not None:
        listed = read_names(names)
        places = place_types(data.node_type_names, listed, names)
        data.node_type, data.node_type_names = torch.from_numpy(places)[data.node_type], listed
    return NodeTable(nodes, data, find_features(read, nodes, "x" in data))


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse unknown roles in ``columns``.

    Raises:
        ValueError: Naming it.
    """
    unknown = set(columns) - {*EDGE_COLUMNS, *NODE_COLUMNS, TYPE}
    if unknown:
        raise ValueError(
            f"'columns' has a name for {min(unknown)!r}, expected names for "
            f"{', '.join([*EDGE_COLUMNS, *NODE_COLUMNS, TYPE])}"
        )


def files_of(path: Path) -> dict[str, Path]:
    """Return the files of a graph by what they hold: those of a folder, or one, of edges.

    Raises:
        ValueError: If there is none of a known format.
    """
    if not path.is_dir() and format_of(path) not in (".npy", *PARQUET, *TEXT):
        raise ValueError(
            f"'path' is {str(path)!r}, of a format that isn't known: expected "
            f"{', '.join(('.npz', '.pt', '.npy', *PARQUET, *TEXT))}, or a folder of such files"
        )
    return find_files(path) if path.is_dir() else {"edges": path}


def check_node_columns(
    tables: list[NodeFile], columns: Mapping[str, str], files: Mapping[str, Path], path: Path
) -> None:
    """Refuse names of columns of nodes, and of types, that no table has.

    Raises:
        ValueError: Naming the role.
    """
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
    """Return a mask, or that of a list of nodes, by their ids."""
    if not role.endswith("_mask"):
        mask = torch.zeros(nodes.num_nodes, dtype=torch.bool)
        mask[torch.from_numpy(nodes.rows(list_of_ids(file), file.name))] = True
        return mask
    array = load_array(file) if format_of(file) == ".npy" else read_numbers(file)
    mask = bool_mask(tensor_of(array, str(file)), role)
    if len(mask) != nodes.num_nodes:
        raise ValueError(
            f"{file} has {len(mask)} values, but {nodes.file} has {nodes.num_nodes} nodes: "
            "expected one per node; lists of nodes are called train_idx, val_idx and test_idx"
        )
    return mask.squeeze(1) if mask.shape[1:] == (1,) else mask
