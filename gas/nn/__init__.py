"""Operators for graph neural networks, and PyG's convolutions on them."""

from gas.graph.adjacency import Adjacency
from gas.nn.attention import GATConv, gat_attention
from gas.nn.attention_v2 import GATv2Conv, gatv2_attention
from gas.nn.dropout import Dropout, dropout
from gas.nn.edge_conv import EdgeConv, edge_conv
from gas.nn.fuse import fuse
from gas.nn.gcn import GCN2Conv, GCNConv
from gas.nn.hetero import relations
from gas.nn.mixture import GMMConv, gaussian_mixture
from gas.nn.sparse_features import Linear, linear
from gas.nn.spmm import spmm
from gas.nn.sum_convs import GINConv, GraphConv, SAGEConv, SimpleConv

__all__ = [
    "Adjacency",
    "Dropout",
    "EdgeConv",
    "GATConv",
    "GATv2Conv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "GMMConv",
    "GraphConv",
    "Linear",
    "SAGEConv",
    "SimpleConv",
    "dropout",
    "edge_conv",
    "fuse",
    "gat_attention",
    "gatv2_attention",
    "gaussian_mixture",
    "linear",
    "relations",
    "spmm",
]
