"""Read features of nodes from tables and arrays, in blocks or at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gas.datasets.arrays import map_features
from gas.datasets.nodes import NodeFile, Nodes
from gas.datasets.roles import NODE_COLUMNS, open_table
from gas.datasets.tables import format_of


class FeatureSource(NamedTuple):
    """Location of the features: the role of their file, their columns, and ids of rows, if any."""

    role: str
    names: tuple[str, ...]
    ids: np.ndarray | None

    def blocks(
        self, files: Mapping[str, Path], columns: Mapping[str, str], at_once: int | None = None
    ) -> Iterator[np.ndarray]:
        """Yield features in the order of their file, float32, of shape ``[rows, F]``.

        Args:
            files: The files by role.
            columns: Names of columns by role, given by the user.
            at_once: The number of rows to read at a time. (default: all, in one block)
        """
        file = files[self.role]
        if format_of(file) == ".npy":
            array = map_features(file)
            step = at_once or max(1, len(array))
            for first in range(0, max(1, len(array)), step):
                yield array[first : first + step].astype(np.float32)
            return
        table, _ = open_table(file, NODE_COLUMNS, columns)
        types = table.number_types(self.names)
        first = 0
        for block in table.pieces(types, at_once=at_once):
            yield table.floats(block, self.names, first_row=first).astype(np.float32, copy=False)
            first += block.num_rows

    def rows(self, nodes: Nodes, file: str) -> np.ndarray | None:
        """Return the node of each row; ``None`` if they are in order."""
        if self.ids is None or nodes.ids is None:
            return None
        rows = nodes.rows(self.ids, file)
        return None if bool((rows == np.arange(len(rows))).all()) else rows


def find_features(read: Mapping[str, NodeFile], nodes: Nodes, has_x: bool) -> FeatureSource | None:
    """Find the dense features among files about nodes; ``None`` if there are none."""
    roles = [role for role, file in read.items() if file.features is not None]
    if not roles:
        return None
    file = read[roles[0]]
    if len(roles) + has_x > 1:
        raise ValueError(
            f"'x' is in {file.name}, and in another file as well: take one of them out"
        )
    if file.num_rows != nodes.num_nodes:
        raise ValueError(
            f"{file.name} has {file.num_rows} rows, but {nodes.file} has {nodes.num_nodes} "
            "nodes: expected one row per node"
        )
    return FeatureSource(roles[0], file.features or (), file.ids)
