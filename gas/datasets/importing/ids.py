"""Which row each id of a node has: looked up in a sorted array, not in a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from gas.datasets.nodes import Nodes

AT_ONCE = 1 << 20  # Ids that are turned into text together.


class Ids:
    """The rows of nodes, by their ids: integers, or text as UTF-8.

    Args:
        ids: The id of each row, of shape ``[N]``, integers or text; ``None``: its number.
        num_nodes: The number of nodes.
    """

    def __init__(self, ids: np.ndarray | None, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self._ids = self._rows = None
        if ids is None:
            return
        ids = ids if ids.dtype.kind == "i" else utf8(ids)
        if bool((ids[1:] > ids[:-1]).all()):
            self._ids = ids
        else:
            order = np.argsort(ids, kind="stable")
            self._ids, self._rows = ids[order], order

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """The row of each id, int64; -1 where there is none."""
        if self._ids is None:
            if ids.dtype.kind not in "iu":
                return np.full(len(ids), -1)
            return np.where((ids >= 0) & (ids < self.num_nodes), ids, -1).astype(np.int64)
        if self._ids.dtype.kind == "i":
            if ids.dtype.kind not in "iu":
                texts = np.char.decode(ids, "utf-8") if ids.dtype.kind == "S" else ids
                numbers = [_number(text) for text in texts.tolist()]
                known = np.array([number is not None for number in numbers], bool)
                ids = np.array([number or 0 for number in numbers], np.int64)
                return np.where(known, self.rows(ids), -1)
        else:
            ids = utf8(ids)
        if not len(self._ids):
            return np.full(len(ids), -1)
        at = np.searchsorted(self._ids, ids).clip(max=len(self._ids) - 1)
        rows = at if self._rows is None else self._rows[at]
        return np.where(self._ids[at] == ids, rows, -1).astype(np.int64)


def _number(text: object) -> int | None:
    """The integer that an id is written as, if it is one of 64 bits."""
    try:
        number = int(str(text))
    except ValueError:
        return None
    return number if str(number) == str(text) and abs(number) < 2**63 else None


def utf8(ids: np.ndarray) -> np.ndarray:
    """Ids as text of UTF-8, of as many bytes as the longest has; its order is that of letters."""
    if ids.dtype.kind == "S":
        return ids
    blocks = [
        np.char.encode(ids[first : first + AT_ONCE].astype(str), "utf-8")
        for first in range(0, len(ids), AT_ONCE)
    ]
    return np.concatenate(blocks) if blocks else np.empty(0, "S1")


def distinct_ids(blocks: Iterable[np.ndarray]) -> Nodes:
    """The nodes that edges name, in the order of their ids: integers if all of them are.

    Args:
        blocks: Some of the ids at a time.
    """
    known: np.ndarray = np.empty(0, np.int64)
    new: list[np.ndarray] = []
    size = 0
    for ids in blocks:
        ids = ids.astype(np.int64, copy=False) if ids.dtype.kind in "iu" else utf8(ids)
        if ids.dtype.kind == known.dtype.kind and len(known):
            at = np.searchsorted(known, ids).clip(max=len(known) - 1)
            ids = ids[known[at] != ids]
        new.append(ids)
        size += len(ids)
        if size > max(len(known), AT_ONCE):  # Each id is merged a few times, not with every block.
            known, new, size = _merged([known, *new]), [], 0
    known = _merged([known, *new])
    ids = known if known.dtype.kind == "i" else np.concatenate([*_texts(known)])
    return Nodes(len(ids), ids, "the edges")


def _merged(parts: list[np.ndarray]) -> np.ndarray:
    parts = [part for part in parts if len(part)] or parts[:1]
    if any(part.dtype.kind == "S" for part in parts):
        parts = [utf8(part) for part in parts]
    return np.unique(np.concatenate(parts))


def _texts(ids: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(ids), AT_ONCE):
        yield np.char.decode(ids[first : first + AT_ONCE], "utf-8")
