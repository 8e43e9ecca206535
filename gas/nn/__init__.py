"""Operators for graph neural networks, and PyG's convolutions on them."""

from gas.nn.adjacency import Adjacency
from gas.nn.attention import gat_attention
from gas.nn.attention_v2 import gatv2_attention
from gas.nn.conv import GCN2Conv, GCNConv, GINConv, GraphConv, SAGEConv, SimpleConv
from gas.nn.conv_attention import GATConv, GATv2Conv
from gas.nn.conv_edge import EdgeConv, GMMConv
from gas.nn.dropout import Dropout, dropout
from gas.nn.edge_conv import edge_conv
from gas.nn.fuse import fuse
from gas.nn.mixture import gaussian_mixture
from gas.nn.spmm import spmm

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
    "SAGEConv",
    "SimpleConv",
    "dropout",
    "edge_conv",
    "fuse",
    "gat_attention",
    "gatv2_attention",
    "gaussian_mixture",
    "spmm",
]
