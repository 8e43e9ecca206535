"""Features: history 0, a table of rows that is never stale, read where it lies."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gas.history.rows import Rows
from gas.native.dropout import gather_dropout
from gas.native.encoded_rows import EncodedRows
from gas.native.rows import gather_rows


class Features(Rows):
    """A batch's input features: rows of the graph's, which are copied only for who needs a copy.

    Layers take it as they take other :class:`Rows`. A sparse product reads the rows of the table
    itself, and dropout is done while they are read; rows that are encoded (:func:`gas.encode`) are
    decoded by then. No gradient flows towards them.

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
        if isinstance(table, EncodedRows):
            table = table if table.plain is None else table.plain
        self.__dict__.update(table=table.detach(), index=index, num_own=num_own, p=p, seed=seed)

    table: Tensor
    index: Tensor
    num_own: int
    p: float
    seed: int

    def dropped(self, p: float, seed: int) -> Features:
        """The same with elements dropped, those of the halo's rows, too.

        Args:
            p: The probability.
            seed: Decides on each element by its position.
        """
        if self.p == 0.0:
            return Features(self.table, self.index, self.num_own, p, seed)
        every = torch.arange(self.index.numel(), device=self.device)
        return Features(self._whole, every, self.num_own, p, seed)

    def _read(self, index: Tensor) -> Tensor:
        if isinstance(self.table, EncodedRows):
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
        """The halo's rows, of shape ``[halo, width]``, not to be written to."""
        return self._whole[self.num_own :]

    @property
    def _in_place(self) -> bool:
        """Whether a product may read the table itself."""
        table = self.table
        return self.p == 0.0 and not isinstance(table, EncodedRows) and table.is_contiguous()

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :meth:`Rows.parts`."""
        if not self._in_place:
            return self._whole, None, None
        return self.table[:0], self.table, self.index.contiguous()

    def stored(self) -> Tensor:
        """See :meth:`Rows.stored`."""
        return self.table

    def tensor(self) -> Tensor:
        """All rows, of shape ``[batch_size + halo, width]``, made once; not to be written to."""
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
        """Where they are."""
        return self.table.device

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient is wanted, which is never so."""
        return False

    def __repr__(self) -> str:
        return f"Features({list(self.shape)}, own={self.num_own}, dtype={self.dtype})"
