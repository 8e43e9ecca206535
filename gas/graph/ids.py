"""Look up the rows of node ids in a sorted array."""

from __future__ import annotations

from typing import Any

import numpy as np

AT_ONCE = 1 << 20  # Ids that are encoded as text together.


class Ids:
    """Index from the ids of nodes, integers or text, to their rows.

    Args:
        ids: The id of each row, of shape ``[N]``, integers or text. ``None``: ids are rows.
        num_nodes: The number of nodes.
    """

    def __init__(self, ids: np.ndarray | None, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self._ids = self._rows = None
        if ids is None:
            return
        ids = ids if ids.dtype.kind == "i" else encode_utf8(ids)
        if bool((ids[1:] > ids[:-1]).all()):
            self._ids = ids
        else:
            order = np.argsort(ids, kind="stable")
            self._ids, self._rows = ids[order], order

    def find_duplicate(self) -> Any:
        """Return an id that several nodes have; ``None`` if there is none."""
        if self._ids is None or self._rows is None:
            return None
        again = np.flatnonzero(self._ids[1:] == self._ids[:-1])
        if not again.size:
            return None
        found = self._ids[again[0]].item()
        return found.decode("utf-8") if isinstance(found, bytes) else found

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the row of each id, int64; -1 where there is none."""
        are_numbers = self._ids is None or self._ids.dtype.kind == "i"
        if are_numbers and ids.dtype.kind == "u":  # Beside int64, NumPy would round large ones.
            return np.where(ids < 2**63, self.rows(ids.astype(np.int64)), -1)
        if self._ids is None:
            if ids.dtype.kind not in "iu":
                return np.full(len(ids), -1)
            return np.where((ids >= 0) & (ids < self.num_nodes), ids, -1).astype(np.int64)
        if self._ids.dtype.kind == "i":
            if ids.dtype.kind not in "iu":
                texts = np.char.decode(ids, "utf-8") if ids.dtype.kind == "S" else ids
                numbers = [_parse_integer(text) for text in texts.tolist()]
                known = np.array([number is not None for number in numbers], bool)
                ids = np.array([number or 0 for number in numbers], np.int64)
                return np.where(known, self.rows(ids), -1)
        else:
            ids = encode_utf8(ids)
        if not len(self._ids):
            return np.full(len(ids), -1)
        at = np.searchsorted(self._ids, ids).clip(max=len(self._ids) - 1)
        rows = at if self._rows is None else self._rows[at]
        return np.where(self._ids[at] == ids, rows, -1).astype(np.int64)


def _parse_integer(text: object) -> int | None:
    """Parse an id in canonical decimal notation; return ``None`` for others, and beyond 64 bits."""
    try:
        number = int(str(text))
    except ValueError:
        return None
    return number if str(number) == str(text) and abs(number) < 2**63 else None


def encode_utf8(ids: np.ndarray) -> np.ndarray:
    """Encode ids as UTF-8 of a fixed width, which keeps the order of characters."""
    if ids.dtype.kind == "S":
        return ids
    blocks = [
        np.char.encode(ids[first : first + AT_ONCE].astype(str), "utf-8")
        for first in range(0, len(ids), AT_ONCE)
    ]
    return np.concatenate(blocks) if blocks else np.empty(0, "S1")
