"""Operators for graph neural networks, and PyG's convolutions on them."""

from gas.graph import Adjacency
from gas.nn.attention import GATConv, GATv2Conv, gat_attention, gatv2_attention
from gas.nn.conv import FusedConv, add_weight, apply_rowwise
from gas.nn.dropout import BATCH_NORMS, Dropout, dropout, relu_dropout
from gas.nn.edge_conv import EdgeConv, edge_conv
from gas.nn.fuse import deep_copy, fuse, twin
from gas.nn.hetero import relations, share_products
from gas.nn.inexact import (
    BY_TIME,
    NeverExactError,
    check_exact,
    explain_failures,
    reason_inexact,
)
from gas.nn.mixture import GMMConv, gaussian_mixture
from gas.nn.sparse_features import LINEAR_LAYERS, Linear, has_hooks, linear
from gas.nn.spmm import spmm
from gas.nn.sum_convs import (
    GCN2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    ProjectedConv,
    SAGEConv,
    SimpleConv,
    SumConv,
)
from gas.nn.weights import Neighbours, check_weights

__all__ = [
    "add_weight",
    "Adjacency",
    "BATCH_NORMS",
    "BY_TIME",
    "Dropout",
    "EdgeConv",
    "FusedConv",
    "GATConv",
    "GATv2Conv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "GMMConv",
    "GraphConv",
    "LINEAR_LAYERS",
    "Linear",
    "Neighbours",
    "ProjectedConv",
    "SAGEConv",
    "SimpleConv",
    "SumConv",
    "apply_rowwise",
    "check_weights",
    "deep_copy",
    "dropout",
    "edge_conv",
    "fuse",
    "gat_attention",
    "gatv2_attention",
    "gaussian_mixture",
    "has_hooks",
    "linear",
    "check_exact",
    "explain_failures",
    "NeverExactError",
    "reason_inexact",
    "relations",
    "relu_dropout",
    "share_products",
    "spmm",
    "twin",
]
