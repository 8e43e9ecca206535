"""Graphs larger than memory, from tables and arrays into a graph folder."""

from gas.datasets.importing.graph import import_graph

__all__ = ["import_graph"]
