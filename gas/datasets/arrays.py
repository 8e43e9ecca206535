"""Arrays of a user's own as what a graph is made of: tensors, targets, masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gas.graph.features import to_csr_features
from gas.native.sparse_rows import accept_beta_state


def load_array(path: Path) -> np.ndarray:
    """Reads an ``.npy`` file, without ever unpickling code.

    Raises:
        ValueError: If it is none.
    """
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        reason = "it holds pickled objects" if "pickle" in str(error).lower() else str(error)
        raise ValueError(f"{path} can't be read as an array of numbers: {reason}") from error


def map_array(path: Path) -> np.ndarray:
    """Maps an ``.npy`` file, to be read; what is empty can't be mapped, and is read.

    Raises:
        ValueError: If it is none.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError):
        return load_array(path)  # Which says why.


def load_sparse(path: Path) -> Tensor:
    """Reads a matrix that ``scipy.sparse.save_npz`` has written, as ``torch.sparse_csr``, float32.

    Raises:
        ValueError: If it is none, or of another format than csr, csc and coo.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            found = {key: arrays[key] for key in arrays.files}
        kind, shape = found["format"].item().decode(), tuple(map(int, found["shape"]))
        value = tensor_of(found["data"], "data").float()
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
        return to_csr_features(x, path.name)
    except Exception as error:  # Whatever an archive of something else leads to.
        raise ValueError(
            f"{path} can't be read as a sparse matrix ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'empty'}): expected what "
            "scipy.sparse.save_npz writes of a csr, csc or coo matrix of numbers"
        ) from error


def tensor_of(array: np.ndarray, key: str) -> Tensor:
    """A tensor of numbers; unsigned ones, which PyTorch can't compute with, become int64.

    Raises:
        ValueError: If the array holds something else.
    """
    if array.dtype.kind not in "biuf":
        raise ValueError(f"the array '{key}' has type {array.dtype}, expected numbers")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"the array '{key}' holds {array.max()}, expected at most 2**63 - 1")
        array = array.astype(np.int64)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def targets(y: Tensor) -> Tensor:
    """One integer class or real target per node, or the labels of ``[N, C]`` as they are.

    Raises:
        ValueError: If they are none of these.
    """
    y = y.squeeze(1) if y.dim() == 2 and y.size(1) == 1 else y
    if y.dim() == 2:
        return y
    if y.dim() == 1 and y.is_floating_point() and bool((y != y.round()).any()):
        if not bool(torch.isfinite(y).all()):
            raise ValueError("'y' holds a NaN or infinite value, expected classes or real numbers")
        return y.float()
    if y.dim() != 1 or bool((y < -1).any()):
        raise ValueError(
            "'y' holds no classes, expected integers from 0 for each node, -1 where unknown; or "
            "[N, C] with 0 and 1 for several labels; or real numbers to predict"
        )
    return y.long()


def check_classes(y: Tensor) -> None:
    """Refuses numbers of classes that can't be meant as such.

    Raises:
        ValueError: If most classes up to the largest don't occur.
    """
    if y.dim() > 1 or y.is_floating_point():
        return
    distinct = torch.unique(y[y >= 0])
    if beyond_reason(distinct.numpy()):
        raise ValueError(
            f"'y' holds the class {int(distinct[-1])}, but only {distinct.numel()} classes occur: "
            "number them from 0, y = torch.unique(y, return_inverse=True)[1], or make them floats "
            "if they are numbers to predict"
        )


def beyond_reason(distinct: np.ndarray) -> bool:
    """Whether so few of the classes up to the largest occur that they are something else."""
    return len(distinct) > 0 and int(distinct.max()) >= 2 * len(distinct) + 100


def bool_mask(mask: Tensor, key: str) -> Tensor:
    """A mask of bools, which may be given as numbers.

    Raises:
        ValueError: If it holds other values than 0 and 1.
    """
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"'{key}' holds other values than 0 and 1, expected one bool per node")
    return mask.bool()
