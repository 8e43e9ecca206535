"""Read edges from tables and arrays, in blocks or at once; add their reverses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.datasets.arrays import map_array, tensor_of
from gas.datasets.nodes import Nodes
from gas.datasets.roles import (
    EDGE_COLUMNS,
    INDEX,
    Names,
    check_no_missing_types,
    check_types,
    leave_out,
    leave_out_names,
    open_table,
    place_types,
    read_names,
    read_numbers,
    sort_types,
)
from gas.datasets.tables import Table, codes_of, format_of, plain_ids
from gas.graph import Edges, is_row_per_edge, read_graph

LONGEST_ID = 1024  # Bytes; all ids of a block have the size of its longest one.
NO_ATTRIBUTES = ("id", "edge_id", "edgeid", "index")  # Names of columns of edge ids.


class Categorical(NamedTuple):
    """Ids or types of some edges: the distinct ones, and the code of each edge."""

    distinct: np.ndarray
    codes: Any  # Of shape [edges]; or a slice, if `distinct` has an id for each edge.

    def __len__(self) -> int:
        return len(self.distinct) if isinstance(self.codes, slice) else len(self.codes)


class EdgeBlock(NamedTuple):
    """Some edges: their ends, weights of shape ``[edges]``, attributes ``[edges, D]``, types."""

    source: Categorical
    target: Categorical
    weight: np.ndarray | None = None
    attr: np.ndarray | None = None
    types: Categorical | None = None


class EdgeRows(NamedTuple):
    """Some edges between rows of nodes; types are numbered in order of first occurrence."""

    src: np.ndarray
    dst: np.ndarray
    weight: np.ndarray | None
    attr: np.ndarray | None
    types: np.ndarray | None


class EdgeStream:
    """The edges of a graph's files.

    Args:
        files: The files by role; see :func:`gas.datasets.roles.find_files`.
        columns: Names of columns by role, given by the user.
        at_once: The number of edges to read at a time. (default: all)
    """

    def __init__(
        self, files: Mapping[str, Path], columns: Mapping[str, str], at_once: int | None = None
    ) -> None:
        self.file, self._at_once = files["edges"], at_once
        self.type_names = files.get("edge_type_names")
        self.num_edges: int | None = None  # None: unknown.
        self._array = None
        self._found: dict[str, str] = {}
        self._attributes: list[str] = []
        if format_of(self.file) == ".npy":
            self._array = _edge_array(self.file)
            self.num_edges = self._array.shape[1]
        else:
            self._table, self._found, self._attributes = _edge_columns(self.file, columns)
        in_table = {
            "edge_weight": "weight" in self._found,
            "edge_attr": bool(self._attributes),
            "edge_type": "edge_type" in self._found,
        }
        self._arrays = {
            role: self._open_values(files[role], role, is_in_table)
            for role, is_in_table in in_table.items()
            if role in files
        }
        attr = self._arrays.get("edge_attr")
        self.attr_is_flat = attr is not None and attr.ndim == 1  # Attributes have shape [E].
        self.has_weight = in_table["edge_weight"] or "edge_weight" in self._arrays
        self.has_types = in_table["edge_type"] or "edge_type" in self._arrays
        self._type_file = files.get("edge_type", self.file)
        self._type_numbers: dict[Any, int] = {}  # By type, in order of first occurrence.

    def _open_values(self, file: Path, role: str, is_in_table: bool) -> np.ndarray:
        """Open a separate file of weights, attributes or types."""
        is_array = format_of(file) == ".npy"
        if not is_array and self._at_once is not None:
            raise ValueError(
                f"{file} is a table, but edges are read some at a time: put its columns into "
                f"{self.file.name}, or make it {role}.npy"
            )
        if is_in_table:
            raise ValueError(
                f"{role!r} is in {file}, and in {self.file.name}: take one of them out"
            )
        if role == "edge_type":
            return check_types(map_array(file), file) if is_array else _table_of_types(file)
        array = map_array(file) if is_array else read_numbers(file)
        if array.shape[1:] == (1,):
            array = array[:, 0]
        if array.ndim != 1 and (role == "edge_weight" or array.ndim != 2):
            raise ValueError(
                f"{file} has shape {list(array.shape)}, expected a row per edge: [E]"
                f"{' or [E, D]' * (role == 'edge_attr')}"
            )
        tensor_of(array[:0].copy(), str(file))  # Checks the type.
        return array

    def blocks(self) -> Iterator[EdgeBlock]:
        """Yield all edges in blocks."""
        first = 0
        for block in self._table_blocks() if self._array is None else self._array_blocks():
            last = first + len(block.source)
            for role, values in self._arrays.items():
                if len(values) < last:
                    raise _length_error(values, role, last, "more")
                rows = values[first:last]
                if role == "edge_weight":
                    block = block._replace(weight=rows.astype(np.float32))
                elif role == "edge_attr":
                    attr = rows.astype(np.float32)
                    block = block._replace(attr=attr.reshape(len(rows), -1))
                else:
                    types = Categorical(*np.unique(rows, return_inverse=True))
                    block = block._replace(types=types)
            if block.types is not None:
                check_no_missing_types(
                    block.types.codes, block.types.distinct, self._type_file, first
                )
            yield block
            first = last
        for role, values in self._arrays.items():
            if len(values) != first:
                raise _length_error(values, role, first, "no more")

    def _array_blocks(self) -> Iterator[EdgeBlock]:
        assert self._array is not None
        step = self._at_once or max(1, self._array.shape[1])
        for first in range(0, max(1, self._array.shape[1]), step):
            ids = self._array[:, first : first + step]
            source, target = (Categorical(plain_ids(end.copy()), slice(None)) for end in ids)
            yield EdgeBlock(source, target)

    def _table_blocks(self) -> Iterator[EdgeBlock]:
        table, found = self._table, self._found
        ids = [found[role] for role in ("source", "target", "edge_type") if role in found]
        weights = [found["weight"]] if "weight" in found else []
        types = {name: table.id_type(name) for name in ids}
        types |= table.number_types([*weights, *self._attributes])
        first = 0
        for part in table.pieces(types, ids, self._at_once):
            source, target = (self._ids(part.column(name), first) for name in ids[:2])
            weight = table.floats(part, weights)[:, 0] if weights else None
            attr = kinds = None
            if self._attributes:
                attr = table.floats(part, self._attributes, first_row=first)
            if len(ids) > 2:
                column = part.column(ids[2])
                distinct = column.dictionary.to_numpy(zero_copy_only=False)
                kinds = Categorical(distinct, codes_of(column))
            yield EdgeBlock(source, target, weight, attr, kinds)
            first += part.num_rows

    def _ids(self, column: Any, first: int) -> Categorical:
        """Return the ids of a column without missing values."""
        import pyarrow as pa

        codes, distinct = codes_of(column), column.dictionary
        is_text = pa.types.is_string(distinct.type) or pa.types.is_large_string(distinct.type)
        blank = distinct.index("").as_py() if is_text else -1
        missing = (codes < 0) | (codes == blank)
        if missing.any():
            row = first + int(missing.argmax())
            raise ValueError(f"{self.file} has an edge with one end only, in row {row}")
        if is_text:
            return Categorical(_text_ids(distinct, self.file, self._at_once is not None), codes)
        return Categorical(plain_ids(distinct.to_numpy(zero_copy_only=False)), codes)

    def rows(self, block: EdgeBlock, nodes: Nodes) -> EdgeRows:
        """Convert edges between ids to edges between rows of nodes."""
        src, dst = (
            nodes.rows(end.distinct, self.file.name)[end.codes]
            for end in (block.source, block.target)
        )
        types = None
        if block.types is not None:
            known = self._type_numbers
            numbers = [known.setdefault(t, len(known)) for t in block.types.distinct.tolist()]
            types = np.array(numbers, np.int32)[block.types.codes]
        return EdgeRows(src, dst, block.weight, block.attr, types)

    def sort_types(self) -> tuple[np.ndarray, Names]:
        """Return the final number of each type of :meth:`rows`, and the names by number.

        They are in the order of their names, or of the lines of the file with names.
        """
        known = list(self._type_numbers)
        is_text = bool(known) and not isinstance(known[0], (int, float))
        places, names = sort_types(np.array(known, object if is_text else None), self._type_file)
        if self.type_names is not None:
            listed = read_names(self.type_names)
            places, names = place_types(names, listed, self.type_names)[places], listed
        return places, names


def set_edges(stream: EdgeStream, block: EdgeBlock, nodes: Nodes, data: Data) -> None:
    """Set ``edge_index`` of a graph, and the weights, attributes and types of edges, if any."""
    edges = stream.rows(block, nodes)
    if edges.weight is not None:
        data.edge_weight = torch.from_numpy(edges.weight)
    if edges.attr is not None:
        attr = torch.from_numpy(edges.attr)
        data.edge_attr = attr.squeeze(1) if stream.attr_is_flat else attr
    if edges.types is not None:
        places, data.edge_type_names = stream.sort_types()
        data.edge_type = torch.from_numpy(places[edges.types])
    else:
        leave_out_names(stream.type_names, "edge_type")
    data.edge_index = torch.from_numpy(np.stack([edges.src, edges.dst]))


def _edge_array(file: Path) -> np.ndarray:
    """Map an array of edges, and transpose it to shape ``[2, E]`` if it is ``[E, 2]``."""
    array = map_array(file)
    if array.ndim == 2 and array.shape[1] == 2 and not (len(array) == 2 and "index" in file.stem):
        array = array.T
    if array.ndim != 2 or len(array) != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{file} is of type {array.dtype} and shape {list(array.shape)}, expected integers "
            "of shape [2, E] or [E, 2]"
        )
    return array


def _edge_columns(
    file: Path, columns: Mapping[str, str]
) -> tuple[Table, dict[str, str], list[str]]:
    """Return a table of edges, its columns by role, and the columns of attributes."""
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
    missing = [role for role in ("source", "target") if role not in found]
    if missing:
        pairs = ", ".join(f"{role!r}: ..." for role in missing)
        raise ValueError(
            f"{file} has the columns {', '.join(table.types)}, none of which is known for the "
            f"{' and the '.join(missing)} of edges: call {'them' if missing[1:] else 'it'} "
            f"{' and '.join(map(repr, missing))}, or pass columns={{{pairs}}}"
        )
    features = [
        name for name in rest if table.is_numeric(name) and name.lower() not in NO_ATTRIBUTES
    ]
    leave_out([f"the column {name!r}" for name in rest if name not in features], str(file))
    return table, found, features


def _table_of_types(file: Path) -> np.ndarray:
    """Read the types of edges from a table of one column."""
    table, found = open_table(file, {"edge_type": EDGE_COLUMNS["edge_type"]}, {})
    if len(table.types) != 1:
        raise ValueError(f"{file} has the columns {', '.join(table.types)}, expected one, of types")
    codes, distinct = table.values(found.get("edge_type", next(iter(table.types))))
    check_no_missing_types(codes, distinct, file)
    return distinct[codes]


def _length_error(values: np.ndarray, role: str, found: int, more: str) -> ValueError:
    """Make the error for an array with another number of rows than edges."""
    return ValueError(
        f"{role!r} has {len(values)} rows, but there are {found} edges and {more}: expected one "
        "row per edge"
    )


def _text_ids(column: Any, file: Path, is_bounded: bool) -> np.ndarray:
    """Convert text ids as :func:`plain_ids` does, from UTF-8 of a fixed width."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = pc.replace_substring_regex(column, r"^(-?\d+)\.0+$", r"\1")
    if pc.all(pc.match_substring_regex(column, r"^(0|-?[1-9][0-9]{0,17})$")).as_py():
        return column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    if pc.all(pc.match_substring_regex(column, r"^-?[1-9][0-9]*$|^0$")).as_py():
        return plain_ids(column.to_numpy(zero_copy_only=False))  # Some may exceed int64.
    column = column.cast(pa.large_binary())
    _, ends, letters = column.buffers()
    ends = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
    sizes = np.diff(ends)
    longest = int(sizes.max(initial=1))
    if is_bounded and longest > LONGEST_ID:
        at = int(sizes.argmax())
        raise ValueError(
            f"{file} has an id of {longest:,} bytes, {column[at].as_py()[:30]!r} ..., expected at "
            f"most {LONGEST_ID}: number such nodes"
        )
    ids = np.zeros((len(column), longest), np.uint8)
    ids[np.arange(longest) < sizes[:, None]] = np.frombuffer(letters, np.uint8)[ends[0] : ends[-1]]
    return ids.view(f"S{longest}")[:, 0]


# Reverses -----------------------------------------------------------------------------------------


def _is_one_way(edges: Edges) -> Tensor:
    """Return a mask of the edges without a reverse, of shape ``[E]``; false for self-loops."""
    there, back = (
        a * edges.num_nodes + b for a, b in ((edges.src, edges.dst), (edges.dst, edges.src))
    )
    known, wanted = np.sort(there.numpy(force=True)), back.numpy(force=True)
    order = np.argsort(wanted)  # Sorted look-ups use the CPU's cache.
    at = np.searchsorted(known, wanted[order]).clip(max=max(len(known) - 1, 0))
    lacks = np.empty(len(wanted), dtype=bool)
    lacks[order] = known[at] != wanted[order]
    return torch.from_numpy(lacks)


def one_way_share(edges: Edges) -> float:
    """Return the fraction of edges without a reverse, self-loops excluded."""
    num_edges = int((edges.src != edges.dst).sum())
    return int(_is_one_way(edges).sum()) / num_edges if num_edges else 0.0


def with_reverse(data: Data, kind: Tensor | None = None) -> Data:
    """Append the missing reverses of edges, with their attributes.

    An edge in the other direction of another ``edge_type`` counts as a reverse.

    Args:
        data: The graph, which is modified.
        kind: The type of each node, of shape ``[N]``: only edges within a type get reverses.
            (default: all edges)
    """
    if "adj_t" in data:
        raise ValueError(
            "'undirected' is True, but the graph has an 'adj_t': make it symmetric where it is "
            "made, or give an 'edge_index'"
        )
    edges = read_graph(data)
    lacks = _is_one_way(edges)
    if kind is not None:
        lacks &= kind[edges.src.long()] == kind[edges.dst.long()]
    for key in [key for key, _ in data if is_row_per_edge(data, key)]:
        data[key] = torch.cat([data[key], data[key][lacks]])
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, lacks].flip(0)], dim=1)
    return data
