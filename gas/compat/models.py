"""Models that train with historical embeddings; a full batch fills the histories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import gas
from gas import SubData
from gas.native import skip_frame

__all__ = ["APPNP", "GAT", "GCN", "GCN2", "PNA", "PNA_JK", "ScalableGNN"]


class ScalableGNN(gas.ScalableGNN):
    """:class:`gas.ScalableGNN`, whose full batches write the histories.

    ``model(x, adj_t)`` fills them if ``x`` has a row for each of the model's nodes: scripts
    evaluate in this way after every epoch, so that the next one reads fresh rows. It leaves them
    alone on a graph of another size, and with ``fill=False``. A graph of the same size is taken for
    the one that is trained on: pass ``fill=False`` for any other.
    """

    @skip_frame
    def __call__(
        self,
        x: Tensor | SubData | None = None,
        adj_t: Any = None,
        batch_size: int | None = None,
        n_id: Tensor | None = None,
        offset: Tensor | None = None,
        count: Tensor | None = None,
        loader: Iterable[SubData] | None = None,
        *,
        fill: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """See :meth:`gas.ScalableGNN.__call__`.

        Args:
            x: A mini-batch, or node features.
            adj_t: The adjacency.
            batch_size: The number of in-batch nodes.
            n_id: Global ids of in-batch nodes, then of the halo.
            offset: First global row of each part in the batch.
            count: Number of nodes of each part in the batch.
            loader: Batches that cover every node once, to compute layer by layer.
            fill: Write the histories from a full batch. (default: if ``x`` has as many rows as the
                model has nodes)
            **kwargs: Further arguments.
        """
        if fill is None:
            whole = isinstance(x, Tensor) and x.size(0) == self.num_nodes
            fill = whole and batch_size is None and n_id is None
        return super().__call__(
            x, adj_t, batch_size, n_id, offset, count, loader=loader, fill=fill, **kwargs
        )

    @property
    def emb_device(self) -> torch.device:
        """Return the device of the histories."""
        return self.histories[0].device if self.histories else torch.device("cpu")

    def mini_inference(self, loader: Iterable[SubData]) -> Tensor:
        """Run layer-wise inference, ``model(loader=loader)``."""
        return self(loader=loader)


class GCN(ScalableGNN, gas.models.GCN):
    """See :class:`gas.models.GCN`."""


class GAT(ScalableGNN, gas.models.GAT):
    """See :class:`gas.models.GAT`."""


class APPNP(ScalableGNN, gas.models.APPNP):
    """See :class:`gas.models.APPNP`."""


class GCN2(ScalableGNN, gas.models.GCN2):
    """See :class:`gas.models.GCN2`."""


class PNA(ScalableGNN, gas.models.PNA):
    """See :class:`gas.models.PNA`."""


class PNA_JK(ScalableGNN, gas.models.PNA_JK):  # noqa: N801  # The published name.
    """See :class:`gas.models.PNA_JK`."""
