"""Move and encode rows on a CUDA device, on the current stream; the host doesn't wait.

Natively if the extension has CUDA, else in torch, with equal results. Indices aren't checked here:
the loader has checked them. The current device may be another one.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from gas.native import costs
from gas.native import extension as native
from gas.native.transfer import decode_torch, encode_torch, num_stored_columns

MOST_BLOCKS = 65535  # For rows on the device: no limit in practice.
# Of 256 threads with up to 16 bytes each: over 500 KB on their way on a GPU of 132 multiprocessors,
# several times what a bus of 64 GB/s holds in 2 microseconds. The rest of the GPU computes.
BUS_BLOCKS_PER_PROCESSOR = 1


def reads_host_memory() -> bool:
    """Return whether kernels can read rows of pinned host memory over the bus."""
    return native.C is not None and native.C.WITH_CUDA


def _launches(x: Tensor) -> bool:
    """Return whether there are kernels for a tensor."""
    return x.is_cuda and reads_host_memory()


def _row_bytes(table: Tensor) -> int:
    return math.prod(table.shape[1:]) * table.element_size()


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _most_blocks(table: Tensor, device: torch.device) -> int:
    """Return the maximum number of blocks on a table's rows."""
    if table.device.type != "cpu":
        return MOST_BLOCKS
    return BUS_BLOCKS_PER_PROCESSOR * _num_processors(device)


def gather_rows(table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``table[index]`` on the device of ``index``.

    Args:
        table: Contiguous, on that device or in pinned host memory.
        index: The rows, of shape ``[n]``, int64, on the device.
        out: The tensor to write to, contiguous, of the table's dtype. (default: a new tensor)
    """
    if out is None:
        out = table.new_empty(index.numel(), *table.shape[1:], device=index.device)
    if not _launches(index) or costs.prefers_torch_move("gather", table):
        return torch.index_select(table, 0, index, out=out)
    rows = table, _row_bytes(table), index, index.numel(), out
    native.launch("cuda_gather_rows", index.device, *rows, _most_blocks(table, index.device))
    return out


def scatter_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Set ``table[index] = rows``, as :func:`gather_rows` reads; any of equal indices wins."""
    if not _launches(index) or costs.prefers_torch_move("scatter", table):
        table.index_copy_(0, index, rows)
        return
    moved = rows, _row_bytes(table), index, index.numel(), table
    native.launch("cuda_scatter_rows", index.device, *moved, _most_blocks(table, index.device))


def encode(codec: str, x: Tensor) -> Tensor:
    """Encode contiguous float32 rows of shape ``[n, width]``; see csrc/transfer/codec.h."""
    if codec != "int8" or not _launches(x):
        return encode_torch(codec, x)
    n, width = x.shape
    rows = torch.empty(n, num_stored_columns(codec, width), dtype=torch.uint8, device=x.device)
    native.launch("cuda_encode_int8", x.device, x, n, width, rows.size(1), rows)
    return rows


def decode(codec: str, rows: Tensor, out: Tensor, index: Tensor | None = None) -> None:
    """Decode stored rows into contiguous float32 rows, of shape ``[n, width]``, on a device.

    Args:
        codec: The codec of the rows.
        rows: Contiguous, on that device, or in pinned host memory with ``index``.
        out: The tensor to write to.
        index: The rows to decode, of shape ``[n]``, int64, on the device. (default: all)
    """
    if codec != "int8" or not _launches(out):
        if index is not None:
            rows = gather_rows(rows, index)
        # A conversion between types of floating point needs no tensor in between.
        out.copy_(decode_torch(codec, rows, out.size(1)) if codec == "int8" else rows)
        return
    sizes = out.size(0), out.size(1), rows.size(1)
    blocks = _most_blocks(rows, out.device)
    native.launch("cuda_decode_int8", out.device, rows, index, *sizes, out, blocks)
