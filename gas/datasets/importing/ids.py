"""Distinct ids of the nodes that edges name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gas.datasets.nodes import Nodes
from gas.graph import encode_utf8

AT_ONCE = 1 << 20  # Ids that are merged together.


def distinct_ids(blocks: Iterable[np.ndarray]) -> Nodes:
    """Return the nodes that edges name, in the order of their ids: integers if all of them are.

    Args:
        blocks: Some of the ids at a time.
    """
    known: np.ndarray = np.empty(0, np.int64)
    new: list[np.ndarray] = []
    size = 0
    for ids in blocks:
        ids = ids.astype(np.int64, copy=False) if ids.dtype.kind in "iu" else encode_utf8(ids)
        if ids.dtype.kind == known.dtype.kind and len(known):
            at = np.searchsorted(known, ids).clip(max=len(known) - 1)
            ids = ids[known[at] != ids]
        new.append(ids)
        size += len(ids)
        if size > max(len(known), AT_ONCE):  # Each id is merged a few times, not with every block.
            known, new, size = _concatenate([known, *new]), [], 0
    known = _concatenate([known, *new])
    ids = known if known.dtype.kind == "i" else np.concatenate([*_decode_blocks(known)])
    return Nodes(len(ids), ids, "the edges")


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    parts = [part for part in parts if len(part)] or parts[:1]
    if any(part.dtype.kind == "S" for part in parts):
        parts = [encode_utf8(part) for part in parts]
    return np.unique(np.concatenate(parts))


def _decode_blocks(ids: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(ids), AT_ONCE):
        yield np.char.decode(ids[first : first + AT_ONCE], "utf-8")
