"""A graph in a folder of tables and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.datasets.arrays import bool_mask, load_array, tensor_of
from gas.datasets.nodes import Nodes, list_of_ids, merge, of_one_type, read_nodes, set_once
from gas.datasets.roles import (
    EDGE_COLUMNS,
    INDEX,
    NODE_COLUMNS,
    SPLITS,
    find_files,
    leave_out,
    open_table,
)
from gas.datasets.tables import PARQUET, TEXT, format_of, plain_ids

EDGE_IDS = ("id", "edge_id", "edgeid", "index")  # Columns that are no attributes.


def read_folder(path: Path, columns: Mapping[str, str]) -> Data:
    """Reads the graph of a folder, or of a file of its edges; see :func:`gas.open_graph`."""
    unknown = set(columns) - set(EDGE_COLUMNS) - set(NODE_COLUMNS)
    if unknown:
        raise ValueError(
            f"'columns' has a name for {min(unknown)!r}, expected names for "
            f"{', '.join([*EDGE_COLUMNS, *NODE_COLUMNS])}"
        )
    if not path.is_dir() and format_of(path) not in (".npy", *PARQUET, *TEXT):
        raise ValueError(
            f"'path' is {str(path)!r}, of a format that isn't known: expected "
            f"{', '.join(('.npz', '.pt', '.npy', *PARQUET, *TEXT))}, or a folder of such files"
        )
    files = find_files(path) if path.is_dir() else {"edges": path}
    data = Data()
    about_nodes = [role for role in ("node_id", "nodes", "x", "y", "split") if role in files]
    tables = [read_nodes(files[role], role, columns) for role in about_nodes]
    for role in set(columns) - set(EDGE_COLUMNS):
        if not any(columns[role] in table.columns for table in tables):
            raise ValueError(
                f"'columns' calls the {role!r} of nodes {columns[role]!r}, but no table of {path} "
                "has such a column"
            )
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
    for part in SPLITS:
        for role in (part, f"{part}_mask"):
            if role in files:
                set_once(data, f"{part}_mask", _mask(files[role], role, nodes), files[role].name)
    return data


def _read_edges(
    files: Mapping[str, Path], columns: Mapping[str, str], data: Data
) -> list[tuple[Any, np.ndarray]]:
    """Reads weights and attributes of edges; returns sources, and targets.

    Either is which of the distinct ids each edge has, of shape ``[E]``, and these.
    """
    file = files["edges"]
    ends: list[tuple[Any, np.ndarray]]
    if format_of(file) == ".npy":
        array = load_array(file)
        if (
            array.ndim == 2
            and array.shape[1] == 2
            and not (len(array) == 2 and "index" in file.stem)
        ):
            array = array.T
        if array.ndim != 2 or len(array) != 2 or array.dtype.kind not in "iu":
            raise ValueError(
                f"{file} is of type {array.dtype} and shape {list(array.shape)}, expected integers "
                "of shape [2, E] or [E, 2]"
            )
        ends = [(slice(None), plain_ids(end)) for end in array]
    else:
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
        ends = [table.values(found[role]) for role in ("source", "target")]
        for codes, _ in ends:
            if (codes < 0).any():
                row = int((codes < 0).argmax())
                raise ValueError(f"{file} has an edge with one end only, in row {row}")
        features = [
            name for name in rest if table.is_numeric(name) and name.lower() not in EDGE_IDS
        ]
        if "weight" in found:
            data.edge_weight = torch.from_numpy(table.numbers([found["weight"]])[:, 0])
        if features:
            data.edge_attr = torch.from_numpy(table.numbers(features))
            if bool(data.edge_attr.isnan().any()):
                row, column = data.edge_attr.isnan().nonzero()[0].tolist()
                raise ValueError(
                    f"{file} has no number in row {row} of its attributes {', '.join(features)}, "
                    f"the {column + 1}. of them: fill in what is missing, or leave the column out"
                )
        leave_out([f"the column {name!r}" for name in rest if name not in features], str(file))
    for role in ("edge_weight", "edge_attr"):
        if role in files:
            value = tensor_of(_array(files[role]), str(files[role])).float()
            set_once(
                data, role, value.squeeze(1) if value.shape[1:] == (1,) else value, str(files[role])
            )
    return ends


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
