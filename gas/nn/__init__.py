"""Operators for graph neural networks, and PyG's convolutions on them."""

from gas.nn.adjacency import Adjacency
from gas.nn.attention import gat_attention
from gas.nn.conv import GATConv, GCN2Conv, GCNConv, GINConv, GraphConv, SAGEConv, SimpleConv, fuse
from gas.nn.dropout import dropout
from gas.nn.spmm import spmm

__all__ = [
    "Adjacency",
    "GATConv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "GraphConv",
    "SAGEConv",
    "SimpleConv",
    "dropout",
    "fuse",
    "gat_attention",
    "spmm",
]
