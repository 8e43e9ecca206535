"""Find and read dense features of nodes in tables and arrays, in blocks or at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gas.datasets.arrays import map_features
from gas.datasets.nodes import NodeFile, Nodes
from gas.datasets.roles import NODE_COLUMNS, open_table
from gas.datasets.tables import format_of
from gas.history import Codec


def float_type(*types: np.dtype) -> type:
    """Return float32 if it holds all values of some types, else float64."""
    return np.float32 if all(np.can_cast(kind, np.float32) for kind in types) else np.float64


class FeatureSource(NamedTuple):
    """Location of the features: the role of their file, their columns, and ids of rows, if any."""

    role: str
    names: tuple[str, ...]
    ids: np.ndarray | None

    def blocks(
        self, files: Mapping[str, Path], columns: Mapping[str, str], at_once: int = 4096
    ) -> Iterator[np.ndarray]:
        """Yield features in the order of their file, of shape ``[rows, F]``.

        They are float32 if that holds the values of the file's types, else float64.

        Args:
            files: The files by role.
            columns: Names of columns by role, given by the user.
            at_once: The number of rows to read at a time. (default: ``4096``)
        """
        file = files[self.role]
        if format_of(file) == ".npy":
            array = map_features(file)
            dtype = float_type(array.dtype)
            for first in range(0, max(1, len(array)), at_once):
                yield array[first : first + at_once].astype(dtype)
            return
        table, _ = open_table(file, NODE_COLUMNS, columns)
        dtype = float_type(*map(table.numpy_type, self.names))
        types = table.number_types(self.names, dtype)
        first = 0
        for block in table.pieces(types, at_once=at_once):
            yield table.floats(block, self.names, dtype, first).astype(dtype, copy=False)
            first += block.num_rows

    def read(self, files: Mapping[str, Path], columns: Mapping[str, str], nodes: Nodes) -> Tensor:
        """Read all features in the order of the nodes, float32, of shape ``[N, F]``.

        Raises:
            ValueError: If a value is too large for float32, naming it.
        """
        file, codec, first = files[self.role], Codec("float32"), 0
        rows = self.rows(nodes, file.name)
        x = torch.empty(nodes.num_nodes, len(self.names))
        for block in self.blocks(files, columns):
            values = codec.cast(torch.from_numpy(block), first, f"'x' of {file.name}")
            if first == 0:
                x = torch.empty(nodes.num_nodes, values.size(1))
            last = first + len(values)
            x[slice(first, last) if rows is None else rows[first:last]] = values
            first = last
        return x

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
