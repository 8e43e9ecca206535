"""Moving and encoding rows on a CUDA device, on the current stream; nothing waits for the host.

Natively where the extension has CUDA, in torch elsewhere, with equal results. Indices are not
checked: the loader checks them when it makes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gas import native
from gas.native import costs
from gas.native.transfer import decode_torch, encode_torch, stored_columns


def reads_host_memory() -> bool:
    """Whether kernels can read rows of pinned host memory over the bus."""
    return native.C is not None and native.C.WITH_CUDA


def _row_bytes(table: Tensor) -> int:
    return math.prod(table.shape[1:]) * table.element_size()


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` on the device of ``index``.

    Args:
        table: Contiguous, on that device or in pinned host memory.
        index: The rows, of shape ``[n]``, int64, on the device.
    """
    if not reads_host_memory() or costs.moves_by_torch("gather", table):
        return table.index_select(0, index)
    out = torch.empty(index.numel(), *table.shape[1:], dtype=table.dtype, device=index.device)
    native.launch(
        "cuda_gather_rows",
        index.device,
        table.data_ptr(),
        _row_bytes(table),
        index.data_ptr(),
        index.numel(),
        out.data_ptr(),
    )
    return out


def scatter_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """``table[index] = rows``; of rows with the same index any one wins.

    Args:
        table: Contiguous, on the device of ``index`` or in pinned host memory.
        index: The rows, of shape ``[n]``, int64, on the device.
        rows: Their values, contiguous, of the table's dtype, on the device.
    """
    if not reads_host_memory() or costs.moves_by_torch("scatter", table):
        table.index_copy_(0, index, rows)
        return
    native.launch(
        "cuda_scatter_rows",
        index.device,
        rows.data_ptr(),
        _row_bytes(table),
        index.data_ptr(),
        index.numel(),
        table.data_ptr(),
    )


def encode(codec: str, x: Tensor) -> Tensor:
    """Encodes contiguous float32 rows of shape ``[n, width]``; see csrc/transfer/codec.h."""
    if codec != "int8" or not reads_host_memory():
        return encode_torch(codec, x)
    n, width = x.shape
    rows = torch.empty(n, stored_columns(codec, width), dtype=torch.uint8, device=x.device)
    address = x.data_ptr(), n, width, rows.size(1), rows.data_ptr()
    native.launch("cuda_encode_int8", x.device, *address)
    return rows


def decode(codec: str, rows: Tensor, out: Tensor) -> None:
    """Decodes contiguous stored rows into contiguous float32 rows, of shape ``[n, width]``."""
    if codec != "int8" or not reads_host_memory():
        out.copy_(decode_torch(codec, rows, out.size(1)))
        return
    address = rows.data_ptr(), rows.size(0), out.size(1), rows.size(1), out.data_ptr()
    native.launch("cuda_decode_int8", out.device, *address)
