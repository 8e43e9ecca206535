"""Operators for graph neural networks."""

from gas.nn.adjacency import Adjacency
from gas.nn.attention import gat_attention
from gas.nn.dropout import dropout
from gas.nn.spmm import spmm

__all__ = ["Adjacency", "dropout", "gat_attention", "spmm"]
