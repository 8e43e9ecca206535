"""The history: the last known embedding of every node, after one layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gas import _native


class History(torch.nn.Module):
    """A table with the last embedding that was pushed for every node.

    The table is neither part of ``state_dict`` nor moved by ``.to()``: it can be larger than the
    device that the model lives on. ``pull`` returns rows on the model's device.

    Args:
        num_embeddings: The number of rows, one per node.
        embedding_dim: The width of a row.
        device: Where the table lives. (default: the CPU)
        dtype: What the table stores; pushes are converted. (default: ``torch.float32``)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if not _native.is_integer(value) or value < 0:
                raise ValueError(f"'{name}' is {value!r}, expected a non-negative integer")
        if not dtype.is_floating_point:
            raise ValueError(f"'dtype' is {dtype}, expected a floating-point type")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.emb = torch.zeros(num_embeddings, embedding_dim, device=device, dtype=dtype)
        # The push that wrote each row, counted from 1; 0 for rows never written.
        self._written_at = torch.zeros(num_embeddings, dtype=torch.int32)
        self._num_pushes = 0
        self._num_unwritten = num_embeddings
        self._warned = False
        self._device = torch.device("cpu")

    def reset_parameters(self) -> None:
        """Forgets everything that was pushed."""
        self.emb.zero_()
        self._written_at.zero_()
        self._num_pushes = 0
        self._num_unwritten = self.num_embeddings
        self._warned = False

    @property
    def age(self) -> Tensor:
        """Pushes to this history since each row was written, of shape ``[N]``, int32.

        0 means written by the last push, -1 never written.
        """
        age = self._num_pushes - self._written_at
        return age.masked_fill_(self._written_at == 0, -1)

    @property
    def written(self) -> Tensor:
        """Whether each row was ever pushed, of shape ``[N]``, bool."""
        return self._written_at > 0

    @torch.no_grad()
    def push(
        self,
        x: Tensor,
        n_id: Tensor | None = None,
        offset: Tensor | Sequence[int] | None = None,
        count: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Stores rows; the values are those at the call.

        Args:
            x: The rows, of shape ``[n, embedding_dim]``, of any floating-point type and device.
            n_id: The node of each row, of shape ``[n]``, int64. (default: every node, in order)
            offset: First row of each contiguous range; used instead of ``n_id`` when given,
                because ranges are copied faster.
            count: Number of rows of each range, with ``offset``.

        Raises:
            ValueError: If a shape doesn't fit; nothing was stored then.
            IndexError: If a row doesn't exist; nothing was stored then.
        """
        if x.dim() != 2 or x.size(1) != self.embedding_dim:
            raise ValueError(
                f"'x' has shape {list(x.shape)}, expected [rows, {self.embedding_dim}], the width "
                "of this history"
            )
        if not x.is_floating_point():
            raise ValueError(f"'x' has dtype {x.dtype}, expected a floating-point type")
        if (offset is None) != (count is None):
            raise ValueError("'offset' and 'count' describe ranges together: pass both or neither")

        rows = x.detach().to(self.emb.device, self.emb.dtype)
        if offset is not None and count is not None:
            ranges = self._ranges(x, n_id, offset, count)
            self._num_pushes += 1
            begin = 0
            for first, size in ranges:
                self.emb[first : first + size] = rows[begin : begin + size]
                self._mark(slice(first, first + size))
                begin += size
        elif n_id is not None:
            if n_id.size(0) != x.size(0):
                raise ValueError(f"'x' has {x.size(0)} rows, but 'n_id' names {n_id.size(0)}")
            _native.scatter_rows(self.emb, n_id.to(self.emb.device), rows)
            self._num_pushes += 1
            self._mark(n_id.to(self._written_at.device))
        else:
            if x.size(0) != self.num_embeddings:
                raise ValueError(
                    f"'x' has {x.size(0)} rows, but the history has {self.num_embeddings}: pass "
                    "'n_id' to say which rows these are"
                )
            self.emb.copy_(rows)
            self._num_pushes += 1
            self._mark(slice(None))

    def _mark(self, rows: slice | Tensor) -> None:
        """Notes that this push wrote some rows."""
        if self._num_unwritten:
            new = self._written_at[rows] == 0
            written = new.sum() if isinstance(rows, slice) else rows[new].unique().numel()
            self._num_unwritten -= int(written)
        self._written_at[rows] = self._num_pushes

    def _ranges(
        self,
        x: Tensor,
        n_id: Tensor | None,
        offset: Tensor | Sequence[int],
        count: Tensor | Sequence[int],
    ) -> list[tuple[int, int]]:
        first = offset.tolist() if isinstance(offset, Tensor) else list(offset)
        size = count.tolist() if isinstance(count, Tensor) else list(count)
        if len(first) != len(size) or sum(size) != x.size(0):
            raise ValueError(
                f"'x' has {x.size(0)} rows, but 'offset' and 'count' describe {sum(size)} rows in "
                f"{len(first)} and {len(size)} ranges"
            )
        for begin, rows in zip(first, size, strict=True):
            if begin < 0 or rows < 0 or begin + rows > self.num_embeddings:
                raise IndexError(
                    f"'offset' and 'count' hold the range {begin} to {begin + rows}, which is "
                    f"outside [0, {self.num_embeddings})"
                )
        if n_id is not None and n_id.device.type == "cpu":
            begin = 0
            for rows, at in zip(size, first, strict=True):
                own = n_id[begin : begin + rows]
                if rows and (int(own[0]) != at or int(own[-1]) != at + rows - 1):
                    raise ValueError(
                        f"'n_id' and the ranges disagree: row {begin} belongs to node "
                        f"{int(own[0])}, but 'offset' says {at}"
                    )
                begin += rows
        return list(zip(first, size, strict=True))

    @torch.no_grad()
    def pull(self, n_id: Tensor | None = None) -> Tensor:
        """Reads rows into a new tensor on the model's device, which is the caller's.

        Args:
            n_id: The nodes to read, of shape ``[n]``, int64. (default: every node)

        Returns:
            A tensor of shape ``[n, embedding_dim]``, of the table's dtype.

        Raises:
            IndexError: If a row doesn't exist.
        """
        if n_id is None:
            out = self.emb.clone()
        else:
            out = _native.gather_rows(self.emb, n_id.to(self.emb.device))
        self._warn_unwritten(n_id)
        return out.to(self._device)

    def _warn_unwritten(self, n_id: Tensor | None) -> None:
        """Warns once when rows are read that nobody wrote."""
        if self._num_unwritten == 0 or self._warned:
            return
        rows = self._written_at if n_id is None else self._written_at[n_id.cpu()]
        missing = int((rows == 0).sum())
        if missing:
            self._warned = True
            warnings.warn(
                f"A history was read before it was filled: {missing} of {rows.numel()} rows are "
                "zeros that nobody pushed. Training recovers after the first epoch; to start "
                "without them, call model(x, adj_t, fill=True) or model(loader=...) first.",
                stacklevel=3,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> History:
        self._device = fn(torch.empty(0)).device
        return self

    def extra_repr(self) -> str:
        """The sizes and the place of the table."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.emb.dtype}, "
            f"device={self.emb.device}"
        )
