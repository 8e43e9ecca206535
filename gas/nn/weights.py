"""Check that a graph was normalised as a whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gas.graph import layout_of


def check_weights(adj_t: Any, edge_weight: Tensor | None) -> None:
    """Refuse a graph that has not been normalised.

    A batch lacks edges of its halo, so that degrees can't be computed from it.

    Raises:
        ValueError: If the edges have no weights, or every weight is 1.
    """
    layout = layout_of(adj_t, "adj_t")
    value = edge_weight if layout.num_rows(adj_t) is None else layout.value(adj_t)
    missing = value is None
    if value is not None and layout.name == "csr" and not adj_t.is_cuda:
        # A matrix without weights has ones. Normalised weights are one only for nodes with just a
        # self-loop. (On a GPU, the comparison would synchronise.)
        plain = value.numel() > 0 and bool(value[0] == 1) and bool((value == 1).all())
        row, col = layout.entries(adj_t)
        missing = plain and bool((col != row).any())
    if missing:
        raise ValueError(
            "'adj_t' has no edge weights, expected the symmetric normalisation of the whole graph: "
            "apply torch_geometric.transforms.GCNNorm() to the data before gas.metis, and pass "
            "edge_weight=batch.edge_weight with the layout 'edge_index'"
        )
