"""Input features: stored as histories are, by :func:`quantize`, and read for a mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.encoded import Encoded, row_blocks
from gas.history.rows import Rows
from gas.history.store import StoreFactory
from gas.history.tiers import check_tier, default_tier, make_store, pick_tier
from gas.native import free_memory, gather_dropout, gather_rows, human


def quantize(
    x: Tensor,
    dtype: Codec | torch.dtype | str = "int8",
    store: str | StoreFactory | None = None,
    path: str | Path | None = None,
) -> Tensor:
    """Store features as histories are stored: in fewer bytes, or on disk.

    PyTorch, PyG and gas use the result like a tensor of the shape of ``x``::

        data.x = gas.quantize(data.x, "int8")
        data.edge_attr = gas.quantize(data.edge_attr, "float16", store="disk")
        graph = gas.cluster(data, num_parts=40, model=model)

    ``x[index]`` decodes the selected rows only, which is how mini-batches read theirs. Decoded
    values are float32, or float64 if they are stored so. Renumbering the graph copies encoded rows
    to a store of the same kind. All other functions decode all rows. The values are read-only.

    Rows are encoded in blocks, so that ``x`` may be a mapped file larger than memory.

    Args:
        x: The features, of shape ``[rows, width]``, of any floating-point type, on the CPU: of
            nodes, or of edges.
        dtype: The stored type: ``"float64"``, ``"float32"``, ``"bfloat16"``, ``"float16"``, or
            ``"int8"`` with one scale per row; see :class:`gas.history.Codec`. (default: ``"int8"``)
        store: ``"host"``, ``"pinned"``, ``"disk"`` (a file mapped into memory), ``"auto"`` (memory
            if it has room), or a function ``(num_rows, columns, dtype) -> Store``.
            (default: ``"pinned"`` with CUDA, else ``"host"``)
        path: The file of a ``"disk"`` store, which mustn't exist. (default: a temporary file,
            removed with the features)

    Returns:
        The features, a read-only matrix of the shape of ``x``.

    Raises:
        ValueError: If an argument is unusable, or a value is too large for ``dtype``, naming it.
        MemoryError: If there is no room; nothing has been allocated then.
        OSError: If ``path`` can't be written, or the disk is full.
    """
    codec = Codec.of(dtype)
    _check_features(x)
    kind = _choose_store(store, path, x.size(0) * codec.row_bytes(x.size(1)))
    if path is not None and Path(path).exists():
        raise ValueError(
            f"'path' is {str(path)!r}, which already exists: remove it, or choose another"
        )
    out = Encoded.of(
        make_store(kind, x.size(0), x.size(1), codec, None, path), codec, x.size(1), kind
    )
    try:
        for first, last in row_blocks(x.size(0), x.size(1)):
            out.write(first, codec.cast(x[first:last].detach(), first))
    except BaseException:
        out.store.close()
        if path is not None:
            Path(path).unlink(missing_ok=True)
        raise
    return out


def _check_features(x: Any) -> None:
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        what = x.layout if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"'x' is {what}, expected a dense tensor of shape [rows, width]: leave sparse features "
            "as they are, or pass x.to_dense()"
        )
    if x.dim() != 2 or not x.is_floating_point() or x.device.type != "cpu":
        raise ValueError(
            f"'x' is {x.dtype} of shape {list(x.shape)} on {x.device}, expected floating-point "
            "features of shape [rows, width] on the CPU: pass x.float(), x.view(-1, 1) or x.cpu()"
        )


def _choose_store(
    store: str | StoreFactory | None, path: str | Path | None, num_bytes: int
) -> str | StoreFactory:
    """Choose the store, and check that it has room."""
    if store == "device":
        raise ValueError(
            "'store' is 'device', but mini-batches are cut on the CPU, which reads features: use "
            "'pinned', 'host' or 'disk'"
        )
    check_tier(store, path)
    if store == "auto":
        tier, _ = pick_tier(num_bytes, path)
        store = "pinned" if tier == "device" else tier
    kind = default_tier(None) if store is None else store
    free = free_memory()
    if kind in ("host", "pinned") and num_bytes > free:
        raise MemoryError(
            f"'x' takes {human(num_bytes)} encoded, and {human(free)} are free: use store='disk', "
            "or a narrower 'dtype'"
        )
    return kind


class Features(Rows):
    """Input features of a batch, history 0: rows of the graph's table, copied only when needed.

    Layers take them like other :class:`Rows`. A sparse product reads rows directly from the table;
    dropout, and decoding of rows from :func:`gas.quantize`, happen while rows are read. There is no
    gradient towards features.

    Args:
        table: All features, of shape ``[N, width]``, read-only.
        index: The batch's own rows, then the halo's, of shape ``[batch_size + halo]``, int64.
        num_own: The batch size.
        p: The probability of dropping an element. (default: ``0.0``)
        seed: The seed of the dropout. (default: ``0``)
        find_sums: Finds sums over neighbours that were computed for the whole graph, see
            :class:`gas.loader.cache.FeatureSums`. (default: none)
    """

    def __init__(
        self,
        table: Tensor,
        index: Tensor,
        num_own: int,
        p: float = 0.0,
        seed: int = 0,
        find_sums: Callable[..., Tensor | None] | None = None,
    ) -> None:
        if isinstance(table, Encoded):
            table = table if table.plain_table is None else table.plain_table
        self.__dict__.update(
            table=table.detach(), index=index, num_own=num_own, p=p, seed=seed, find_sums=find_sums
        )

    table: Tensor
    index: Tensor
    num_own: int
    p: float
    seed: int
    find_sums: Callable[..., Tensor | None] | None

    def dropout(self, p: float, seed: int) -> Features:
        """Return the features with dropout, of the halo's rows, too.

        Args:
            p: The probability of dropping an element.
            seed: The seed; an element is dropped depending on its position.
        """
        if self.p == 0.0:
            return Features(self.table, self.index, self.num_own, p, seed)
        every = torch.arange(self.index.numel(), device=self.device)
        return Features(self._batch_rows, every, self.num_own, p, seed)

    def _read(self, index: Tensor) -> Tensor:
        if isinstance(self.table, Encoded):
            return self.table.read(index, self.p, self.seed)
        if self.p > 0.0:
            return gather_dropout(self.table, index, self.p, self.seed)
        return gather_rows(self.table, index)

    @cached_property
    def _batch_rows(self) -> Tensor:
        return self._read(self.index)

    @cached_property
    def own(self) -> Tensor:
        """The batch's own rows, of shape ``[batch_size, width]``, read-only."""
        is_read_whole = not self._in_place and self.find_sums is None
        if is_read_whole or "_batch_rows" in self.__dict__:  # All rows are copied anyway.
            return self._batch_rows[: self.num_own]
        return self._read(self.index[: self.num_own])

    @property
    def halo(self) -> Tensor:
        """Return the halo's rows, of shape ``[halo, width]``, read-only."""
        return self._batch_rows[self.num_own :]

    @property
    def _in_place(self) -> bool:
        """Return whether a product may read the table in place."""
        table = self.table
        return self.p == 0.0 and not isinstance(table, Encoded) and table.is_contiguous()

    def kernel_inputs(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :meth:`Rows.kernel_inputs`."""
        if not self._in_place:
            return self._batch_rows, None, None
        return self.table[:0], self.table, self.index.contiguous()

    def prototype(self) -> Tensor:
        """See :meth:`Rows.prototype`."""
        return self.table

    def tensor(self) -> Tensor:
        """Return all rows, of shape ``[batch_size + halo, width]``, cached and read-only."""
        return self._batch_rows

    @property
    def shape(self) -> torch.Size:
        """The shape of all rows."""
        return torch.Size((self.index.numel(), self.table.size(1)))

    def __repr__(self) -> str:
        return f"Features({list(self.shape)}, own={self.num_own}, dtype={self.dtype})"
