"""Read nodes from tables and arrays: ids, labels, types, splits and features."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.datasets.arrays import (
    are_implausible_classes,
    bool_mask,
    load_array,
    load_sparse,
    map_features,
    tensor_of,
    to_targets,
)
from gas.datasets.roles import (
    INDEX,
    NODE_COLUMNS,
    PART_OF,
    SPLITS,
    leave_out,
    number_array,
    number_types,
    open_table,
)
from gas.datasets.tables import Table, format_of, plain_ids
from gas.graph import Ids, encode_utf8

# Names of columns that may hold ids, such as user_id or nodeNumber.
LIKE_ID = re.compile(r"(^|[\W_])(id|index|idx|number|no|key|name)$")
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
AT_ONCE = 1 << 20  # Ids that are merged together.
MISSING = np.array(["nan", "NaN", "NA", "N/A", "null", "NULL", "None", "?"])  # Unknown labels.


class Nodes:
    """The nodes of a graph.

    Args:
        num_nodes: The number of nodes.
        ids: Their ids, of shape ``[N]``; ``None``: ids are rows.
        file: The name of the file that lists them.
    """

    def __init__(self, num_nodes: int, ids: np.ndarray | None, file: str) -> None:
        self.num_nodes, self.ids, self.file = num_nodes, ids, file

    @functools.cached_property
    def _index(self) -> Ids:
        return Ids(self.ids, self.num_nodes)

    def rows(self, ids: np.ndarray, file: str) -> np.ndarray:
        """Return the row of each node, by its id."""
        rows = self._index.rows(ids)
        known = rows >= 0
        if not known.all():
            row = ", whose rows are counted from 0" if self.ids is None else ""
            first = ids[~known][0].item()
            first = first.decode() if isinstance(first, bytes) else first
            raise ValueError(
                f"{file} names the node {first!r}, which is none of the "
                f"{self.num_nodes:,} nodes of {self.file}{row} ({(~known).sum():,} such ids): add "
                "them there, or take out what names them"
            )
        return rows


class NodeFile(NamedTuple):
    """Content of a file about nodes: attributes with a row for each of ``ids``."""

    name: str
    num_rows: int
    ids: np.ndarray | None
    attributes: dict[str, Tensor]
    columns: tuple[str, ...] = ()
    classes: list[str | int] | None = None
    features: tuple[str, ...] | None = None  # Columns, or () for an array; they are read later.
    types: list[str | int] | None = None


def read_nodes(file: Path, role: str, columns: Mapping[str, str]) -> NodeFile:
    """Read a file about nodes, except for dense features, which are only located.

    Args:
        file: The file.
        role: Its role: ``"nodes"``, ``"x"``, ``"y"``, ``"split"``, ``"node_id"`` or
            ``"node_type"``.
        columns: Names of columns by role, given by the user.
    """
    if role == "node_id":
        listed = read_id_list(file)
        return NodeFile(file.name, len(listed), _check_unique(listed, file), {})
    if format_of(file) == ".npz":
        x = load_sparse(file)
        return NodeFile(file.name, x.size(0), None, {role: x})
    if format_of(file) == ".npy":
        return _read_array(file, role)
    table, found = open_table(file, NODE_COLUMNS, columns)
    wanted = {"y": "label", "split": "split", "node_type": "node_type"}.get(role)
    rest = _find_columns(table, found, role, wanted)
    attributes: dict[str, Tensor] = {}
    ids = classes = types = None
    if "id" in found:
        codes, distinct = table.values(found["id"])
        ids = _check_unique(distinct[codes], file, codes < 0)
    if "label" in found:
        attributes["y"], classes = _read_labels(table, found["label"])
    if "node_type" in found:
        values = table.values(found["node_type"])
        attributes["node_type"], types = number_types(*values, file)
    if "split" in found:
        attributes |= _masks(*table.values(found["split"]), file)
    for key in found.keys() & {f"{part}_mask" for part in SPLITS}:
        mask = torch.from_numpy(table.numbers([found[key]])[:, 0])
        attributes[key] = bool_mask(mask, found[key])
    named = [name for name in rest if table.is_numeric(name) and wanted is None]
    others = [name for name in rest if name not in named]
    kinds = {name: "" if table.is_numeric(name) else " (not all numbers)" for name in others}
    leave_out([f"the column {name!r}{kind}" for name, kind in kinds.items()], str(file))
    if not attributes and not named and (ids is None or wanted):
        raise ValueError(
            f"{file} has the columns {', '.join(table.types)}, none of which is known as its "
            f"{wanted or 'id'!r}: rename one, or pass columns={{{wanted or 'id'!r}: ...}}"
        )
    if ids is not None:
        num_rows = len(ids)
    else:
        num_rows = len(next(iter(attributes.values()))) if attributes else table.count()
    features = tuple(named) if named else None
    known = tuple(table.types)
    return NodeFile(file.name, num_rows, ids, attributes, known, classes, features, types)


def _find_columns(table: Table, found: dict[str, str], role: str, wanted: str | None) -> list[str]:
    """Add the columns of ids and of the ``wanted`` role to ``found``; return the other columns."""
    file = table.path
    rest = [name for name in table.types if name not in found.values()]
    if not table.has_names and role != "x" and len(rest) > 1:
        raise ValueError(
            f"{file} has {len(rest)} columns without names: begin it with a line of names, such as "
            "id,label"
        )
    index = [name for name in rest if name.lower() in INDEX]
    if index and "id" not in found:
        found["id"] = index[0]
    rest = [name for name in rest if name not in index]
    like_ids = [name for name in rest if LIKE_ID.search(CAMEL.sub("_", name).strip().lower())]
    if like_ids and "id" not in found:
        raise ValueError(
            f"{file} has no column 'id', but {like_ids[0]!r}, which may be it: pass "
            f"columns={{'id': {like_ids[0]!r}}}, or give it another name if it is a feature"
        )
    if wanted and wanted not in found and len(rest) == 1:
        found[wanted] = rest.pop()
    return rest


def _read_array(file: Path, role: str) -> NodeFile:
    """Read an array of labels or types of nodes, or the number of rows of features."""
    if role == "node_type":
        value, names = number_array(load_array(file), file)
        return NodeFile(file.name, len(value), None, {role: value}, types=names)
    if role == "x":
        return NodeFile(file.name, len(map_features(file)), None, {}, features=())
    if role != "y":
        raise ValueError(f"{file} is an array, expected a table, or the names x.npy and y.npy")
    y = to_targets(tensor_of(load_array(file), str(file)))
    return NodeFile(file.name, len(y), None, {role: y})


def merge_files(read: list[NodeFile], data: Data) -> Nodes | None:
    """Merge the attributes of all files, in the order of the first file with ids."""
    if not read:
        return None
    first = next((file for file in read if file.ids is not None), read[0])
    nodes = Nodes(first.num_rows, first.ids, first.name)
    for file in read:
        if file.ids is None:
            if file.num_rows != nodes.num_nodes:
                raise ValueError(
                    f"{file.name} has {file.num_rows} rows, but {nodes.file} has "
                    f"{nodes.num_nodes}: expected one row per node, or a column 'id'"
                )
            rows = None
        else:
            rows = torch.from_numpy(nodes.rows(file.ids, file.name))
        for key, value in file.attributes.items():
            if rows is not None and file is not first:
                value = _scatter_rows(value, rows, nodes, key, file.name)
            set_attribute(data, key, value, file.name)
        if file.classes is not None:
            data.classes = file.classes
        if file.types is not None:
            data.node_type_names = file.types
    return nodes


def _scatter_rows(value: Tensor, rows: Tensor, nodes: Nodes, key: str, file: str) -> Tensor:
    """Assign rows to their nodes; other nodes get no label and no split."""
    if len(rows) == nodes.num_nodes:
        return torch.empty_like(value).index_copy_(0, rows, value)
    if key == "node_type" or value.is_floating_point():
        raise ValueError(
            f"{file} has {len(rows)} rows, but {nodes.file} has {nodes.num_nodes} nodes: expected "
            "one row per node"
        )
    fill = -1 if key == "y" else 0
    return value.new_full((nodes.num_nodes, *value.shape[1:]), fill).index_copy_(0, rows, value)


def set_attribute(data: Data, key: str, value: Tensor, file: str) -> None:
    """Set an attribute; refuse one that is set already."""
    if key in data:
        raise ValueError(f"{key!r} is in {file}, and in another file as well: take one of them out")
    data[key] = value


def _read_labels(table: Table, name: str) -> tuple[Tensor, list[str | int] | None]:
    """Read the labels of nodes, and the names of classes, if they are classes.

    A column whose later rows don't fit the type of its first ones is read as a wider type.
    """
    while True:
        try:
            return _read_labels_of_type(table, name)
        except ValueError as error:
            if "conversion error" not in str(error) or not table.widen(name):
                raise


def _read_labels_of_type(table: Table, name: str) -> tuple[Tensor, list[str | int] | None]:
    """Return labels as :func:`_read_labels` does, of the type that the first rows have."""
    if table.is_numeric(name):
        if table.is_integer(name):
            codes, known = table.integers(name)
        else:
            values = table.numbers([name], np.float64)
            if values.shape[1] > 1:
                return to_targets(torch.from_numpy(values)), None
            y, known = values[:, 0], ~np.isnan(values[:, 0])
            if (y[known] != np.round(y[known])).any():
                return to_targets(torch.from_numpy(y)), None
            if (np.abs(y[known]) >= 2**53).any():
                raise ValueError(
                    f"{table.path} has labels of 2**53 and more in column {name!r}, which aren't "
                    "stored as integers of 64 bits and can't be told apart: write them as text"
                )
            codes = np.where(known, y, -1).astype(np.int64)
        distinct = np.unique(codes[codes != -1])
        if np.array_equal(np.unique(codes[known]), [-1, 1]):  # Two classes, by their signs.
            return torch.from_numpy(np.where(known, codes > 0, -1).astype(np.int64)), [-1, 1]
        if not len(distinct) or (distinct[0] >= 0 and not are_implausible_classes(distinct)):
            return torch.from_numpy(codes), None
        codes = np.where(codes == -1, -1, np.searchsorted(distinct, codes))
        return torch.from_numpy(codes), distinct.tolist()
    codes, distinct = table.values(name)
    used = np.unique(codes[codes >= 0])
    used = used[~np.isin(distinct[used], MISSING)]
    names, numbers = np.unique(distinct[used], return_inverse=True)
    number_of = np.full(len(distinct) + 1, -1)  # The last is that of empty cells, of code -1.
    number_of[used] = numbers
    return torch.from_numpy(number_of[codes]), names.tolist()


def _masks(codes: np.ndarray, distinct: np.ndarray, file: Path) -> dict[str, Tensor]:
    """Convert the column of a split to masks; an empty cell is in none."""
    named = [PART_OF.get(str(name).strip().lower(), "") for name in distinct]
    if "" in named:
        raise ValueError(
            f"{file} has a split {str(distinct[named.index('')])!r}, expected train, val and test, "
            "or an empty cell"
        )
    which = np.array([*named, ""])[codes]  # -1, an empty cell, is the last.
    return {f"{part}_mask": torch.from_numpy(which == part) for part in SPLITS}


def read_id_list(file: Path) -> np.ndarray:
    """Read a file that is a list of ids, of shape ``[n]``."""
    if format_of(file) == ".npy":
        array = load_array(file)
        if array.ndim != 1 or array.dtype.kind not in "iuU":
            raise ValueError(
                f"{file} is of type {array.dtype} and shape {list(array.shape)}, expected a list "
                "of ids of nodes; masks are called train_mask, val_mask and test_mask"
            )
        return plain_ids(array)
    table, _ = open_table(file, NODE_COLUMNS, {})
    names = [name for name in table.types if name.lower() not in INDEX or len(table.types) == 1]
    if len(names) != 1:
        raise ValueError(f"{file} has the columns {', '.join(table.types)}, expected one, of ids")
    codes, distinct = table.values(names[0])
    return distinct[codes[codes >= 0]]


def _check_unique(ids: np.ndarray, file: Path, empty: np.ndarray | None = None) -> np.ndarray:
    """Refuse empty and duplicate ids; return the ids."""
    if empty is not None and empty.any():
        raise ValueError(f"{file} has a node without an id, in row {int(empty.argmax())}")
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        raise ValueError(
            f"{file} has the node {distinct[counts > 1][0].item()!r} twice: expected each node once"
        )
    return ids


def collect_nodes(blocks: Iterable[np.ndarray]) -> Nodes:
    """Return the nodes of edges, in the order of their ids, which are integers if all are."""
    known: np.ndarray = np.empty(0, np.int64)
    new: list[np.ndarray] = []
    size = 0
    for ids in blocks:
        ids = ids.astype(np.int64, copy=False) if ids.dtype.kind in "iu" else encode_utf8(ids)
        if ids.dtype.kind == known.dtype.kind and len(known):
            at = np.searchsorted(known, ids).clip(max=len(known) - 1)
            ids = ids[known[at] != ids]
        new.append(ids)
        size += len(ids)
        if size > max(len(known), AT_ONCE):  # Merging each block would take too long.
            known, new, size = _concatenate([known, *new]), [], 0
    known = _concatenate([known, *new])
    if known.dtype.kind == "S":
        blocks = [known[first : first + AT_ONCE] for first in range(0, len(known), AT_ONCE)]
        known = np.concatenate([np.char.decode(block, "utf-8") for block in blocks])
    return Nodes(len(known), known, "the edges")


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    """Return the distinct ids of some arrays, sorted."""
    parts = [part for part in parts if len(part)] or parts[:1]
    if any(part.dtype.kind == "S" for part in parts):
        parts = [encode_utf8(part) for part in parts]
    return np.unique(np.concatenate(parts))
