"""Making the layers of a model those of :mod:`gas.nn`."""

from __future__ import annotations

import torch

from gas.nn.attention import GATConv
from gas.nn.attention_v2 import GATv2Conv
from gas.nn.conv import pyg_class
from gas.nn.dropout import Dropout
from gas.nn.edge_conv import EdgeConv
from gas.nn.gcn import GCN2Conv, GCNConv
from gas.nn.mixture import GMMConv
from gas.nn.sparse_features import LINEAR
from gas.nn.sum_convs import GINConv, GraphConv, SAGEConv, SimpleConv

CONVS = (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GMMConv,
    GraphConv,
    SAGEConv,
    SimpleConv,
)
FUSED: dict[type, type] = {
    torch.nn.Dropout: Dropout,
    **LINEAR,
    **{pyg_class(cls): cls for cls in CONVS},
}


def fuse(model: torch.nn.Module) -> torch.nn.Module:
    """Make every PyG convolution of a model that can use the fused operators do so, in place.

    Weights, hooks and ``state_dict`` stay as they are; layers of other classes, subclasses of PyG's
    included, are left alone. Load batches with ``layout='fused'``. Layers that are
    :class:`torch.nn.Dropout` draw faster, see :func:`gas.nn.dropout`; a ``forward`` that calls
    ``torch.nn.functional.dropout`` may call that instead. Linear layers take sparse features.

    Args:
        model: Any model.

    Returns:
        The model.
    """
    for module in model.modules():
        cls = FUSED.get(type(module))
        if cls is not None:
            module.__class__ = cls
            if "propagate" in vars(module) and not module.explain:
                del module.propagate  # PyG's own, which an explanation has left there.
    return model
