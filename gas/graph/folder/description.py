"""Contents of ``graph.json``: the arrays of a graph folder, their files, types and shapes.

The file is not trusted: all of it is checked before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gas.graph.attributes import needs_row_per_node
from gas.graph.folder.npy import Array
from gas.history import CODEC_NAMES as CODECS
from gas.history import Codec
from gas.native import read_json, refuse

FORMAT, VERSION = "gas graph", 1
NAME = "graph.json"
MOST = 2**62  # The largest count, so that sums of counts fit 64 bits.
MOST_DIMS = 32
CSR = "csr"  # The codec of sparse features.
PARTS_OF_CSR = ("rowptr", "col", "value")
INDEX_TYPES = ("int32", "int64")
TORCH_TYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
# Names of files and attributes that are valid on every system and in PyG.
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,150}\.npy")
KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
TEXT = re.compile(r"<U([1-9][0-9]{0,5})")
ROWPTR, COL, WEIGHT = "rowptr", "col", "edge_weight"  # The arrays of the adjacency.
TAKEN = ("adj_t", "edge_index", "num_nodes")  # Attributes that opening a folder sets.


class Sparse(NamedTuple):
    """A sparse matrix: compressed rows in three arrays."""

    shape: tuple[int, ...]
    rowptr: Array
    col: Array
    value: Array

    def to_json(self) -> dict[str, Any]:
        """Return the entry in ``graph.json``."""
        parts = {name: getattr(self, name).to_json() for name in PARTS_OF_CSR}
        return {"codec": CSR, "shape": list(self.shape), **parts}


class Description(NamedTuple):
    """Contents of ``graph.json``.

    ``arrays`` has ``rowptr`` and ``col``, perhaps ``edge_weight``, and tensors by the names of
    their attributes; ``attributes`` has all other attributes.
    """

    num_nodes: int
    num_edges: int
    arrays: dict[str, Array | Sparse]
    attributes: dict[str, Any]

    def iter_arrays(self) -> Iterator[tuple[str, Array]]:
        """Iterate over all arrays, those of sparse matrices included: names and descriptions."""
        for key, array in self.arrays.items():
            if isinstance(array, Array):
                yield key, array
            else:
                for name in PARTS_OF_CSR:
                    yield f"{key}.{name}", getattr(array, name)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for _, array in self.iter_arrays())

    def to_json(self) -> dict[str, Any]:
        """Return the whole description."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_nodes": self.num_nodes,
            "num_edges": self.num_edges,
            "arrays": {key: array.to_json() for key, array in self.arrays.items()},
            "attributes": self.attributes,
        }


def read_description(path: Path) -> Description:
    """Read ``graph.json``, and check that it is consistent."""
    said = _check_fields(path, "it", read_json(path), ("format", "version"), None)
    if said["format"] != FORMAT:
        refuse(path, "'format'", said["format"], repr(FORMAT))
    if said["version"] != VERSION or isinstance(said["version"], bool):
        refuse(path, "'version'", said["version"], f"{VERSION}, which this version of gas reads")
    wanted = ("format", "version", "num_nodes", "num_edges", "arrays", "attributes")
    said = _check_fields(path, "it", said, wanted, ())
    num_nodes, num_edges = (_check_count(path, f"'{key}'", said[key]) for key in wanted[2:4])
    arrays: dict[str, Array | Sparse] = {}
    for key, value in _check_names(path, "'arrays'", said["arrays"]).items():
        is_matrix = isinstance(value, dict) and value.get("codec") == CSR
        parse = _parse_matrix if is_matrix else _parse_array
        arrays[key] = parse(path, f"'arrays.{key}'", value)
    attributes = _check_names(path, "'attributes'", said["attributes"])
    both = attributes.keys() & {*arrays, ROWPTR, COL, WEIGHT}
    if both:
        refuse(path, f"'attributes.{min(both)}'", "there", "one that 'arrays' doesn't have")
    found = Description(num_nodes, num_edges, arrays, attributes)
    taken: dict[str, str] = {}
    for key, array in found.iter_arrays():  # Some systems ignore the case of file names.
        other = taken.setdefault(array.file.lower(), key)
        if other != key:
            refuse(path, f"the file of {key!r}", array.file, f"another than that of {other!r}")
    _check_sizes(path, found)
    return found


def _check_fields(
    path: Path, what: str, value: Any, needed: tuple[str, ...], others: tuple[str, ...] | None
) -> dict[str, Any]:
    """Check that an object of JSON has the fields ``needed``, and no others than ``others``."""
    if not isinstance(value, dict):
        refuse(path, what, value, "an object of JSON")
    missing = [name for name in needed if name not in value]
    if missing:
        refuse(path, what, f"without {missing[0]!r}", f"an object with {', '.join(needed)}")
    unknown = [] if others is None else [name for name in value if name not in needed + others]
    if unknown:
        refuse(path, what, f"with {unknown[0]!r}", f"only {', '.join(needed + others)}")  # type: ignore[operator]
    return value


def _check_names(path: Path, what: str, value: Any) -> dict[str, Any]:
    """Check that the fields of an object of JSON are names of attributes."""
    for name in _check_fields(path, what, value, (), None):
        if KEY.fullmatch(name) is None or name in TAKEN:
            refuse(path, f"a name in {what}", repr(name), "letters, digits and _, of an attribute")
    return value


def _check_count(path: Path, what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        refuse(path, what, value, "a whole number, not negative and at most 2^62")
    return value


def _parse_shape(path: Path, what: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_DIMS:
        refuse(path, what, value, f"a list of at most {MOST_DIMS} lengths")
    return tuple(_check_count(path, f"a length in {what}", length) for length in value)


def _parse_matrix(path: Path, what: str, value: Any) -> Sparse:
    """Check the entry of a sparse matrix."""
    said = _check_fields(path, what, value, ("codec", "shape", *PARTS_OF_CSR), ())
    shape = _parse_shape(path, f"{what}.shape", said["shape"])
    rowptr, col, values = (
        _parse_array(path, f"{what}.{part}", said[part]) for part in PARTS_OF_CSR
    )
    if len(shape) != 2:
        refuse(path, f"{what}.shape", list(shape), "[rows, columns]")
    _check_plain(path, f"{what}.rowptr", rowptr, INDEX_TYPES, (shape[0] + 1,))
    _check_plain(path, f"{what}.col", col, (rowptr.dtype,), col.shape[:1] or (0,))
    floats = ("float32", "float64", "float16", "bfloat16")
    _check_plain(path, f"{what}.value", values, floats, col.shape)
    return Sparse(shape, rowptr, col, values)


def _parse_array(path: Path, what: str, value: Any) -> Array:
    """Parse and check an array's entry in ``graph.json``."""
    said = _check_fields(path, what, value, ("file", "dtype", "shape"), ("codec", "width", "numpy"))
    file, dtype = said["file"], said["dtype"]
    if not isinstance(file, str) or FILE_NAME.fullmatch(file) is None:
        refuse(path, f"{what}.file", file, "the name of an .npy file in the folder")
    is_text = isinstance(dtype, str) and TEXT.fullmatch(dtype) is not None
    if not is_text and dtype not in TORCH_TYPES:
        refuse(path, f"{what}.dtype", dtype, f"one of {', '.join(TORCH_TYPES)}, or <U and a number")
    is_numpy = said.get("numpy", False)
    if not isinstance(is_numpy, bool) or (is_text and not is_numpy):
        refuse(path, f"{what}.numpy", is_numpy, "true for an array of NumPy's, such as of text")
    array = Array(file, dtype, _parse_shape(path, f"{what}.shape", said["shape"]), numpy=is_numpy)
    codec = said.get("codec")
    if codec is None:
        if "width" in said:
            refuse(path, f"{what}.width", said["width"], "none without a 'codec'")
        return array
    if codec not in CODECS or is_numpy:
        refuse(path, f"{what}.codec", codec, f"one of {', '.join((*CODECS, CSR))}, of a tensor")
    width = _check_count(path, f"{what}.width", said.get("width"))
    stored = Codec(codec)
    columns = stored.columns(width)
    if len(array.shape) != 2 or array.shape[1] != columns or dtype != dtype_name(stored.dtype):
        expected = f"{dtype_name(stored.dtype)} of shape [rows, {columns}]"
        found = f"{dtype} of shape {list(array.shape)}"
        refuse(path, what, found, f"{expected}, rows of {width} values as {codec}")
    return array._replace(codec=codec, width=width)


def dtype_name(dtype: torch.dtype) -> str:
    """Return PyTorch's name of a type."""
    return str(dtype).removeprefix("torch.")


def _check_plain(
    path: Path, what: str, array: Array | Sparse, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    """Refuse an array that isn't a plain tensor of one of these types and this shape."""
    plain = isinstance(array, Array) and array.codec is None and not array.numpy
    if not plain or array.dtype not in dtypes or array.shape != shape:  # type: ignore[union-attr]
        kind = f"{array.dtype} " if isinstance(array, Array) else ""
        wanted = f"a tensor of {' or '.join(dtypes)}, of shape {list(shape)}, as it is"
        refuse(path, what, f"{kind}of shape {list(array.shape)}", wanted)


def _check_sizes(path: Path, said: Description) -> None:
    """Refuse arrays that don't fit the numbers of nodes and edges."""
    arrays, num_nodes, num_edges = said.arrays, said.num_nodes, said.num_edges
    for key in (ROWPTR, COL):
        if key not in arrays:
            refuse(path, "'arrays'", f"without {key!r}", "the rows and columns of the adjacency")
    _check_plain(path, "'rowptr'", arrays[ROWPTR], INDEX_TYPES, (num_nodes + 1,))
    rowptr = arrays[ROWPTR]
    assert isinstance(rowptr, Array)
    _check_plain(path, "'col'", arrays[COL], (rowptr.dtype,), (num_edges,))
    if WEIGHT in arrays:
        real = tuple(t for t in TORCH_TYPES if "complex" not in t and t != "bool")
        _check_plain(path, f"'{WEIGHT}'", arrays[WEIGHT], real, (num_edges,))
    if "perm" in arrays:
        _check_plain(path, "'perm'", arrays["perm"], ("int64",), (num_nodes,))
    for key in ("parts", "shards"):
        if key in arrays:
            shape = arrays[key].shape
            shape = shape if len(shape) == 1 and shape[0] >= 2 else (2,)
            _check_plain(path, f"'{key}'", arrays[key], ("int64",), shape)
    for key, array in arrays.items():
        per_node = needs_row_per_node(key, array.shape, num_edges)
        per_edge = key in ("edge_attr", "edge_type")
        rows = num_nodes if per_node else num_edges
        is_by_row = (per_node or per_edge) and len(array.shape) > 0
        if is_by_row and array.shape[0] != rows:
            one = "node" if per_node else "edge"
            refuse(path, f"'{key}'", f"of shape {list(array.shape)}", f"{rows} rows, one per {one}")
