"""A graph in a folder of tables and arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    read_nodes,
    set_once,
    to_common_type,
)
from gas.datasets.roles import (
    EDGE_COLUMNS,
    INDEX,
    NODE_COLUMNS,
    SPLITS,
    TYPE,
    TYPE_NAMES,
    find_files,
    leave_out,
    open_table,
)
from gas.datasets.tables import PARQUET, TEXT, Table, format_of, plain_ids
from gas.datasets.types import load_types, number_types, place_types, read_names

NODE_ROLES = ("node_id", "nodes", "x", "y", "node_type", "split")  # Files about nodes.
EDGE_IDS = ("id", "edge_id", "edgeid", "index")  # Columns that are no attributes.


def read_folder(path: Path, columns: Mapping[str, str]) -> Data:
    """Read the graph of a folder, or of a file of its edges; see :func:`gas.open_graph`."""
    check_columns(columns)
    files = files_of(path)
    data = Data()
    tables = [read_nodes(files[role], role, columns) for role in NODE_ROLES if role in files]
    check_node_columns(tables, columns, files, path)
    nodes = merge(tables, data)
    ends = _read_edges(files, columns, data)
    if nodes is None:
        ids = np.unique(np.concatenate(to_common_type(ends[0][1], ends[1][1])))
        nodes = Nodes(len(ids), ids, files["edges"].name)
    rows = [nodes.rows(distinct, files["edges"].name)[codes] for codes, distinct in ends]
    data.edge_index = torch.from_numpy(np.stack(rows))
    data.num_nodes = nodes.num_nodes
    if nodes.ids is not None:
        data.node_id = nodes.ids
    add_masks(files, nodes, data)
    add_type_names(files, data, TYPE_NAMES)
    return data


def add_type_names(files: Mapping[str, Path], data: Data, roles: Iterable[str]) -> None:
    """Renumber types in the order of the files with their names, if there are any."""
    for names in roles:
        key = TYPE_NAMES[names]
        if names in files and key not in data:
            leave_out_names(files[names], key)
        elif names in files:
            listed = read_names(files[names])
            places = place_types(data[names], listed, files[names])
            data[key], data[names] = torch.from_numpy(places)[data[key]], listed


def leave_out_names(file: Path, key: str) -> None:
    """Warn of names of types where there are no types."""
    leave_out([f"the file {file.name} without {key}.npy"], str(file.parent))


def add_masks(files: Mapping[str, Path], nodes: Nodes, data: Data) -> None:
    """Set the masks that are in files of their own."""
    for part in SPLITS:
        for role in (part, f"{part}_mask"):
            if role in files:
                set_once(data, f"{part}_mask", _mask(files[role], role, nodes), files[role].name)


def _read_edges(
    files: Mapping[str, Path], columns: Mapping[str, str], data: Data
) -> list[tuple[Any, np.ndarray]]:
    """Read weights and attributes of edges; return sources, and targets.

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
                raise missing_end_error(file, int((codes < 0).argmax()))
        if "weight" in found:
            data.edge_weight = torch.from_numpy(table.numbers([found["weight"]])[:, 0])
        if "edge_type" in found:
            types = number_types(*table.values(found["edge_type"]), file)
            data.edge_type, data.edge_type_names = types
        if features:
            data.edge_attr = torch.from_numpy(table.numbers(features))
            check_numbers(data.edge_attr.numpy(), file, features)
    for role in ("edge_weight", "edge_attr"):
        if role in files:
            value = tensor_of(_array(files[role]), str(files[role])).float()
            set_once(
                data, role, value.squeeze(1) if value.shape[1:] == (1,) else value, str(files[role])
            )
    if "edge_type" in files:
        file = files["edge_type"]
        value, names = number_types(*read_types(file), file)
        set_once(data, "edge_type", value, str(file))
        data.edge_type_names = names
    return ends


def edge_ends(array: np.ndarray, file: Path) -> np.ndarray:
    """Return an array of edges as sources and targets, of shape ``[2, E]``.

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
    """Return a table of edges, the columns of ends and weights, and those of attributes.

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
    if not {"source", "target"} & set(found) and len(table.types) == len(rest) == 2:
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


def missing_end_error(file: Path, row: int) -> ValueError:
    """Return the error for an edge without a source or a target."""
    return ValueError(f"{file} has an edge with one end only, in row {row}")


def check_numbers(values: np.ndarray, file: Path, names: Sequence[str], first: int = 0) -> None:
    """Refuse rows of attributes, from row ``first`` on, in which a number is missing.

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


def read_types(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a file of the types of edges, in their order: codes, and the distinct types."""
    if format_of(file) == ".npy":
        return load_types(file)
    table, found = open_table(file, {"edge_type": EDGE_COLUMNS["edge_type"]}, {})
    if len(table.types) != 1:
        raise ValueError(f"{file} has the columns {', '.join(table.types)}, expected one, of types")
    return table.values(found.get("edge_type", next(iter(table.types))))


def _array(file: Path) -> np.ndarray:
    """Return an array, or the columns of a table of numbers."""
    if format_of(file) == ".npy":
        return load_array(file)
    table, _ = open_table(file, {}, {})
    return table.numbers(list(table.types))


def _mask(file: Path, role: str, nodes: Nodes) -> Tensor:
    """Return a mask, or that of a list of nodes, by their ids."""
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
