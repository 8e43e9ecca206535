"""Blocks of the edges and features in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gas.datasets.arrays import map_array
from gas.datasets.folder import check_numbers, edge_columns, edge_ends, missing_end_error
from gas.datasets.nodes import map_numbers
from gas.datasets.roles import NODE_COLUMNS, open_table
from gas.datasets.tables import format_of, plain_ids
from gas.datasets.types import check_given, check_types

LONGEST_ID = 1024  # Bytes: all ids of a block take as many as its longest.


class Ends(NamedTuple):
    """Ids of one end of some edges: the distinct ids, and the code of each edge."""

    distinct: np.ndarray
    codes: Any  # Of shape [edges], or a slice.


class EdgeBlock(NamedTuple):
    """Some edges: their ends, weights of shape ``[edges]``, attributes ``[edges, D]``, types."""

    source: Ends
    target: Ends
    weight: np.ndarray | None
    attr: np.ndarray | None
    types: Ends | None = None


class EdgeStream:
    """The edges of a graph's files.

    Args:
        files: The files by what they hold; see :func:`gas.datasets.roles.find_files`.
        columns: What the user says that columns are called.
        at_once: How many edges of an array are read at a time; of a table, the reader says.

    Raises:
        ValueError: If it can't be told what they hold.
    """

    def __init__(self, files: Mapping[str, Path], columns: Mapping[str, str], at_once: int) -> None:
        self.file, self._at_once = files["edges"], at_once
        self.num_edges: int | None = None  # None: not known beforehand.
        self._array = None
        found: dict[str, str] = {}
        self._names: list[str] = []
        if format_of(self.file) == ".npy":
            self._array = edge_ends(map_array(self.file), self.file)
            self.num_edges = self._array.shape[1]
        else:
            self._table, found, self._names = edge_columns(self.file, columns)
        self._found = found
        self._apart: dict[str, np.ndarray] = {}
        for role in ("edge_weight", "edge_attr", "edge_type"):
            if role in files:
                self._apart[role] = self._values(files[role], role)
        attr = self._apart.get("edge_attr")
        self.is_flat = attr is not None and attr.ndim == 1  # Attributes have shape [E].
        self.has_weight = "weight" in found or "edge_weight" in self._apart
        self.has_types = "edge_type" in found or "edge_type" in self._apart
        self.type_file = files.get("edge_type", self.file)

    def _values(self, file: Path, role: str) -> np.ndarray:
        """Return weights or attributes from an array of their own."""
        if format_of(file) != ".npy":
            raise ValueError(
                f"{file} is a table, but edges are read some at a time: put its columns into "
                f"{self.file.name}, or make it {role}.npy"
            )
        if (role == "edge_weight" and "weight" in self._found) or (
            (role == "edge_attr" and self._names)
            or (role == "edge_type" and "edge_type" in self._found)
        ):
            raise ValueError(
                f"{role!r} is in {file}, and in {self.file.name}: take one of them out"
            )
        array = map_array(file)
        if role == "edge_type":
            return check_types(array, file)
        if array.shape[1:] == (1,):
            array = array[:, 0]
        if array.ndim != 1 and (role == "edge_weight" or array.ndim != 2):
            raise ValueError(
                f"{file} has shape {list(array.shape)}, expected a row per edge: [E]"
                f"{' or [E, D]' * (role == 'edge_attr')}"
            )
        return array

    def blocks(self) -> Iterator[EdgeBlock]:
        """Yield all edges in blocks.

        Raises:
            ValueError: If an edge has one end only, or lacks a number; or files differ in length.
        """
        first = 0
        for source, target, weight, attr, types in self._own_blocks():
            last = first + _size(source)
            for role, values in self._apart.items():
                if len(values) < last:
                    raise _lengths(self._apart[role], role, last, "more")
                if role == "edge_type":
                    types = Ends(*np.unique(values[first:last], return_inverse=True))
                    continue
                rows = values[first:last].astype(np.float32)
                if role == "edge_weight":
                    weight = rows
                else:
                    attr = rows.reshape(len(rows), -1)
            if types is not None:
                check_given(types.codes, types.distinct, self.type_file, first)
            yield EdgeBlock(source, target, weight, attr, types)
            first = last
        for role, values in self._apart.items():
            if len(values) != first:
                raise _lengths(values, role, first, "no more")

    def _own_blocks(self) -> Iterator[EdgeBlock]:
        if self._array is not None:
            for first in range(0, self._array.shape[1], self._at_once):
                ids = self._array[:, first : first + self._at_once]
                source, target = (Ends(plain_ids(end.copy()), slice(None)) for end in ids)
                yield EdgeBlock(source, target, None, None)
            return
        table, found = self._table, self._found
        names = [found[role] for role in ("source", "target")]
        weights = [found["weight"]] if "weight" in found else []
        types = {name: table.id_type(name) for name in names}
        types |= table.number_types([*weights, *self._names])
        kind = found.get("edge_type")
        if kind is not None:
            types[kind] = table.id_type(kind)
        first = 0
        for block in table.blocks(types):
            for start in range(0, block.num_rows, self._at_once):
                part = block.slice(start, self._at_once)
                source, target = (_ends(part, name, self.file, first) for name in names)
                weight = table.floats(part, weights)[:, 0] if weights else None
                attr = table.floats(part, self._names) if self._names else None
                if attr is not None:
                    check_numbers(attr, self.file, self._names, first)
                kinds = None if kind is None else _types(part, kind)
                yield EdgeBlock(source, target, weight, attr, kinds)
                first += part.num_rows


def _size(ends: Ends) -> int:
    return len(ends.distinct) if isinstance(ends.codes, slice) else len(ends.codes)


def _lengths(values: np.ndarray, role: str, found: int, more: str) -> ValueError:
    return ValueError(
        f"{role!r} has {len(values)} rows, but there are {found} edges and {more}: expected one "
        "row per edge"
    )


def _ends(block: Any, name: str, file: Path, first: int) -> Ends:
    """Return the ids of a column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = block.column(block.schema.get_field_index(name))
    if pa.types.is_string(column.type):
        column = pc.if_else(pc.equal(column, ""), None, column)  # An empty cell.
    if column.null_count:
        raise missing_end_error(file, first + int(np.argmax(column.is_null().to_numpy(False))))
    column = column.dictionary_encode()
    codes, distinct = column.indices.to_numpy(zero_copy_only=False), column.dictionary
    is_text = pa.types.is_string(distinct.type) or pa.types.is_large_string(distinct.type)
    if is_text:
        return Ends(_text_ids(distinct, file), codes)
    return Ends(plain_ids(distinct.to_numpy(zero_copy_only=False)), codes)


def _types(block: Any, name: str) -> Ends:
    """Return the types of a column, as they are written; -1 where there is none."""
    column = block.column(block.schema.get_field_index(name)).dictionary_encode()
    codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return Ends(column.dictionary.to_numpy(zero_copy_only=False), codes)


def _text_ids(column: Any, file: Path) -> np.ndarray:
    """Convert text ids as :func:`plain_ids` does, from UTF-8 of a fixed width."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = pc.replace_substring_regex(column, r"^(-?\d+)\.0+$", r"\1")
    if pc.all(pc.match_substring_regex(column, r"^(0|-?[1-9][0-9]{0,17})$")).as_py():
        return column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    if pc.all(pc.match_substring_regex(column, r"^-?[1-9][0-9]*$|^0$")).as_py():
        return plain_ids(column.to_numpy(zero_copy_only=False))  # Some may be too large.
    column = column.cast(pa.large_binary())
    _, ends, letters = column.buffers()
    ends = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
    sizes = np.diff(ends)
    longest = int(sizes.max(initial=1))
    if longest > LONGEST_ID:
        at = int(sizes.argmax())
        raise ValueError(
            f"{file} has an id of {longest:,} bytes, {column[at].as_py()[:30]!r} ..., expected at "
            f"most {LONGEST_ID}: number such nodes"
        )
    ids = np.zeros((len(column), longest), np.uint8)
    ids[np.arange(longest) < sizes[:, None]] = np.frombuffer(letters, np.uint8)[ends[0] : ends[-1]]
    return ids.view(f"S{longest}")[:, 0]


def feature_blocks(
    file: Path, columns: Mapping[str, str], names: Sequence[str], at_once: int
) -> Iterator[np.ndarray]:
    """Yield features of nodes in the order of a file, float32, in blocks.

    Args:
        file: A table, or an ``.npy`` file.
        columns: What the user says that columns are called.
        names: Of a table, the columns.
        at_once: How many rows of an array are read at a time.

    Raises:
        ValueError: If a number is missing.
    """
    if format_of(file) == ".npy":
        array = map_numbers(file)
        for first in range(0, len(array), at_once):
            yield array[first : first + at_once].astype(np.float32)
        return
    table, _ = open_table(file, NODE_COLUMNS, columns)
    types = table.number_types(names)
    first = 0
    for block in table.blocks(types):
        for start in range(0, block.num_rows, at_once):
            part = block.slice(start, at_once)
            values = table.floats(part, names)
            check_numbers(values, file, names, first)
            yield values.astype(np.float32, copy=False)
            first += part.num_rows
