"""Number types of edges and nodes in the order of their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gas.datasets.roles import leave_out
from gas.datasets.tables import is_number, plain_ids

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
