"""Quality of a partition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gas.graph.attributes import PARTS
from gas.graph.edges import read_csr
from gas.graph.folder.opening import check_is_graph
from gas.native import Relabeler


@dataclass(frozen=True)
class PartitionReport:
    """Quality of a partition, from :func:`partition_report`.

    ``size``, ``halo`` and ``cut`` have shape ``[num_parts]``: the number of nodes of each part, of
    halo nodes, whose histories are pulled for it, and of edges into it from other parts.
    """

    num_nodes: int
    num_edges: int
    size: Tensor = field(repr=False)
    halo: Tensor = field(repr=False)
    cut: Tensor = field(repr=False)

    @property
    def edge_cut(self) -> float:
        """The fraction of edges between different parts."""
        return int(self.cut.sum()) / max(self.num_edges, 1)

    @property
    def balance(self) -> float:
        """The largest part over the average one; 1 is perfect."""
        return int(self.size.max()) * self.size.numel() / max(self.num_nodes, 1)

    @property
    def halo_ratio(self) -> float:
        """Halo nodes per in-batch node, when each batch is one part."""
        return int(self.halo.sum()) / max(self.num_nodes, 1)

    def __str__(self) -> str:
        rows = [
            ("parts", f"{self.size.numel()}"),
            ("nodes per part", _spread(self.size)),
            ("balance (largest / mean)", f"{self.balance:.3f}"),
            ("edges between parts", f"{int(self.cut.sum()):,} ({100 * self.edge_cut:.1f} %)"),
            ("halo nodes per part", _spread(self.halo)),
            ("halo nodes per node", f"{self.halo_ratio:.2f}"),
        ]
        return "\n".join(f"{name:<25}{value}" for name, value in rows)


def _spread(values: Tensor) -> str:
    """Return mean, minimum and maximum as text."""
    low, high = int(values.min()), int(values.max())
    return f"{float(values.double().mean()):,.1f} ({low:,} to {high:,})"


def partition_report(data: Data, ptr: Tensor | None = None) -> PartitionReport:
    """Measure a partition: edge cut, halo size per part, balance.

    Args:
        data: The permuted graph.
        ptr: The parts, of shape ``[num_parts + 1]``, from :func:`gas.metis`.
            (default: ``data.parts``, from :func:`gas.cluster`)

    Returns:
        The quality of the partition; printed, a table.

    Raises:
        ValueError: If the graph has no parts, or ``ptr`` is of another graph.
    """
    check_is_graph(data)
    if isinstance(data, HeteroData):
        raise ValueError(
            "'data' is a HeteroData, whose edges have types, expected a homogeneous graph, a Data"
        )
    ptr = data.get(PARTS) if ptr is None else ptr
    (rowptr, col, _), _ = read_csr(data, edge_weight=False)
    check_ptr(ptr, rowptr.numel() - 1)
    relabel = Relabeler(rowptr, col)
    halo, cut = [], []
    for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        _, col, _, n_id, _ = relabel(torch.arange(begin, end))
        halo.append(n_id.numel() - (end - begin))
        cut.append(int((col >= end - begin).sum()))
    size = ptr.diff()
    return PartitionReport(
        relabel.num_nodes, relabel.col.numel(), size, torch.tensor(halo), torch.tensor(cut)
    )


def check_ptr(ptr: Any, num_nodes: int) -> None:
    """Refuse parts that don't cover the nodes ``0 .. num_nodes - 1``."""
    if not isinstance(ptr, Tensor) or ptr.dtype != torch.long or ptr.dim() != 1 or len(ptr) < 2:
        what = f"{ptr.dtype} of shape {list(ptr.shape)}" if isinstance(ptr, Tensor) else repr(ptr)
        cure = ", such as data.parts after data = gas.cluster(data, num_parts)"
        if isinstance(ptr, int):
            cure = f": to set the parts per mini-batch, pass batch_size={ptr}"
        raise ValueError(
            f"'ptr' is {what}, expected an int64 tensor of shape [num_parts + 1]{cure}"
        )
    falls = bool((ptr.diff() < 0).any())
    if int(ptr[0]) != 0 or int(ptr[-1]) != num_nodes or falls:
        between = ", falling in between" * falls
        raise ValueError(
            f"'ptr' runs from {int(ptr[0])} to {int(ptr[-1])}{between}, expected it to rise from 0 "
            f"to the number of nodes, {num_nodes}: use the 'ptr' that came with this graph's 'perm'"
        )
