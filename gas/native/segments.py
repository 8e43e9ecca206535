"""Read and write segments of a file: rows of a table, padded to pages of 4096 bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gas.native import extension as native

PAGE = 4096
MOST_PIECES = 1000  # Per system call, which accepts 1,024.


def padded_sizes(num_bytes: np.ndarray) -> np.ndarray:
    """Return the bytes of segments in a file, with padding."""
    return -(-num_bytes // PAGE) * PAGE


def read_segments(file: int, offset: int, starts: np.ndarray, row_bytes: int, out: Tensor) -> int:
    """Read consecutive segments of a file, without the padding.

    Args:
        file: The file descriptor.
        offset: The offset of the first segment.
        starts: The number of rows before each segment, and of all, of shape ``[n + 1]``, int64.
        row_bytes: The size of a row.
        out: The tensor to write to, contiguous, with a row for each of the segments.

    Returns:
        The number of bytes that were read, padding included.

    Raises:
        OSError: If reading fails, or the file is too short.
    """
    assert out.is_contiguous()
    assert out.nbytes == (starts[-1] - starts[0]) * row_bytes
    n = len(starts) - 1
    if native.C is not None:
        starts = np.ascontiguousarray(starts)
        address = starts.ctypes.data
        return _check_result(
            native.C.read_segments(file, offset, address, n, row_bytes, out.data_ptr())
        )
    memory, begin, total = _byte_view(out), 0, 0
    trash = np.empty(PAGE, np.uint8)
    sizes = np.diff(starts) * row_bytes
    for first in range(0, n, MOST_PIECES // 2):
        pieces, read = [], 0
        for size in sizes[first : first + MOST_PIECES // 2].tolist():
            between = -size % PAGE
            pieces += [memory[begin : begin + size], trash[:between]]
            begin += size
            read += size + between
        _move_all(os.preadv, file, pieces, offset + total)
        total += read
    return total


def write_segments(
    file: int,
    rows: Tensor,
    ids: np.ndarray,
    base: int,
    starts: np.ndarray,
    ends: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Write segments of rows to their offsets in a file.

    Args:
        file: The file descriptor.
        rows: Rows, contiguous, of shape ``[N, columns]``.
        ids: The rows of all segments, plus ``base``, int32 or int64.
        base: The number to subtract from ``ids``.
        starts: The first position of each segment in ``ids``, of shape ``[n]``, int64.
        ends: The end of each segment in ``ids``.
        offsets: The offset of each segment in the file, in bytes.
    """
    row_bytes = rows.size(1) * rows.element_size()
    if native.C is not None:
        starts, ends, offsets = map(np.ascontiguousarray, (starts, ends, offsets))
        write = getattr(native.C, f"write_segments_{ids.dtype.name}")
        addresses = [array.ctypes.data for array in (starts, ends, offsets)]
        _check_result(
            write(file, rows.data_ptr(), row_bytes, ids.ctypes.data, base, *addresses, len(starts))
        )
        return
    for first, end, offset in zip(starts.tolist(), ends.tolist(), offsets.tolist(), strict=True):
        index = torch.from_numpy(ids[first:end].astype(np.int64) - base)
        memory = _byte_view(rows[index])
        _move_all(os.pwritev, file, [memory, np.zeros(-len(memory) % PAGE, np.uint8)], offset)


def read_bytes(file: int, offset: int, out: Tensor) -> None:
    """Read a contiguous tensor from a file; ``OSError`` if it is too short."""
    _move_all(os.preadv, file, [_byte_view(out)], offset)


def write_bytes(file: int, offset: int, rows: Tensor) -> None:
    """Write a contiguous tensor to a file."""
    _move_all(os.pwritev, file, [_byte_view(rows)], offset)


def _byte_view(rows: Tensor) -> np.ndarray:
    """View the memory of a contiguous CPU tensor as bytes, without a copy."""
    return rows.view(-1).view(torch.uint8).numpy() if rows.numel() else np.empty(0, np.uint8)


def _check_result(result: int) -> int:
    if result < 0:
        raise _disk_error(-result)
    return result


def _disk_error(number: int) -> OSError:
    return OSError(number, f"rows on disk can't be moved ({os.strerror(number)})")


def _move_all(
    call: Callable[[int, Any, int], int], file: int, pieces: list[np.ndarray], offset: int
) -> None:
    """Read or write consecutive pieces of a file completely, by ``preadv`` or ``pwritev``."""
    pieces = [piece for piece in pieces if len(piece)]
    while pieces:
        done = call(file, pieces, offset)
        if done == 0:
            raise _disk_error(errno.EIO)
        offset += done
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if done:
            pieces[0] = pieces[0][done:]
