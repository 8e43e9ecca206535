"""Tables in host memory: the jobs that read and write their rows.

Checked functions that run natively where the extension was built and as their
pure-torch twins elsewhere, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gas import native
from gas.native import buffers
from gas.native.checks import check_index, check_range

# What csrc/transfer/codec.h calls the formats of stored rows.
CODECS = {"bfloat16": 1, "float16": 2, "int8": 3}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


# Codecs -------------------------------------------------------------------------------------------


def stored_columns(codec: str, width: int) -> int:
    """How many elements a stored row has: of the codec's dtype, or bytes for ``int8``."""
    return (4 + width + 3) // 4 * 4 if codec == "int8" else width


def encode_torch(codec: str, x: Tensor) -> Tensor:
    """Encodes float32 rows of shape ``[n, width]`` as csrc/transfer/codec.h describes."""
    if codec != "int8":
        return x.to(_DTYPES[codec])
    n, width = x.shape
    if x.numel() == 0:
        return x.new_zeros(n, stored_columns(codec, width), dtype=torch.uint8)
    scale = x.abs().amax(1, keepdim=True) / 127
    usable = (scale > 0) & scale.isfinite()
    quotient = (x / scale).clamp(-127, 127).round()
    values = torch.where(usable, quotient, 0).to(torch.int8)
    pad = x.new_zeros(n, stored_columns(codec, width) - 4 - width, dtype=torch.uint8)
    return torch.cat([scale.view(torch.uint8), values.view(torch.uint8), pad], dim=1)


def decode_torch(codec: str, rows: Tensor, width: int) -> Tensor:
    """Decodes stored rows to float32 rows of shape ``[n, width]``."""
    if codec != "int8":
        return rows.float()
    scale = rows[:, :4].contiguous().view(torch.float32)
    return rows[:, 4 : 4 + width].view(torch.int8) * scale


def gather_decode(table: Tensor, codec: str, width: int, index: Tensor) -> Tensor:
    """Decodes rows of a table of stored rows: float32, of shape ``[n, width]``.

    Args:
        table: The stored rows, contiguous, of shape ``[N, columns]``, on the CPU.
        codec: How they are encoded, a key of ``CODECS``.
        width: The width of decoded rows.
        index: The rows to read, of shape ``[n]``, int64.

    Raises:
        IndexError: If an index is outside ``[0, N)``.
    """
    out = buffers.empty(index.numel(), width, table.new_empty(0, dtype=torch.float32))
    Table(table, codec, width).pull(index.contiguous(), out).run()
    return out


# Jobs ---------------------------------------------------------------------------------------------


class Job:
    """Work to do now, by :meth:`run`, or beside the computation, by ``gas.native.engine.Engine``.

    Args:
        work: A native job, or a function without arguments where the extension was not built.
        keep: What must live until the work is done: native code knows addresses only.
    """

    def __init__(self, work: Any, keep: object = None) -> None:
        self.work = work
        self.keep = keep

    @staticmethod
    def calling(function: Callable[[], None]) -> Job:
        """A job that calls a function of Python, once; what it refers to is let go then."""
        functions = [function]

        def work() -> None:
            functions.pop()()

        return Job(work if native.C is None else native.C.Job(work))

    def run(self, threads: int | None = None) -> None:
        """Does the work, with up to so many threads; as many as PyTorch without a number."""
        if native.C is None:
            self.work()
        else:
            self.work.run(torch.get_num_threads() if threads is None else threads)


# Tables -------------------------------------------------------------------------------------------


class Table:
    """Rows in host memory, as they are or encoded.

    Its functions check their arguments, and return a job.

    Args:
        rows: The stored rows, contiguous, of shape ``[N, columns]``.
        codec: How they are encoded, a key of ``CODECS``, or ``None``. Buffers are float32 where
            rows are encoded, and of the rows' dtype otherwise.
        width: The width of decoded rows. (default: that of ``rows``)
    """

    def __init__(self, rows: Tensor, codec: str | None = None, width: int | None = None) -> None:
        self.rows = rows
        self.codec = codec
        self.width = rows.size(1) if width is None else width
        self.dtype = rows.dtype if codec is None else torch.float32
        self._native = None
        if native.C is not None and rows.device.type == "cpu":
            if codec is None:
                row_bytes = rows.size(1) * rows.element_size()
                self._native = native.C.Table(rows.data_ptr(), rows.size(0), row_bytes)
            else:
                self._native = native.C.Table(
                    rows.data_ptr(), rows.size(0), CODECS[codec], self.width
                )

    def _check(self, name: str, buffer: Tensor, n: int) -> None:
        shape = (n, self.width)
        if buffer.shape != shape or buffer.dtype != self.dtype or not buffer.is_contiguous():
            raise ValueError(
                f"'{name}' is {buffer.dtype} of shape {list(buffer.shape)}, expected a contiguous "
                f"{self.dtype} tensor of shape {list(shape)}"
            )

    def pull(self, index: Tensor, out: Tensor) -> Job:
        """``out[i] = table[index[i]]``.

        Raises:
            IndexError: If a row doesn't exist; nothing is written then.
        """
        check_index("index", index)
        self._check("out", out, index.numel())
        if self._native is not None:
            work = native.C.pull(self._native, index.data_ptr(), index.numel(), out.data_ptr())
            return Job(work, (self.rows, index, out))
        check_range("index", index, self.rows.size(0))

        def twin() -> None:
            rows = self.rows.index_select(0, index)
            out.copy_(rows if self.codec is None else decode_torch(self.codec, rows, self.width))

        return Job(twin)

    def push(self, x: Tensor, index: Tensor) -> Job:
        """``table[index[i]] = x[i]``; of rows with the same index the last one wins.

        Raises:
            IndexError: If a row doesn't exist; nothing is written then.
        """
        check_index("index", index)
        self._check("x", x, index.numel())
        if self._native is not None:
            address = x.data_ptr()
            work = native.C.push_rows(self._native, address, index.data_ptr(), index.numel())
            return Job(work, (self.rows, x, index))
        check_range("index", index, self.rows.size(0))

        def twin() -> None:
            rows = x if self.codec is None else encode_torch(self.codec, x)
            # numpy assigns in order; torch leaves open which of several rows wins.
            self.rows.view(torch.uint8).numpy()[index.numpy()] = rows.view(torch.uint8).numpy()

        return Job(twin)

    def push_ranges(self, x: Tensor, offset: Sequence[int], count: Sequence[int]) -> Job:
        """``table[offset[i] : offset[i] + count[i]] = ...``, from consecutive rows of ``x``.

        Raises:
            IndexError: If a range is outside the table; nothing is written then.
        """
        self._check("x", x, sum(count))
        for first, size in zip(offset, count, strict=True):
            if first < 0 or size < 0 or first + size > self.rows.size(0):
                raise IndexError(
                    f"'offset' and 'count' hold the range {first} to {first + size}, which is "
                    f"outside [0, {self.rows.size(0)})"
                )
        if self._native is not None:
            work = native.C.push_ranges(self._native, x.data_ptr(), offset, count)
            return Job(work, (self.rows, x))

        def twin() -> None:
            rows = x if self.codec is None else encode_torch(self.codec, x)
            begin, table = 0, self.rows.data  # Nor does native code count as a change of a tensor.
            for first, size in zip(offset, count, strict=True):
                table[first : first + size] = rows[begin : begin + size]
                begin += size

        return Job(twin)
