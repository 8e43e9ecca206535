"""Arrays of a user's own as what a graph is made of: tensors, targets, masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


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
