"""Replacement of a model's layers by those of :mod:`gas.nn`."""

from __future__ import annotations

import torch

from gas.nn.attention import GATConv, GATv2Conv
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
    """Replace PyG's convolutions of a model by fused ones, in place.

    Weights, hooks and ``state_dict`` don't change; other layers, including subclasses of PyG's, are
    left as they are. Load batches with ``layout='fused'``. :class:`torch.nn.Dropout` becomes
    :class:`gas.nn.Dropout`, which is faster; replace ``torch.nn.functional.dropout`` by
    :func:`gas.nn.dropout` yourself. Linear layers take sparse features.

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
                del module.propagate  # PyG's function, left by an explanation.
    return model
