"""``.npy`` files: write them in blocks, map them after checking their headers."""

from __future__ import annotations

import io
import math
import mmap
import os
import platform
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from gas.native import flush_to_disk, refuse

COMMON = ("x86_64", "aarch64", "riscv64", "s390x")  # With the same value of MAP_NORESERVE.
LONGEST_HEADER = 65536  # Bytes; headers that gas writes have 128.
PREFIX = 12  # The largest size of magic, version and length of a header, in bytes.
ALIGNED = 16  # The offset of elements is a multiple of this in files of NumPy.
# A copy-on-write mapping without reserved swap space, as the file may be larger than memory.
PRIVATE: dict[str, Any] = {"access": mmap.ACCESS_COPY}
if sys.platform == "linux":
    noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in COMMON else 0)
    PRIVATE = {"flags": mmap.MAP_PRIVATE | noreserve}


class Array(NamedTuple):
    """One array in a file.

    * ``file``: the file's name.
    * ``dtype``: the type of the elements: PyTorch's name of it, or ``<U12`` for text of up to 12
      letters. NumPy has no bfloat16: such files have uint16.
    * ``shape``: the shape in the file.
    * ``codec``: the codec of rows, see :class:`gas.history.Codec`; ``None`` for numbers.
    * ``width``: the number of values of an encoded row.
    * ``numpy``: whether it is opened as a NumPy array, not as a tensor.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    codec: str | None = None
    width: int | None = None
    numpy: bool = False

    @property
    def numpy_dtype(self) -> np.dtype:
        """The type in the file."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return self.numpy_dtype.itemsize * math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the entry in ``graph.json``."""
        said: dict[str, Any] = {"file": self.file, "dtype": self.dtype, "shape": list(self.shape)}
        if self.codec is not None:
            said |= {"codec": self.codec, "width": self.width}
        return said | ({"numpy": True} if self.numpy else {})


def map_array(folder: Path, array: Array) -> np.ndarray:
    """Map an array of a folder, copy-on-write.

    The file must be in the folder, and its header and size must agree with ``graph.json``.
    """
    path = folder / array.file
    check_inside(path)
    try:
        file = os.open(
            path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        )
    except OSError as error:
        refuse(path, "it", f"not readable ({error.strerror})", "the file that graph.json names")
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            refuse(path, "it", "no file", "an .npy file")
        start = _check_header(path, file, array)
        if about.st_size != start + array.nbytes:
            refuse(path, "its size", f"{about.st_size:,} bytes", f"{start + array.nbytes:,}")
        return map_private(file, array.numpy_dtype, start, array.shape)
    finally:
        os.close(file)


def map_private(file: int, dtype: np.dtype, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """Map an array in an open file, whose size was checked, copy-on-write."""
    if 0 in shape:  # An empty array can't be mapped.
        return np.empty(shape, dtype)
    mapped = mmap.mmap(file, start + math.prod(shape) * dtype.itemsize, **PRIVATE)
    return np.frombuffer(mapped, dtype, offset=start).reshape(shape)


def check_inside(path: Path) -> None:
    """Refuse a symbolic link to a file outside of its folder."""
    if not path.is_symlink():
        return
    target = os.path.realpath(path)
    if os.path.dirname(target) != os.path.realpath(path.parent):
        refuse(path, "it", f"a link to {target}", "a file in the folder: copy it there")


def _check_header(path: Path, file: int, array: Array) -> int:
    """Check the header of a file against an array; return the offset of the elements."""
    prefix = os.read(file, PREFIX)
    if len(prefix) < PREFIX or prefix[:6] != npy.MAGIC_PREFIX or prefix[6] not in (1, 2):
        refuse(path, "its beginning", repr(prefix), "the header of an .npy file, version 1 or 2")
    width = 2 if prefix[6] == 1 else 4
    length = int.from_bytes(prefix[8 : 8 + width], "little")
    start = 8 + width + length
    if length > LONGEST_HEADER:
        refuse(path, "the length of its header", length, f"at most {LONGEST_HEADER} bytes")
    if start % ALIGNED:
        refuse(path, "the length of its header", length, f"one whose end {ALIGNED} divides")
    header = io.BytesIO(prefix + os.read(file, start - PREFIX))
    try:
        version = npy.read_magic(header)
        read = npy.read_array_header_1_0 if version[0] == 1 else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(header)
    except Exception as error:  # An invalid header may raise any error.
        refuse(path, "its header", f"unreadable ({type(error).__name__})", "that of an .npy file")
    wanted = array.numpy_dtype
    if dtype != wanted or shape != array.shape:
        found = f"{dtype} of shape {list(shape)}"
        refuse(path, "its header", found, f"{wanted} of shape {list(array.shape)}, by graph.json")
    if is_fortran and len(shape) > 1:
        refuse(path, "its header", "in Fortran's order", "C's order: rows one after the other")
    return header.tell()


def tensor_of(mapped: np.ndarray, array: Array) -> Tensor:
    """Convert a mapped array to a tensor in the same memory."""
    tensor = torch.from_numpy(mapped)
    return tensor.view(torch.bfloat16) if array.dtype == "bfloat16" else tensor


def array_of(tensor: Tensor) -> np.ndarray:
    """Convert a tensor to the array that is stored."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _write_header(stream: BinaryIO, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    fields = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(stream, fields)


class GrowingArray:
    """An ``.npy`` file to which rows are appended; their number is written by :meth:`close`.

    Args:
        path: The file, which must not exist.
        dtype: The type of the elements, NumPy's.
        width: The shape of a row.
    """

    def __init__(self, path: Path, dtype: np.dtype, width: tuple[int, ...] = ()) -> None:
        self._stream = path.open("xb")
        self._dtype, self._width, self.num_rows = dtype, width, 0
        _write_header(self._stream, self._dtype, (0, *width))
        self._start = self._stream.tell()

    def append(self, rows: np.ndarray) -> None:
        """Append rows."""
        np.ascontiguousarray(rows, self._dtype).tofile(self._stream)
        self.num_rows += len(rows)

    def close(self) -> None:
        """Write the number of rows into the header, durably."""
        self._stream.seek(0)
        _write_header(self._stream, self._dtype, (self.num_rows, *self._width))
        assert self._stream.tell() == self._start, "the header has grown"
        flush_to_disk(self._stream)
        self._stream.close()


def write_array(path: Path, array: Array, blocks: Iterable[np.ndarray]) -> None:
    """Write a new file, durably.

    Args:
        path: The file, which must not exist.
        array: The description of its content.
        blocks: The elements, in order, as an iterable of blocks.
    """
    wanted = array.numpy_dtype
    with path.open("xb") as stream:
        _write_header(stream, wanted, array.shape)
        start = stream.tell()
        for block in blocks:
            stream.write(np.ascontiguousarray(block, wanted).reshape(-1).view(np.uint8).data)
        flush_to_disk(stream)
        written = stream.tell() - start
    assert written == array.nbytes, f"{path}: {written} bytes, expected {array.nbytes}"
