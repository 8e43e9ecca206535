"""A graph in a folder of tables and arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.datasets.arrays import bool_mask, load_array, tensor_of
from gas.datasets.nodes import (
    NodeFile,
    Nodes,
    list_of_ids,
    merge,
    of_one_type,
    read_nodes,
    set_once,
)
from gas.datasets.roles import (
    EDGE_COLUMNS,
    INDEX,
    NODE_COLUMNS,
    SPLITS,
    find_files,
    leave_out,
    open_table,
)
from gas.datasets.tables import PARQUET, TEXT, Table, format_of, plain_ids

EDGE_IDS = ("id", "edge_id", "edgeid", "index")  # Columns that are no attributes.


def read_folder(path: Path, columns: Mapping[str, str]) -> Data:
    """Reads the graph of a folder, or of a file of its edges; see :func:`gas.open_graph`."""
    check_columns(columns)
    files = files_of(path)
    data = Data()
    about_nodes = [role for role in ("node_id", "nodes", "x", "y", "split") if role in files]
    tables = [read_nodes(files[role], role, columns) for role in about_nodes]
    check_node_columns(tables, columns, path)
    nodes = merge(tables, data)
    ends = _read_edges(files, columns, data)
    if nodes is None:
        ids = np.unique(np.concatenate(of_one_type(ends[0][1], ends[1][1])))
        nodes = Nodes(len(ids), ids, files["edges"].name)
    rows = [nodes.rows(distinct, files["edges"].name)[codes] for codes, distinct in ends]
    data.edge_index = torch.from_numpy(np.stack(rows))
    data.num_nodes = nodes.num_nodes
    if nodes.ids is not None:
        data.node_id = nodes.ids
    add_masks(files, nodes, data)
    return data


def add_masks(files: Mapping[str, Path], nodes: Nodes, data: Data) -> None:
    """Sets the masks that have files of their own."""
    for part in SPLITS:
        for role in (part, f"{part}_mask"):
            if role in files:
                set_once(data, f"{part}_mask", _mask(files[role], role, nodes), files[role].name)


def _read_edges(
    files: Mapping[str, Path], columns: Mapping[str, str], data: Data
) -> list[tuple[Any, np.ndarray]]:
    """Reads weights and attributes of edges; returns sources, and targets.

    Either is which of the distinct ids each edge has, of shape ``[E]``, and these.
    """
    file = files["edges"]
    ends: list[tuple[Any, np.ndarray]]
    if format_of(file) == ".npy":
        ends = [(slice(None), plain_ids(end)) for end in edge_ends(load_array(file), file)]
    else:
        table, found, features = edge_columns(file, columns)
        ends = [table.values(found[role]) for role in ("source", "target")]
        for codes, _ in ends:
            if (codes < 0).any():
                raise one_end(file, int((codes < 0).argmax()))
        if "weight" in found:
            data.edge_weight = torch.from_numpy(table.numbers([found["weight"]])[:, 0])
        if features:
            data.edge_attr = torch.from_numpy(table.numbers(features))
            check_numbers(data.edge_attr.numpy(), file, features)
    for role in ("edge_weight", "edge_attr"):
        if role in files:
            value = tensor_of(_array(files[role]), str(files[role])).float()
            set_once(
                data, role, value.squeeze(1) if value.shape[1:] == (1,) else value, str(files[role])
            )
    return ends


def edge_ends(array: np.ndarray, file: Path) -> np.ndarray:
    """An array of edges as sources and targets, of shape ``[2, E]``.

    Raises:
        ValueError: If it is something else.
    """
    if array.ndim == 2 and array.shape[1] == 2 and not (len(array) == 2 and "index" in file.stem):
        array = array.T
    if array.ndim != 2 or len(array) != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{file} is of type {array.dtype} and shape {list(array.shape)}, expected integers "
            "of shape [2, E] or [E, 2]"
        )
    return array


def edge_columns(file: Path, columns: Mapping[str, str]) -> tuple[Table, dict[str, str], list[str]]:
    """A table of edges, the columns of their ends and weights, and those of their attributes.

    Raises:
        ValueError: If it can't be told which are the ends.
    """
    table, found = open_table(file, EDGE_COLUMNS, columns)
    others = [name for name in table.types if name not in found.values()]
    rest = [name for name in others if name.lower() not in INDEX]
    for role in EDGE_COLUMNS.keys() & columns.keys():
        if columns[role] not in table.types:
            raise ValueError(
                f"'columns' calls the {role!r} of edges {columns[role]!r}, but {file} has "
                f"{', '.join(table.types)}"
            )
    if not {"source", "target"} & set(found) and len(table.types) == 2:
        found = {"source": rest.pop(0), "target": rest.pop(0)}
    for role in ("source", "target"):
        if role not in found:
            raise ValueError(
                f"{file} has the columns {', '.join(table.types)}, none of which is known for "
                f"the {role} of edges: call it {role!r}, or pass columns={{{role!r}: ...}}"
            )
    features = [name for name in rest if table.is_numeric(name) and name.lower() not in EDGE_IDS]
    leave_out([f"the column {name!r}" for name in rest if name not in features], str(file))
    return table, found, features


def one_end(file: Path, row: int) -> ValueError:
    """What is said of an edge without a source or a target."""
    return ValueError(f"{file} has an edge with one end only, in row {row}")


def check_numbers(values: np.ndarray, file: Path, names: Sequence[str], first: int = 0) -> None:
    """Refuses rows of attributes, from row ``first`` on, in which a number is missing.

    Raises:
        ValueError: Naming the first.
    """
    if np.isnan(values).any():
        row, column = np.argwhere(np.isnan(values))[0].tolist()
        raise ValueError(
            f"{file} has no number in row {first + row} of its attributes {', '.join(names)}, the "
            f"{column + 1}. of them: fill in what is missing, or leave the column out"
        )


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuses names of columns for what nobody asks for.

    Raises:
        ValueError: Naming it.
    """
    unknown = set(columns) - set(EDGE_COLUMNS) - set(NODE_COLUMNS)
    if unknown:
        raise ValueError(
            f"'columns' has a name for {min(unknown)!r}, expected names for "
            f"{', '.join([*EDGE_COLUMNS, *NODE_COLUMNS])}"
        )


def files_of(path: Path) -> dict[str, Path]:
    """The files of a graph by what they hold: those of a folder, or one, of edges.

    Raises:
        ValueError: If there is none of a known format.
    """
    if not path.is_dir() and format_of(path) not in (".npy", *PARQUET, *TEXT):
        raise ValueError(
            f"'path' is {str(path)!r}, of a format that isn't known: expected "
            f"{', '.join(('.npz', '.pt', '.npy', *PARQUET, *TEXT))}, or a folder of such files"
        )
    return find_files(path) if path.is_dir() else {"edges": path}


def check_node_columns(tables: list[NodeFile], columns: Mapping[str, str], path: Path) -> None:
    """Refuses names of columns of nodes that no table has.

    Raises:
        ValueError: Naming the role.
    """
    for role in set(columns) - set(EDGE_COLUMNS):
        if not any(columns[role] in table.columns for table in tables):
            raise ValueError(
                f"'columns' calls the {role!r} of nodes {columns[role]!r}, but no table of {path} "
                "has such a column"
            )


def _array(file: Path) -> np.ndarray:
    """An array, or the columns of a table of numbers."""
    if format_of(file) == ".npy":
        return load_array(file)
    table, _ = open_table(file, {}, {})
    return table.numbers(list(table.types))


def _mask(file: Path, role: str, nodes: Nodes) -> Tensor:
    """A mask, or that of a list of nodes, by their ids."""
    if not role.endswith("_mask"):
        mask = torch.zeros(nodes.num_nodes, dtype=torch.bool)
        mask[torch.from_numpy(nodes.rows(list_of_ids(file), file.name))] = True
        return mask
    mask = bool_mask(tensor_of(_array(file), str(file)), role)
    if len(mask) != nodes.num_nodes:
        raise ValueError(
            f"{file} has {len(mask)} values, but {nodes.file} has {nodes.num_nodes} nodes: "
            "expected one per node; lists of nodes are called train_idx, val_idx and test_idx"
        )
    return mask.squeeze(1) if mask.shape[1:] == (1,) else mask
