"""The graph as the arguments of a layer, and the check that it was normalised as a whole."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gas.graph import Adjacency, layout_of
from gas.history import Rows, first_rows


class Neighbours(NamedTuple):
    """The arguments of a layer that describe the graph.

    * ``adj_t``: the adjacency, in any layout.
    * ``edge_weight``: weights of shape ``[E]``, with the layout ``"edge_index"`` alone.
    * ``batch_size``: the number of in-batch nodes; ``None`` on a full batch.
    """

    adj_t: Any
    edge_weight: Tensor | None
    batch_size: int | None

    @property
    def supports_rows(self) -> bool:
        """Return whether layers support :class:`gas.history.Rows`: layout ``"fused"``."""
        adj_t = self.adj_t
        return isinstance(adj_t, Adjacency) and adj_t.size(0) == self.batch_size

    @property
    def num_rows(self) -> int | None:
        """The number of rows of the adjacency; ``None`` in the layout ``"edge_index"``."""
        return layout_of(self.adj_t).num_rows(self.adj_t)

    def layer_input(self, x: Tensor | Rows) -> Tensor | Rows | tuple[Tensor, Tensor]:
        """Return the features of sources, with those of destinations if these are fewer."""
        if isinstance(x, Rows):
            return x
        rows = self.batch_size if self.num_rows is None else self.num_rows
        return x if rows is None or rows == x.size(0) else (x, first_rows(x, rows))


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
