"""Rows in host memory: buffers for them, and jobs that copy them from and to tables.

If the extension was built, jobs are native, else pure-torch twins with equal results. A
:class:`gas.history.TransferEngine` runs them.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.checks import check_index, check_range
from gas.native.memory import zeros

# Rows of a table: an index, or ranges (first, count) in order.
RowIndex = Tensor | Sequence[tuple[int, int]]
MIN_RANGE_ROWS = 8  # If ranges have fewer rows on average, rows are moved one by one.
# The formats of stored rows in csrc/transfer/codec.h.
CODECS = {"bfloat16": 1, "float16": 2, "int8": 3}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

SMALL_BYTES = 128 * 1024  # Below this size, the C library reuses memory itself.
LARGE_BYTES = 32 << 20  # From this size on, it always returns memory to the system.
MOST_IDLE = 8  # Idle blocks of a pool.
MOST_IDLE_BYTES = 512 << 20  # Size of the idle blocks that all models share.


# Rows of a table ----------------------------------------------------------------------------------


def check_row_index(
    num_rows: int,
    n_id: Tensor | None,
    offset: Tensor | Sequence[int] | None,
    count: Tensor | Sequence[int] | None,
    num_embeddings: int,
) -> RowIndex:
    """Check the arguments of :meth:`gas.History.push` and return the rows to write.

    Raises:
        ValueError: If they are not ``num_rows`` rows, or ids and ranges differ.
        IndexError: If a row doesn't exist.
    """
    if (offset is None) != (count is None):
        raise ValueError("'offset' and 'count' describe ranges together: pass both or neither")
    if n_id is not None and getattr(n_id, "dtype", None) != torch.int64:
        check_index("n_id", n_id)
    if offset is not None and count is not None and not _has_short_ranges(n_id, offset, count):
        return _check_row_ranges(num_rows, n_id, offset, count, num_embeddings)
    if n_id is not None:
        check_index("n_id", n_id)
        if n_id.size(0) != num_rows:
            raise ValueError(f"'x' has {num_rows} rows, but 'n_id' names {n_id.size(0)}")
        index = n_id.cpu().contiguous()
        check_range("n_id", index, num_embeddings)
        return index
    if num_rows != num_embeddings:
        raise ValueError(
            f"'x' has {num_rows} rows, but the history has {num_embeddings}: pass 'n_id' to say "
            "which rows these are"
        )
    return [(0, num_embeddings)]


def _check_row_ranges(
    num_rows: int,
    n_id: Tensor | None,
    offset: Tensor | Sequence[int],
    count: Tensor | Sequence[int],
    num_embeddings: int,
) -> list[tuple[int, int]]:
    first = offset.tolist() if isinstance(offset, Tensor | np.ndarray) else offset
    size = count.tolist() if isinstance(count, Tensor | np.ndarray) else count
    try:
        kinds = {*map(type, (*first, *size))}
    except TypeError:  # These are no lists.
        kinds = {object}
    if kinds != {int} and not all(issubclass(kind, Integral) for kind in kinds):
        raise ValueError(f"'offset' is {first} and 'count' {size}, expected lists of integers")
    if len(first) != len(size) or sum(size) != num_rows:
        raise ValueError(
            f"'x' has {num_rows} rows, but 'offset' and 'count' describe {sum(size)} rows in "
            f"{len(first)} and {len(size)} ranges"
        )
    ranges = list(zip(first, size, strict=True))
    check_ranges(ranges, num_embeddings)
    if n_id is not None and n_id.numel() != num_rows:
        raise ValueError(f"'x' has {num_rows} rows, but 'n_id' names {n_id.numel()}")
    if n_id is not None and n_id.device.type == "cpu":
        nodes = n_id.numpy()  # Single elements are read faster from numpy.
        begin = 0
        for at, rows in ranges:
            if rows and (nodes[begin] != at or nodes[begin + rows - 1] != at + rows - 1):
                raise ValueError(
                    f"'n_id' and the ranges disagree: row {begin} belongs to node "
                    f"{nodes[begin]}, but 'offset' says {at}"
                )
            begin += rows
    return ranges


def _has_short_ranges(
    n_id: Tensor | None, offset: Tensor | Sequence[int], count: Tensor | Sequence[int]
) -> bool:
    """Return whether the ranges of ``n_id`` are so short that single rows are moved faster."""
    if n_id is None or not isinstance(offset, Tensor) or not isinstance(count, Tensor):
        return False
    few = offset.numel() * MIN_RANGE_ROWS < n_id.numel()
    if few or n_id.device.type != "cpu" or offset.shape != count.shape or bool((count < 0).any()):
        return False
    before = count.cumsum(0) - count
    rows = torch.repeat_interleave(offset - before, count)
    return torch.equal(rows + torch.arange(rows.numel()), n_id)


def check_ranges(ranges: Sequence[tuple[int, int]], num_rows: int) -> None:
    """Raise ``IndexError`` unless every range, its first row and its size, is in ``num_rows``."""
    for first, size in ranges:
        if first < 0 or size < 0 or first + size > num_rows:
            raise IndexError(
                f"'offset' and 'count' hold the range {first} to {first + size}, which is outside "
                f"[0, {num_rows})"
            )


# Codecs -------------------------------------------------------------------------------------------


def num_stored_columns(codec: str, width: int) -> int:
    """Return the number of elements of a stored row: bytes for ``int8``."""
    return (4 + width + 3) // 4 * 4 if codec == "int8" else width


def encode_torch(codec: str, x: Tensor) -> Tensor:
    """Encode float32 rows of shape ``[n, width]`` as csrc/transfer/codec.h describes."""
    if codec != "int8":
        return x.to(_DTYPES[codec])
    n, width = x.shape
    if x.numel() == 0:
        return x.new_zeros(n, num_stored_columns(codec, width), dtype=torch.uint8)
    scale = x.abs().amax(1, keepdim=True) / 127
    usable = (scale > 0) & scale.isfinite()
    quotient = (x / scale).clamp(-127, 127).round()
    values = torch.where(usable, quotient, 0).to(torch.int8)
    pad = x.new_zeros(n, num_stored_columns(codec, width) - 4 - width, dtype=torch.uint8)
    return torch.cat([scale.view(torch.uint8), values.view(torch.uint8), pad], dim=1)


def decode_torch(codec: str, rows: Tensor, width: int) -> Tensor:
    """Decode stored rows to float32 rows of shape ``[n, width]``."""
    if codec != "int8":
        return rows.float()
    scale = rows[:, :4].contiguous().view(torch.float32)
    return rows[:, 4 : 4 + width].view(torch.int8) * scale


# Jobs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """Work to do now, by :meth:`run`, or in a lane of an engine.

    * ``work``: a native job, or a function without arguments where the extension was not built.
    * ``keep``: tensors that must live until the work is done: native code knows addresses only.
    """

    work: Any
    keep: object = None

    @staticmethod
    def from_function(function: Callable[[], None]) -> Job:
        """Make a job that calls a Python function once, and then has no reference to it."""
        functions = [function]

        def call_once() -> None:
            functions.pop()()

        return Job(call_once if native.C is None else native.C.Job(call_once))

    @staticmethod
    def pull(
        table: Tensor,
        index: Tensor,
        out: Tensor,
        codec: str | None = None,
        width: int | None = None,
    ) -> Job:
        """Make a job of ``out[i] = table[index[i]]``.

        Args:
            table: The stored rows, contiguous, of shape ``[N, columns]``.
            index: The rows to read, of shape ``[n]``, int64.
            out: The tensor to write to, of shape ``[n, width]``: float32 if rows are encoded, else
                of the table's dtype.
            codec: The codec of encoded rows, a key of ``CODECS``. (default: rows aren't encoded)
            width: The width of decoded rows. (default: that of ``table``)

        Raises:
            ValueError: If a shape or a dtype doesn't fit.
            IndexError: If a row doesn't exist.
        """
        check_index("index", index)
        source = _native_table(table, "out", out, index.numel(), codec, width)
        if source is not None:
            work = native.C.pull(source, index.data_ptr(), index.numel(), out.data_ptr())
            return Job(work, (table, index, out))
        check_range("index", index, table.size(0))

        def twin() -> None:
            rows = table.index_select(0, index)
            out.copy_(rows if codec is None else decode_torch(codec, rows, out.size(1)))

        return Job(twin)

    @staticmethod
    def push(
        table: Tensor,
        x: Tensor,
        where: RowIndex,
        codec: str | None = None,
        width: int | None = None,
    ) -> Job:
        """Make a job that writes the rows of ``x`` to the rows ``where`` of a table, in order.

        ``x`` has the shape and type of ``out`` of :meth:`pull`. ``where`` are rows, of shape
        ``[n]``, int64, of which the last of duplicates wins, or ranges: first row and number.
        """
        if isinstance(where, Tensor):
            check_index("index", where)
            num_rows = where.numel()
        else:
            check_ranges(where, table.size(0))
            num_rows = sum([size for _, size in where])
        target = _native_table(table, "x", x, num_rows, codec, width)
        if target is None:
            return Job(_push_torch(table, x, where, codec))
        if isinstance(where, Tensor):
            work = native.C.push_rows(target, x.data_ptr(), where.data_ptr(), num_rows)
        else:
            offset, count = [first for first, _ in where], [size for _, size in where]
            work = native.C.push_ranges(target, x.data_ptr(), offset, count)
        return Job(work, (table, x, where))

    def run(self, threads: int | None = None) -> None:
        """Do the work with at most ``threads`` threads, by default as many as PyTorch."""
        if native.C is None:
            self.work()
        else:
            self.work.run(torch.get_num_threads() if threads is None else threads)


def _push_torch(table: Tensor, x: Tensor, where: RowIndex, codec: str | None) -> Callable[[], None]:
    """Return the pure-torch twin of :meth:`Job.push`."""
    if isinstance(where, Tensor):
        check_range("index", where, table.size(0))

    def twin() -> None:
        rows = x if codec is None else encode_torch(codec, x)
        if isinstance(where, Tensor):
            # numpy assigns in order; in torch any of several rows may win.
            table.view(torch.uint8).numpy()[where.numpy()] = rows.view(torch.uint8).numpy()
            return
        begin, to = 0, table.data  # Native code doesn't change the version counter either.
        for first, size in where:
            to[first : first + size] = rows[begin : begin + size]
            begin += size

    return twin


def _native_table(
    table: Tensor, name: str, buffer: Tensor, n: int, codec: str | None, width: int | None
) -> Any:
    """Check a buffer of ``n`` rows; return the table for native code, ``None`` for the twin."""
    shape = (n, table.size(1) if width is None else width)
    dtype = table.dtype if codec is None else torch.float32
    if buffer.shape != shape or buffer.dtype != dtype or not buffer.is_contiguous():
        raise ValueError(
            f"'{name}' is {buffer.dtype} of shape {list(buffer.shape)}, expected a contiguous "
            f"{dtype} tensor of shape {list(shape)}"
        )
    if native.C is None or not table.is_cpu:
        return None
    num_rows = table.size(0)
    if codec is None:
        return native.C.Table(table.data_ptr(), num_rows, table.size(1) * table.element_size())
    return native.C.Table(table.data_ptr(), num_rows, CODECS[codec], width)


# Buffers: the system clears new pages first, which takes most of a read ---------------------------


class BufferPool:
    """Allocate tensors in memory that is reused when it isn't referenced any more.

    Args:
        most_idle_bytes: Upper bound of the idle memory of one dtype. (default: none)
    """

    def __init__(self, most_idle_bytes: float = math.inf) -> None:
        self._most = [most_idle_bytes]  # Shared with blocks in use, which come back later.
        # By dtype: earlier contents of a buffer are finite numbers of its type.
        self._idle: dict[torch.dtype, deque[np.ndarray]] = defaultdict(deque)
        self._blocks: list[weakref.ref[np.ndarray]] = []
        self.peak_bytes = 0  # The largest size of all blocks, in use or idle.

    def allocate(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a CPU tensor of shape ``[rows, width]`` with unspecified but finite values."""
        size = rows * width * dtype.itemsize
        if size < SMALL_BYTES:
            with torch.inference_mode(False):
                return torch.zeros(rows, width, dtype=dtype, device="cpu")
        idle = self._idle[dtype]
        block = None
        for _ in range(len(idle)):
            try:
                candidate = idle.popleft()
            except IndexError:  # Another thread has taken the last block.
                break
            if size <= candidate.size <= 2 * size:
                block = candidate
                break
            if candidate.size > size or len(idle) < MOST_IDLE:
                idle.append(candidate)  # Too many small blocks are dropped.
        if block is None:
            # Larger than needed: the next batch's halo may be a little larger.
            step = 1 << max(0, math.ceil(math.log2(size)) - 3)
            block = zeros(-(-size // step) * step)
            self._note_peak(block)
        # The tensor keeps the array alive; the block is idle again when both are freed.
        array = block[:size]
        back = weakref.finalize(array, self._give_back, idle, block, self._most)
        back.atexit = False
        storage = torch.from_numpy(array).untyped_storage()
        # Not a view: views that were made without gradient are read-only to autograd.
        with torch.inference_mode(False):  # Workers write to it outside of that mode.
            empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(storage, 0, (rows, width), (width, 1))

    def _note_peak(self, block: np.ndarray) -> None:
        """Update the peak by a new block."""
        alive = [ref for ref in self._blocks if ref() is not None]
        self._blocks = [*alive, weakref.ref(block)]
        blocks = [ref() for ref in self._blocks]
        held = sum([block.size for block in blocks if block is not None])
        self.peak_bytes = max(self.peak_bytes, held)

    @property
    def most_idle_bytes(self) -> float:
        """The upper bound of the idle memory of one dtype."""
        return self._most[0]

    @most_idle_bytes.setter
    def most_idle_bytes(self, most_idle_bytes: float) -> None:
        self._most[0] = most_idle_bytes

    @property
    def idle_bytes(self) -> int:
        """The size of the idle memory."""
        return sum(block.size for idle in tuple(self._idle.values()) for block in tuple(idle))

    def clear(self) -> None:
        """Free the idle memory."""
        for idle in tuple(self._idle.values()):
            idle.clear()

    @staticmethod
    def _give_back(idle: deque[np.ndarray], block: np.ndarray, most: list[float]) -> None:
        idle.append(block)  # Atomic: this may run in any thread, at any time.
        (most_bytes,) = most
        with contextlib.suppress(IndexError):  # Another thread has taken the last one.
            while len(idle) > MOST_IDLE or sum([block.size for block in tuple(idle)]) > most_bytes:
                idle.popleft()

    def __reduce__(self) -> tuple[type[BufferPool], tuple[float]]:
        return BufferPool, (self.most_idle_bytes,)


SHARED = BufferPool(MOST_IDLE_BYTES)


def empty(rows: int, width: int, like: Tensor) -> Tensor:
    """Return an uninitialised tensor of shape ``[rows, width]``, of the dtype of another."""
    if like.device.type != "cpu" or rows * width * like.element_size() < LARGE_BYTES:
        return like.new_empty(rows, width)
    return SHARED.allocate(rows, width, like.dtype)
