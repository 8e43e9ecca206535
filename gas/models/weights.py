"""The check of models whose edge weights are a normalisation of the whole graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gas.nn import Adjacency
from gas.subgraph import is_sparse_tensor, row_ids


def check_weights(adj_t: Any, edge_weight: Tensor | None) -> None:
    """Refuses a graph that has not been normalised.

    A batch sees only a part of its halo's edges, so degrees can't be computed from it.

    Raises:
        ValueError: If the edges have no weights, or every weight is 1.
    """
    if isinstance(adj_t, Adjacency):
        missing = adj_t.value is None
    elif is_sparse_tensor(adj_t):
        missing = not adj_t.has_value()
    elif isinstance(adj_t, Tensor) and not adj_t.is_sparse and not adj_t.is_sparse_csr:
        missing = edge_weight is None
    elif isinstance(adj_t, Tensor) and adj_t.is_sparse_csr and not adj_t.is_cuda:
        # Where no weights were given, the matrix is filled with ones. (On a GPU, looking would
        # make the host wait.) Ones are right for nodes with nothing but a self-loop: any other
        # edge makes the degree of its destination 2 or more.
        value = adj_t.values()
        plain = value.numel() > 0 and bool(value[0] == 1) and bool((value == 1).all())
        missing = plain and bool((adj_t.col_indices() != row_ids(adj_t.crow_indices())).any())
    else:
        missing = False
    if missing:
        raise ValueError(
            "'adj_t' has no edge weights, expected the symmetric normalisation of the whole graph: "
            "apply torch_geometric.transforms.GCNNorm() to the data before gas.metis, and pass "
            "edge_weight=batch.edge_weight with the layout 'edge_index'"
        )
