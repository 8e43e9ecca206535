"""Graphs that get new nodes and edges, or lose edges, while a model is trained on them."""

from gas.growing.graph import GrowingGraph

__all__ = ["GrowingGraph"]
