"""Read arrays from files, and convert them to tensors, targets and masks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from gas.graph import to_csr_features, to_float32_features
from gas.native import accept_beta_state

MOST_PACKED = {ZIP_STORED: 1, ZIP_DEFLATED: 1100}  # The largest ratios of compression.
OTHERS = {ZIP_BZIP2: "bzip2", ZIP_LZMA: "LZMA"}


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file, without ever unpickling code.

    Raises:
        Exception: Of any type, if the file is damaged. The caller adds the name of the file.
    """
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        for entry in arrays.zip.infolist():
            kind = entry.compress_type
            if kind not in MOST_PACKED:
                method = OTHERS.get(kind, f"method {kind}")
                raise ValueError(
                    f"{entry.filename!r} is packed by {method}, expected deflate: write the arrays "
                    "by numpy.savez_compressed"
                )
            with arrays.zip.open(entry) as content:
                size = min(entry.file_size, MOST_PACKED[kind] * entry.compress_size)
                if not _check_npy_header(content, size):
                    raise ValueError(f"{entry.filename!r} is no array")
        return {key: arrays[key] for key in arrays.files}


def load_array(path: Path) -> np.ndarray:
    """Read an ``.npy`` file, without ever unpickling code."""
    try:
        with path.open("rb") as stream:
            _check_npy_header(stream, path.stat().st_size)
        return np.load(path, allow_pickle=False)
    except Exception as error:  # NumPy and Python's parser may raise any error.
        reason = "it holds pickled objects" if "pickle" in str(error).lower() else str(error)
        raise ValueError(f"{path} can't be read as an array of numbers: {reason}") from error


def map_array(path: Path) -> np.ndarray:
    """Map an ``.npy`` file into memory, read-only; read an empty array, which can't be mapped."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:  # NumPy may raise any error.
        return load_array(path)  # This explains the error.


def map_features(path: Path) -> np.ndarray:
    """Map an ``.npy`` file of features, of shape ``[N, F]``."""
    array = map_array(path)
    if array.ndim != 2 or array.dtype.kind not in "biuf":
        raise ValueError(
            f"{path} is of type {array.dtype} and shape {list(array.shape)}, expected numbers of "
            "shape [N, F]: a row of features per node"
        )
    return array


def _check_npy_header(stream: IO[bytes], num_bytes: int) -> bool:
    """Check the header of an ``.npy`` file, before memory is allocated for what it promises.

    Returns:
        ``False`` if the stream isn't an ``.npy`` file.

    Raises:
        Exception: Of any type, if its header is damaged, or promises more than ``num_bytes``.
    """
    if stream.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
        return False
    stream.seek(0)
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its header has version {version}, expected 1 or 2")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects")
    promised, left = math.prod(shape) * dtype.itemsize, num_bytes - stream.tell()
    if promised > left:
        raise ValueError(f"its header promises {promised:,} bytes, but {left:,} follow")
    return True


def load_sparse(path: Path) -> Tensor:
    """Read a matrix of ``scipy.sparse.save_npz`` as ``torch.sparse_csr``, float32.

    Raises:
        ValueError: If the file holds something else, or a value is too large for float32.
    """
    try:
        found = load_arrays(path)
        kind, shape = found["format"].item().decode(), tuple(map(int, found["shape"]))
        value = tensor_of(found["data"], "data")
        if value.dtype != torch.float64:  # All others fit float32; sums of int8 don't fit int8.
            value = value.float()
        accept_beta_state()
        names = ("row", "col") if kind == "coo" else ("indptr", "indices")
        first, second = (torch.from_numpy(found[name].astype(np.int64)) for name in names)
        if kind == "coo":
            index = torch.stack([first, second])
            x = torch.sparse_coo_tensor(index, value, shape, check_invariants=True)
        else:
            layout = {"csr": torch.sparse_csr, "csc": torch.sparse_csc}[kind]
            x = torch.sparse_compressed_tensor(
                first, second, value, shape, layout=layout, check_invariants=False
            )
        csr = to_csr_features(x, path.name)
    except Exception as error:  # Another archive may raise any error.
        raise ValueError(
            f"{path} can't be read as a sparse matrix ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'empty'}): expected what "
            "scipy.sparse.save_npz writes of a csr, csc or coo matrix of numbers"
        ) from error
    return to_float32_features(csr, f"'x' of {path.name}")


def tensor_of(array: np.ndarray, key: str) -> Tensor:
    """Convert an array of numbers to a tensor; unsigned types that PyTorch lacks become int64."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:  # PyTorch has no float128.
        raise ValueError(f"the array '{key}' has type {array.dtype}, expected numbers")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"the array '{key}' holds {array.max()}, expected at most 2**63 - 1")
        array = array.astype(np.int64)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def to_targets(y: Tensor) -> Tensor:
    """Convert ``y`` to one class or real target per node; labels ``[N, C]`` stay as they are.

    A target may be NaN, which :func:`check_targets` refuses.
    """
    y = y.squeeze(1) if y.dim() == 2 and y.size(1) == 1 else y
    if y.dim() == 2:
        return y
    if y.dim() == 1 and y.is_floating_point() and bool((y != y.round()).any()):
        if bool(y.isinf().any()) or bool(y.isnan().all()):
            raise _not_finite_error()
        return y.float()
    y = y if y.is_floating_point() else y.long()  # An unsigned -1 is the largest number.
    if y.dim() != 1 or bool((y < -1).any()):
        raise ValueError(
            "'y' holds no classes, expected integers from 0 for each node, -1 where unknown; or "
            "[N, C] with 0 and 1 for several labels; or real numbers to predict"
        )
    return y.long()


def _not_finite_error() -> ValueError:
    """Return the error of targets that aren't finite."""
    return ValueError("'y' holds a NaN or infinite value, expected classes or real numbers")


def check_targets(y: Tensor) -> None:
    """Refuse real targets that are NaN."""
    if y.dim() == 1 and y.is_floating_point() and bool(y.isnan().any()):
        raise _not_finite_error()


def check_classes(y: Tensor) -> None:
    """Refuse a number of classes that can't be meant."""
    if y.dim() > 1 or y.is_floating_point():
        return
    distinct = torch.unique(y[y >= 0])
    if are_implausible_classes(distinct.numpy()):
        raise ValueError(
            f"'y' holds the class {int(distinct[-1])}, but only {distinct.numel()} classes occur: "
            "number them from 0, y = torch.unique(y, return_inverse=True)[1], or make them floats "
            "if they are numbers to predict"
        )


def are_implausible_classes(distinct: np.ndarray) -> bool:
    """Return whether so few of the classes up to the largest occur that they aren't classes."""
    return len(distinct) > 0 and int(distinct.max()) >= 2 * len(distinct) + 100


def bool_mask(mask: Tensor, key: str) -> Tensor:
    """Convert a mask of bools, or of the numbers 0 and 1, to bool."""
    if not isinstance(mask, Tensor) or mask.dim() == 0:
        found = "a single value" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"'{key}' is {found}, expected a tensor of one bool per node")
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"'{key}' holds other values than 0 and 1, expected one bool per node")
    return mask.bool()
