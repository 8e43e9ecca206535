"""Roles of files and columns by their names; types of edges and nodes, numbered by theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gas.datasets.tables import PARQUET, TEXT, Table, format_of, is_number, plain_ids
from gas.native import warn

# Names of files, in lower case and with '_' for '-'.
FILES = {
    "edges": ("edges", "edge", "edge_index", "edge_list", "edgelist", "links"),
    "edge_weight": ("edge_weight", "edge_weights", "weights"),
    "edge_attr": ("edge_attr", "edge_attrs", "edge_feat", "edge_features"),
    "edge_type": ("edge_type",),
    "edge_type_names": ("edge_types", "edge_type_names"),
    "node_id": ("node_id", "node_ids", "ids"),
    "nodes": ("nodes", "node", "vertices"),
    "x": ("x", "features", "feat", "node_features", "node_feat"),
    "y": ("y", "labels", "label", "targets", "node_label", "node_labels"),
    "node_type": ("node_type",),
    "node_type_names": ("node_types", "node_type_names"),
    "split": ("split", "splits"),
}
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
PART_OF = {name: part for part, names in SPLITS.items() for name in names}
TYPE_NAMES = {"edge_type_names": "edge_type", "node_type_names": "node_type"}  # Lines of names.
LISTS = ("", "_idx", "_index", "_ids", "_nodes")  # Endings of the names of lists of nodes.
# Names of columns, in lower case.
EDGE_COLUMNS = {
    "source": ("source", "src", "from", "head", "u", "source_id", "src_id", "from_id", "node1"),
    "target": ("target", "dst", "to", "tail", "v", "target_id", "dst_id", "to_id", "node2", "dest"),
    "weight": ("weight", "edge_weight", "w"),
    "edge_type": ("type", "edge_type"),
}
NODE_COLUMNS = {
    "id": ("id", "node_id", "node", "nodeid"),
    "label": ("label", "labels", "y", "class", "category", "target", "targets"),
    "split": ("split",),
    "node_type": ("type", "node_type"),
    **{f"{part}_mask": (*names, f"{names[0]}_mask") for part, names in SPLITS.items()},
}
TYPE, TYPE_ROLES = "type", ("edge_type", "node_type")  # In `columns`, the first sets both roles.
INDEX = ("", "unnamed: 0", "__index_level_0__")  # Names that pandas gives to its index.


def find_files(path: Path) -> dict[str, Path]:
    """Return the files of a folder by the roles of their names."""
    roles = {name: role for role, names in FILES.items() for name in names}
    roles |= {name + end: part for name, part in PART_OF.items() for end in LISTS}
    roles |= {f"{name}_mask": f"{part}_mask" for name, part in PART_OF.items()}
    found: dict[str, Path] = {}
    others = []
    for file in sorted(path.iterdir()):
        if (
            file.name.startswith(".")
            or not file.is_file()
            or format_of(file) not in (".npy", ".npz", *PARQUET, *TEXT)
        ):
            continue
        role = roles.get(file.name.split(".")[0].lower().replace("-", "_"))
        if role in TYPE_NAMES and format_of(file) != ".txt":
            role = TYPE_NAMES[role] if format_of(file) == ".npy" else None
        if format_of(file) == ".npz" and role != "x":  # Another .npz may be a whole graph.
            continue
        if role is None:
            others.append(file.name)
        elif role in found:
            raise ValueError(
                f"{path} holds {found[role].name} and {file.name}, which are both read as "
                f"{role!r}: take one of them out"
            )
        else:
            found[role] = file
    if "edges" not in found:
        held = f"only {', '.join(others[:5])}" if others else "no table or array"
        raise ValueError(
            f"{path} holds {held}, expected its edges, in edges.csv, edges.parquet or "
            "edge_index.npy; and nodes.csv, or x.npy and y.npy"
        )
    leave_out([f"the file {name}" for name in others], str(path))
    return found


def open_table(
    file: Path, known: Mapping[str, Sequence[str]], columns: Mapping[str, str]
) -> tuple[Table, dict[str, str]]:
    """Open a table, and find its columns by role.

    Args:
        file: The file.
        known: Known names of columns by role.
        columns: Names of columns by role, given by the user.
    """
    names = {name for role in known for name in known[role]} | set(columns.values())
    table = Table(file, lambda cell: cell in names or cell.lower() in names)
    found: dict[str, str] = {}
    for role in known:
        chosen = columns.get(role)
        if chosen is None and role in TYPE_ROLES and columns.get(TYPE) in table.types:
            chosen = columns[TYPE]
        fits = [name for name in table.types if name.strip().lower() in known[role]]
        if chosen is not None:
            fits = [chosen] if chosen in table.types else []
        if len(fits) > 1:
            raise ValueError(
                f"{file} has the columns {' and '.join(map(repr, fits))}, each of which may be its "
                f"{role!r}: say which, columns={{{role!r}: {fits[0]!r}}}"
            )
        if fits and fits[0] not in found.values():
            found[role] = fits[0]
    return table, found


def read_numbers(file: Path) -> np.ndarray:
    """Read all columns of a table of numbers, of shape ``[rows, width]``, float32."""
    table, _ = open_table(file, {}, {})
    return table.numbers(list(table.types))


def leave_out(what: Sequence[str], where: str) -> None:
    """Warn of files or columns that are ignored."""
    if what:
        some = ", ".join(what[:5]) + (f" and {len(what) - 5} more" if len(what) > 5 else "")
        warn(f"{where}: {some} left out: neither a known name nor a column of numbers")


# Types --------------------------------------------------------------------------------------------

Names = list[str | int]


def number_types(codes: np.ndarray, distinct: np.ndarray, file: Path) -> tuple[Tensor, Names]:
    """Number types in the order of their names, numerical or alphabetical.

    Args:
        codes: The position in ``distinct`` of each type, of shape ``[n]``, -1 for a missing one.
        distinct: The distinct types, from :meth:`gas.datasets.tables.Table.values`.
        file: The file, for error messages.

    Returns:
        The number of each type, of shape ``[n]``, int64, and the names by number.
    """
    check_no_missing_types(codes, distinct, file)
    places, names = sort_types(distinct, file)
    return torch.from_numpy(places[codes]), names


def check_no_missing_types(
    codes: np.ndarray, distinct: np.ndarray, file: Path, first: int = 0
) -> None:
    """Refuse missing, empty and NaN types, and dates; ``first`` is the number of the first row."""
    blank = distinct == "" if distinct.dtype.kind in "UO" else distinct != distinct
    codes = np.where(np.isin(codes, np.flatnonzero(blank)), -1, codes)
    if (codes < 0).any():
        raise ValueError(
            f"{file} has no type in row {first + int((codes < 0).argmax())}: fill in what is "
            "missing, or rename the column if it is an attribute"
        )
    if distinct.dtype.kind in "mM":
        raise _type_error(file, distinct[0].item())


def sort_types(distinct: np.ndarray, file: Path) -> tuple[np.ndarray, Names]:
    """Return the number of each distinct type, of shape ``[types]``, and the names by number."""
    distinct = plain_ids(distinct)
    kind = distinct.dtype.kind
    are_numbers = all(map(is_number, distinct.tolist())) if kind in "UO" else kind not in "iu"
    if len(distinct) and are_numbers:
        raise _type_error(file, distinct[0].item())
    names, places = np.unique(distinct, return_inverse=True)
    return places.reshape(-1).astype(np.int64), names.tolist()


def _type_error(file: Path, name: object) -> ValueError:
    """Return the error of a type that is neither a name nor an integer."""
    return ValueError(
        f"{file} has the type {name!r}, expected names or integers: rename the column if it is an "
        "attribute"
    )


def number_array(array: np.ndarray, file: Path) -> tuple[Tensor, Names]:
    """Number the types in an array; see :func:`number_types`."""
    distinct, codes = np.unique(check_types(array, file), return_inverse=True)
    return number_types(codes.reshape(-1), distinct, file)


def check_types(array: np.ndarray, file: Path) -> np.ndarray:
    """Return an array of types in shape ``[n]``."""
    flat = array[:, 0] if array.shape[1:] == (1,) else array
    if flat.ndim != 1 or flat.dtype.kind not in "iuU":
        raise ValueError(
            f"{file} is of type {array.dtype} and shape {list(array.shape)}, expected integers or "
            "text, one for each"
        )
    return flat


def read_names(file: Path) -> Names:
    """Read the names of types, one line each, in the order of their numbers."""
    try:
        names: Names = [line.strip() for line in file.read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} can't be read as text: {error}") from error
    for number, name in enumerate(names):
        if not name or name in names[:number]:
            fault = f"has {name!r} twice" if name else "is empty"
            raise ValueError(f"{file} {fault} in line {number + 1}: expected a name for each type")
    return names


def leave_out_names(file: Path | None, key: str) -> None:
    """Warn of a file with names of types, if there is one, where there are no types."""
    if file is not None:
        leave_out([f"the file {file.name} without {key}.npy"], str(file.parent))


def place_types(names: Names, listed: Names, file: Path) -> np.ndarray:
    """Return the number of each type in a list of names, of shape ``[types]``.

    Args:
        names: The types: names in the list, or numbers of its lines.
        listed: The list, from :func:`read_names`.
        file: The file of the list.
    """
    known: dict[object, int] = {name: number for number, name in enumerate(listed)}
    if all(isinstance(name, int) for name in names):
        known = {number: number for number in range(len(listed))}
    lacking = [name for name in names if name not in known]
    if lacking:
        raise ValueError(
            f"{file} has {len(listed)} names, and none for the type {lacking[0]!r}: expected a "
            "line for each type, in the order of their numbers, from 0"
        )
    return np.array([known[name] for name in names], np.int64)
