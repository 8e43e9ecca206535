"""Models that train with historical embeddings; a full batch fills the histories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import gas
from gas import SubData

__all__ = ["APPNP", "GAT", "GCN", "GCN2", "PNA", "PNA_JK", "ScalableGNN"]


class ScalableGNN(gas.ScalableGNN):
    """:class:`gas.ScalableGNN`, whose full batches write the histories.

    ``model(x, adj_t)`` fills them if ``x`` has a row for each of the model's nodes: scripts
    evaluate in this way after every epoch, so that the next one reads fresh rows. It leaves them
    alone on a graph of another size, and with ``fill=False``. A graph of the same size is taken for
    the one that is trained on: pass ``fill=False`` for any other.
    """

    def _should_fill(self, x: Any, batch_size: int | None, n_id: Tensor | None) -> bool:
        is_whole = isinstance(x, Tensor) and x.size(0) == self.num_nodes
        return is_whole and batch_size is None and n_id is None

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
