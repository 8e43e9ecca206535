"""Full batches: the whole graph as one batch without a halo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import Versions, with_csr_features
from gas.loader import EvalSubgraphLoader, SubData, SubgraphLoader, iter_tensors
from gas.scalable import GraphNorms, ScalableGNN, has_equal_variances, preserve_modes

MOST_NODES, MOST_EDGES = 20_000, 3_000_000


def fits_one_batch(num_nodes: int, num_edges: int) -> bool:
    """Return whether a graph is small enough to be evaluated as one batch."""
    return num_nodes <= MOST_NODES and num_edges <= MOST_EDGES


class FullBatch:
    """The whole graph as one batch without a halo, for full-batch training and evaluation.

    It is an epoch of that one batch, and a function of a model.

    Args:
        data: The graph.
        device: Where to keep it. (default: ``"cpu"``)
        layout: See :class:`gas.SubgraphLoader`. (default: ``"csr"``)
        edge_weight: See :class:`gas.SubgraphLoader`. (default: ``True``)
        check: See :class:`gas.SubgraphLoader`.
        like: See :class:`gas.SubgraphLoader`.
    """

    def __init__(
        self,
        data: Data,
        device: torch.device | str = "cpu",
        layout: str = "csr",
        edge_weight: bool = True,
        check: bool | None = None,
        like: SubgraphLoader | None = None,
    ) -> None:
        data = with_csr_features(data)
        whole = torch.tensor([0, data.num_nodes])
        options: dict[str, Any] = {"layout": layout, "edge_weight": edge_weight, "like": like}
        loader = EvalSubgraphLoader(data, whole, check=check, log=False, **options)
        self.data = next(iter(loader)).to(device).data
        self._versions = Versions(iter_tensors(self.data))

    def __call__(self, model: ScalableGNN, fill: bool = False) -> Tensor:
        """Compute every node's output, of shape ``[N, C]``."""
        self._check()
        x, adj_t, kwargs = model.inputs_of(self.data)
        return model(x, adj_t, fill=fill, **kwargs)

    @torch.no_grad()
    def refresh(self, model: ScalableGNN, fill: bool = True) -> None:
        """Set running statistics of batch norms; see :meth:`gas.ScalableGNN.refresh`.

        Args:
            model: The model.
            fill: Fill the histories. (default: ``True``)
        """
        norms = GraphNorms(model)
        with preserve_modes(model, False):
            with norms.install(), norms.watch_batch(is_whole=True):
                self(model, fill)
            norms.write()

    @torch.no_grad()
    def refresh_and_predict(self, model: ScalableGNN, fill: bool = False) -> Tensor:
        """Set running statistics of norms in training mode, and compute every node's output.

        It is :meth:`refresh`, and then a forward pass in evaluation mode. From 10,000 nodes on,
        both are one pass if each norm is called once.

        Args:
            model: The model.
            fill: Fill the histories. (default: ``False``)
        """
        if not has_equal_variances(self.data.num_nodes):
            self.refresh(model, fill=False)
            with preserve_modes(model, False):
                return self(model, fill)
        norms = GraphNorms(model, as_evaluation=True)
        with preserve_modes(model, False):
            with norms.install(), norms.watch_batch(is_whole=True):
                out = self(model, fill)
            return out if norms.write() else self(model, fill)

    def _check(self) -> None:
        """Refuse a graph that was changed in place."""
        if self._versions.has_changed():
            raise ValueError(
                "a tensor of the full batch was changed in place, perhaps by the model's forward: "
                "expected the graph as it was, for the next epoch; change a clone() of it"
            )

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[SubData]:
        empty = torch.empty(0, dtype=torch.long)
        self._check()
        yield SubData(copy.copy(self.data), self.data.num_nodes, empty, empty, empty)


def make_full_batch(model: ScalableGNN, loader: SubgraphLoader) -> FullBatch | None:
    """Return the graph of a loader as one batch, if it is small or trained as a full batch."""
    is_small = fits_one_batch(loader.data.num_nodes, int(loader.degree.sum()))
    if loader.ptr.numel() > 2 and not is_small:
        return None
    options = loader.layout, loader.edge_weight, False
    return FullBatch(loader.data, model.device, *options, like=loader)
