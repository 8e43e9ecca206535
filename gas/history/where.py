"""Which rows of a table are meant: by index, or as ranges of rows that follow one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gas.native.checks import check_index, check_range

# Rows of a table: by index, or ranges (first, count) that are filled in turn.
Where = Tensor | Sequence[tuple[int, int]]
SHORT = 8  # Rows of a range, on average, below which its rows are moved one by one.


def as_index(where: Where) -> Tensor:
    """Ranges as the rows they hold, of shape ``[n]``, int64."""
    if isinstance(where, Tensor):
        return where
    ranges = [torch.arange(first, first + size, device="cpu") for first, size in where]
    return torch.cat([torch.arange(0, device="cpu"), *ranges])


def rows_of(
    num_rows: int,
    n_id: Tensor | None,
    offset: Tensor | Sequence[int] | None,
    count: Tensor | Sequence[int] | None,
    num_embeddings: int,
) -> Where:
    """Where so many rows go of a history of ``num_embeddings``; see :meth:`gas.History.push`.

    Raises:
        ValueError: If the number of rows is another, or ids and ranges name different ones.
        IndexError: If a row doesn't exist.
    """
    if (offset is None) != (count is None):
        raise ValueError("'offset' and 'count' describe ranges together: pass both or neither")
    if offset is not None and count is not None and not _are_short(n_id, offset, count):
        return _ranges(num_rows, n_id, offset, count, num_embeddings)
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


def _ranges(
    num_rows: int,
    n_id: Tensor | None,
    offset: Tensor | Sequence[int],
    count: Tensor | Sequence[int],
    num_embeddings: int,
) -> list[tuple[int, int]]:
    first = offset.tolist() if isinstance(offset, Tensor) else list(offset)
    size = count.tolist() if isinstance(count, Tensor) else list(count)
    if len(first) != len(size) or sum(size) != num_rows:
        raise ValueError(
            f"'x' has {num_rows} rows, but 'offset' and 'count' describe {sum(size)} rows in "
            f"{len(first)} and {len(size)} ranges"
        )
    for begin, rows in zip(first, size, strict=True):
        if begin < 0 or rows < 0 or begin + rows > num_embeddings:
            raise IndexError(
                f"'offset' and 'count' hold the range {begin} to {begin + rows}, which is "
                f"outside [0, {num_embeddings})"
            )
    if n_id is not None and n_id.numel() != num_rows:
        raise ValueError(f"'x' has {num_rows} rows, but 'n_id' names {n_id.numel()}")
    if n_id is not None and n_id.device.type == "cpu":
        nodes = n_id.numpy()  # Whose elements are read faster, one at a time.
        begin = 0
        for rows, at in zip(size, first, strict=True):
            if rows and (nodes[begin] != at or nodes[begin + rows - 1] != at + rows - 1):
                raise ValueError(
                    f"'n_id' and the ranges disagree: row {begin} belongs to node "
                    f"{nodes[begin]}, but 'offset' says {at}"
                )
            begin += rows
    return list(zip(first, size, strict=True))


def _are_short(
    n_id: Tensor | None, offset: Tensor | Sequence[int], count: Tensor | Sequence[int]
) -> bool:
    """Whether ranges of rows, which are those of ``n_id``, are moved faster one row at a time."""
    if n_id is None or not isinstance(offset, Tensor) or not isinstance(count, Tensor):
        return False
    few = offset.numel() * SHORT < n_id.numel()
    if few or n_id.device.type != "cpu" or offset.shape != count.shape or bool((count < 0).any()):
        return False
    before = count.cumsum(0) - count
    rows = torch.repeat_interleave(offset - before, count)
    return torch.equal(rows + torch.arange(rows.numel()), n_id)
