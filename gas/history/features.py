"""Features: history 0, a table of rows that is never stale, read where it lies."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gas.history.encoded_rows import Encoded
from gas.history.rows import Rows
from gas.native import gather_dropout, gather_rows


class Features(Rows):
    """A batch's input features: rows of the graph's, which are copied only for who needs a copy.

    Layers take it as they take other :class:`Rows`. A sparse product reads the rows of the table
    itself, and dropout is done while they are read; rows of :func:`gas.quantize` are decoded by
    then. No gradient flows towards them.

    Args:
        table: All features, of shape ``[N, width]``, not to be written to.
        index: The batch's own rows, then the halo's, of shape ``[batch_size + halo]``, int64.
        num_own: The batch size.
        p: The probability of dropping an element. (default: ``0.0``)
        seed: Of what is dropped. (default: ``0``)
    """

    def __init__(
        self, table: Tensor, index: Tensor, num_own: int, p: float = 0.0, seed: int = 0
    ) -> None:
        if isinstance(table, Encoded):
            table = table if table.plain is None else table.plain
        self.__dict__.update(table=table.detach(), index=index, num_own=num_own, p=p, seed=seed)

    table: Tensor
    index: Tensor
    num_own: int
    p: float
    seed: int

    def dropped(self, p: float, seed: int) -> Features:
        """Return the same with elements dropped, those of the halo's rows, too.

        Args:
            p: The probability.
            seed: Decides on each element by its position.
        """
        if self.p == 0.0:
            return Features(self.table, self.index, self.num_own, p, seed)
        every = torch.arange(self.index.numel(), device=self.device)
        return Features(self._whole, every, self.num_own, p, seed)

    def _read(self, index: Tensor) -> Tensor:
        if isinstance(self.table, Encoded):
            return self.table.read(index, self.p, self.seed)
        if self.p > 0.0:
            return gather_dropout(self.table, index, self.p, self.seed)
        return gather_rows(self.table, index)

    @cached_property
    def _whole(self) -> Tensor:
        return self._read(self.index)

    @cached_property
    def own(self) -> Tensor:
        """The batch's own rows, of shape ``[batch_size, width]``, not to be written to."""
        if not self._in_place or "_whole" in self.__dict__:  # There is a copy of all anyhow.
            return self._whole[: self.num_own]
        return self._read(self.index[: self.num_own])

    @property
    def halo(self) -> Tensor:
        """Return the halo's rows, of shape ``[halo, width]``, not to be written to."""
        return self._whole[self.num_own :]

    @property
    def _in_place(self) -> bool:
        """Return whether a product may read the table in place."""
        table = self.table
        return self.p == 0.0 and not isinstance(table, Encoded) and table.is_contiguous()

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :meth:`Rows.parts`."""
        if not self._in_place:
            return self._whole, None, None
        return self.table[:0], self.table, self.index.contiguous()

    def stored(self) -> Tensor:
        """See :meth:`Rows.stored`."""
        return self.table

    def tensor(self) -> Tensor:
        """Return all rows, of shape ``[batch_size + halo, width]``, cached and read-only."""
        return self._whole

    @property
    def shape(self) -> torch.Size:
        """Of all rows."""
        return torch.Size((self.index.numel(), self.table.size(1)))

    def dim(self) -> int:
        """See :meth:`torch.Tensor.dim`."""
        return 2

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.table.device

    @property
    def requires_grad(self) -> bool:
        """Always false: features need no gradient."""
        return False

    def __repr__(self) -> str:
        return f"Features({list(self.shape)}, own={self.num_own}, dtype={self.dtype})"
