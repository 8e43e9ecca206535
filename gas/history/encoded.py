"""Features in the stores and codecs of histories: :func:`quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.encoded_rows import Encoded, blocks
from gas.history.store import StoreFactory
from gas.history.tiers import check_tier, default_tier, make_store, pick_tier
from gas.native import free_memory, human, transfer


def quantize(
    x: Tensor,
    dtype: Codec | torch.dtype | str = "int8",
    store: str | StoreFactory | None = None,
    path: str | Path | None = None,
) -> Tensor:
    """Store features as histories are stored: in fewer bytes, or on disk.

    What it returns is a tensor, of the shape of ``x``, to PyTorch, PyG and everything of gas::

        data.x = gas.quantize(data.x, "int8")
        data.edge_attr = gas.quantize(data.edge_attr, "float16", store="disk")
        graph = gas.cluster(data, num_parts=40, model=model)

    Rows of it, ``x[index]``, are decoded alone: mini-batches read theirs where they lie. They are
    float32, and float64 where they are stored so. Renumbering the graph moves them as they are, to
    a store of the same kind. Whatever else is done with it decodes all. It can't be written to.

    Rows are encoded a few at a time, so that ``x`` may be a mapped file larger than memory.

    Args:
        x: The features, of shape ``[rows, width]``, of any floating-point type, on the CPU: of
            nodes, or of edges.
        dtype: How rows are stored: ``"float64"``, ``"float32"``, ``"bfloat16"``, ``"float16"``, or
            ``"int8"`` with one scale per row; see :class:`gas.history.Codec`. (default: ``"int8"``)
        store: ``"host"``, ``"pinned"``, ``"disk"`` (a file mapped into memory), ``"auto"`` (memory
            if it has room), or a function ``(num_rows, columns, dtype) -> Store``.
            (default: ``"pinned"`` with CUDA, else ``"host"``)
        path: The file of a ``"disk"`` store, which mustn't be there. (default: a temporary one,
            removed with the features)

    Raises:
        ValueError: If an argument is unusable, or a value is too large for ``dtype``, naming it.
        MemoryError: If there is no room; nothing has been allocated then.
        OSError: If ``path`` can't be written, or the disk is full.
    """
    codec = Codec.of(dtype)
    _check_features(x)
    kind = _kind(store, path, x.size(0) * codec.row_bytes(x.size(1)))
    if path is not None and Path(path).exists():
        raise ValueError(f"'path' is {str(path)!r}, which is there: remove it, or name another")
    out = Encoded.of(
        make_store(kind, x.size(0), x.size(1), codec, None, path), codec, x.size(1), kind
    )
    try:
        for first, last in blocks(x.size(0), x.size(1)):
            out.write(first, _stored_values(x[first:last].detach(), codec, first))
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


def _kind(
    store: str | StoreFactory | None, path: str | Path | None, num_bytes: int
) -> str | StoreFactory:
    """Choose the store, if it has room."""
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


def _stored_values(x: Tensor, codec: Codec, first: int) -> Tensor:
    """Return rows in the type of their codec.

    Raises:
        ValueError: If a finite value becomes infinite.
    """
    given, dtype = x, torch.float32 if codec.name == "int8" else codec.dtype
    x = given.to(dtype)
    lost = x.isinf() & given.isfinite()
    if bool(lost.any()):
        row, column = lost.nonzero()[0].tolist()
        raise ValueError(
            f"'x' holds {float(given[row, column]):g} in row {first + row}, but {codec} ends at "
            f"{torch.finfo(dtype).max:g}: scale the features, or choose another 'dtype'"
        )
    return x.float() if codec.name in transfer.CODECS else x
