"""Read columns of CSV and Parquet files by pyarrow, in blocks or at once."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = (".parquet", ".pq")
TEXT = (".csv", ".tsv", ".txt")
PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
COMMENTS = ("#", "%")  # First characters of comment lines at the beginning.
DECIMAL_COMMA = re.compile(r"-?\d+,\d+")  # A number, if the delimiter isn't a comma.
DECIMAL_POINT = re.compile(r"-?\d+\.\d+")
SAMPLED = 100  # Lines after the first, in which decimal commas are looked for.
DELIMITERS = "\t;, "  # In the order of preference.


def format_of(path: Path) -> str:
    """Return the format of a file by its name; that of ``edges.csv.gz`` is ``.csv``."""
    return Path(path.stem if path.suffix in PACKED else path.name).suffix.lower()


class Table:
    """A table in a file; columns are read on demand.

    Args:
        path: A file ``.csv``, ``.tsv`` or ``.txt``, perhaps compressed (``.gz``, ``.bz2``), or
            ``.parquet``. Text is delimited by tabs, semicolons, commas or spaces.
        is_name: Returns whether a cell is a known name of a column. The first line of a text is a
            header if it has such a cell, or if it has no number and the next line does.

    Raises:
        ImportError: If pyarrow is missing.
        ValueError: If the file isn't a table, or it is unclear whether it has a header.
    """

    def __init__(self, path: Path, is_name: Callable[[str], bool]) -> None:
        try:
            importlib.import_module("pyarrow")
        except ImportError as error:
            raise ImportError(
                f"{path.name} is read by pyarrow, which is missing: pip install pyarrow"
            ) from error
        self.path = path
        self.is_text = format_of(path) in TEXT
        self.has_names = True
        with self._name_unreadable_file():
            if self.is_text:
                self._detect_format(is_name)
            with self._open() as (schema, _):
                names = [field.name for field in schema]
                self.types = {field.name: _value_type(field.type) for field in schema}
        if len(self.types) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path.name} has two columns {twice!r}: rename or remove one")

    @contextlib.contextmanager
    def _name_unreadable_file(self) -> Iterator[None]:
        """Add the name of the file to errors in this context."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            reason = re.sub(r"Row #\d+: ", "", str(error).strip().split("\n")[0])  # Not always.
            raise ValueError(f"{self.path} can't be read as a table: {reason}") from error

    def _detect_format(self, is_name: Callable[[str], bool]) -> None:
        """Detect the delimiter, the decimal point, and whether there is a header."""
        opened = PACKED.get(self.path.suffix, open)
        with opened(self.path, "rt", encoding="utf-8-sig") as file:
            first, self._comments = file.readline(), 0
            while first.startswith(COMMENTS) or first.isspace():
                first, self._comments = file.readline(), self._comments + 1
            first, *lines = (each.strip("\r\n") for each in (first, *islice(file, SAMPLED)))
        self._delimiter = next((mark for mark in DELIMITERS if mark in first.strip()), ",")
        cells, *rows = (
            [cell.strip().strip('"') for cell in line.split(self._delimiter)]
            for line in (first, *lines)
        )
        values = [*cells, *chain.from_iterable(rows)]
        has_points = any(map(DECIMAL_POINT.fullmatch, values))
        has_commas = any(map(DECIMAL_COMMA.fullmatch, values))
        self._decimal = "," if has_commas and not has_points else "."
        if any(map(is_name, cells)):
            return
        if any(map(_is_value, cells)):
            self.has_names = False
        elif first.strip() and not (rows and any(map(_is_value, rows[0]))):
            raise ValueError(
                f"{self.path.name} begins with {first[:60]!r}, which may be names of columns or "
                "values: begin it with names that gas.open_graph knows, such as source,target in a "
                "list of edges or id,label in one of nodes, or name its columns, "
                "columns={'source': ...}"
            )

    @contextlib.contextmanager
    def _open(
        self, types: Mapping[str, pa.DataType] | None = None
    ) -> Iterator[tuple[pa.Schema, Iterable[pa.RecordBatch]]]:
        """Open the file: its schema, and blocks of the columns in ``types``, or of all."""
        names = types and list(types)
        if not self.is_text:
            from pyarrow import parquet

            with parquet.ParquetFile(self.path) as file:
                yield file.schema_arrow, file.iter_batches(columns=names)
            return
        from pyarrow import csv

        with csv.open_csv(
            self.path,
            csv.ReadOptions(autogenerate_column_names=not self.has_names, skip_rows=self._comments),
            csv.ParseOptions(delimiter=self._delimiter),
            csv.ConvertOptions(
                column_types=types, include_columns=names, decimal_point=self._decimal
            ),
        ) as blocks:
            yield blocks.schema, blocks

    def blocks(
        self, types: Mapping[str, pa.DataType], names: Sequence[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Read columns in blocks; whitespace around text is removed.

        Args:
            types: The type of each column.
            names: The columns of ids or names, which are dictionary-encoded. In text files only
                empty cells of these are missing, not 'NA' or 'nan'.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        schema = pa.schema(list(types.items()))

        def convert(name: str, column: pa.Array) -> pa.Array:
            if self.is_text and name in names:
                column = pc.if_else(pc.equal(column, ""), None, column)
            if pa.types.is_string(column.type):
                column = pc.utf8_trim_whitespace(column)
            return column.dictionary_encode() if name in names else column

        with self._name_unreadable_file(), self._open(types) as (_, blocks):
            for block in blocks:
                columns = block.select(list(types)).cast(schema).columns
                columns = [convert(*pair) for pair in zip(types, columns, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, list(types))

    def read(self, types: Mapping[str, pa.DataType], names: Sequence[str] = ()) -> pa.RecordBatch:
        """Read columns as :meth:`blocks` does, but in one block."""
        import pyarrow as pa

        schema = pa.schema(
            (name, pa.dictionary(pa.int32(), kind) if name in names else kind)
            for name, kind in types.items()
        )
        table = pa.Table.from_batches(self.blocks(types, names), schema)
        columns = [
            column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
            for column in table.unify_dictionaries().columns
        ]
        return pa.RecordBatch.from_arrays(columns, list(types))

    def pieces(
        self,
        types: Mapping[str, pa.DataType],
        names: Sequence[str] = (),
        at_once: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read columns as :meth:`blocks` does, at most ``at_once`` rows at a time, or in one."""
        whole = at_once is None
        for block in [self.read(types, names)] if whole else self.blocks(types, names):
            step = at_once or max(1, block.num_rows)
            for first in range(0, max(1, block.num_rows), step):
                yield block.slice(first, step)

    def count(self) -> int:
        """Count the rows."""
        name = next(iter(self.types))
        return sum(block.num_rows for block in self.blocks({name: self.id_type(name)}))

    def widen(self, name: str) -> bool:
        """Read a column of a text file as real numbers, or then as text, whatever it begins with.

        Returns:
            ``True`` if the type has changed, ``False`` for a column that is text already.
        """
        import pyarrow as pa

        before = self.types[name]
        self.types[name] = pa.float64() if pa.types.is_integer(before) else pa.string()
        return self.types[name] != before

    def id_type(self, name: str) -> pa.DataType:
        """Return the type in which a column of ids or names is read, text for text files."""
        import pyarrow as pa

        as_text = self.is_text or pa.types.is_null(self.types[name])
        return pa.string() if as_text else self.types[name]

    def number_types(
        self, names: Sequence[str], dtype: type = np.float32
    ) -> dict[str, pa.DataType]:
        """Return the types in which columns of numbers, or of lists of numbers, are read."""
        import pyarrow as pa

        number, types = pa.from_numpy_dtype(dtype), {}
        for name in names:
            kind = self.types[name]
            types[name] = kind if _is_list(kind) or pa.types.is_boolean(kind) else number
        return types

    def floats(
        self,
        block: Any,
        names: Sequence[str],
        dtype: type = np.float32,
        first_row: int | None = None,
    ) -> np.ndarray:
        """Convert columns of a block to ``[rows, width]``; NaN where empty.

        Args:
            block: The block.
            names: The columns.
            dtype: The type of the result. (default: float32)
            first_row: The number of the block's first row; empty cells are then refused.
                (default: accept empty cells)
        """
        import pyarrow as pa

        number = pa.from_numpy_dtype(dtype)
        parts = [self._floats(block.column(name), name, number) for name in names]
        values = np.column_stack(parts)
        if first_row is not None and np.isnan(values).any():
            row = int(np.isnan(values).any(axis=1).argmax())
            name = next(
                name for name, part in zip(names, parts, strict=True) if np.isnan(part[row]).any()
            )
            raise ValueError(
                f"{self.path} has no number in row {first_row + row} of column {name!r}: fill in "
                "what is missing, or leave the column out"
            )
        return values

    def values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Read a column of ids or names as codes and distinct values.

        Text is converted to integers if all values are integers.

        Returns:
            Codes of shape ``[rows]``, -1 for an empty cell, and distinct values.
        """
        column = self.read({name: self.id_type(name)}, [name]).column(0)
        return codes_of(column), plain_ids(column.dictionary.to_numpy(zero_copy_only=False))

    def integers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Read a column of integers, -1 where empty, and a mask of cells that aren't empty."""
        import pyarrow as pa

        column = self.read({name: pa.int64()}).column(0)
        known = column.is_valid().to_numpy(zero_copy_only=False)
        return column.fill_null(-1).to_numpy().copy(), known

    def numbers(self, names: Sequence[str], dtype: type = np.float32) -> np.ndarray:
        """Read columns of numbers or lists of numbers, ``[rows, width]``; NaN where empty."""
        return self.floats(self.read(self.number_types(names, dtype)), names, dtype)

    def _floats(self, column: pa.Array, name: str, number: pa.DataType) -> np.ndarray:
        """Convert a column of numbers or lists to an array."""
        import pyarrow.compute as pc

        if not _is_list(column.type):
            return column.cast(number).to_numpy(zero_copy_only=False)
        widths = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(widths) > 1 or None in widths:
            raise ValueError(
                f"{self.path} has lists of several lengths in column {name!r}: expected as many "
                "numbers in every row"
            )
        flat = pc.list_flatten(column).cast(number).to_numpy(zero_copy_only=False)
        return flat.reshape(len(column), -1)

    def numpy_type(self, name: str) -> np.dtype:
        """Return the type of the values of a column, or of those in its lists."""
        kind = self.types[name]
        return np.dtype((kind.value_type if _is_list(kind) else kind).to_pandas_dtype())

    def is_integer(self, name: str) -> bool:
        """Return whether a column holds integers."""
        import pyarrow as pa

        return pa.types.is_integer(self.types[name])

    def is_numeric(self, name: str) -> bool:
        """Return whether a column contains numbers, booleans, lists of these, or only nulls."""
        import pyarrow as pa

        kind = self.types[name]
        kind = kind.value_type if _is_list(kind) else kind
        return (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_decimal(kind)
            or pa.types.is_null(kind)
        )


def codes_of(column: pa.DictionaryArray) -> np.ndarray:
    """Return the codes of a dictionary-encoded column; -1 for missing values."""
    return column.indices.fill_null(-1).to_numpy(zero_copy_only=False)


def plain_ids(ids: np.ndarray) -> np.ndarray:
    """Convert ids to int64 if all are integers, or texts of integers; else to text."""
    if ids.dtype == object:
        ids = np.array([re.sub(r"^(-?\d+)\.0+$", r"\1", str(value)) for value in ids], dtype=object)
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            numbers = np.array([int(value) for value in ids], dtype=np.int64)
            if all(str(n) == str(value) for n, value in zip(numbers, ids, strict=True)):
                return numbers
        return ids.astype(str)
    if ids.dtype.kind == "f":
        is_whole = bool((ids == np.round(ids)).all())
        return ids.astype(np.int64) if is_whole else plain_ids(ids.astype(object))
    if ids.dtype.kind in "iu" and (not ids.size or ids.max() <= np.iinfo(np.int64).max):
        return ids.astype(np.int64)
    return ids


def is_number(value: object) -> bool:
    """Return whether a value is a number, or the text of one."""
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _is_value(cell: str) -> bool:
    """Return whether a cell is a number or a truth value."""
    return is_number(cell) or cell.lower() in ("true", "false")


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values, also of a dictionary-encoded column."""
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind
