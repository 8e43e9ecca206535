"""Graphs larger than memory, from tables and arrays into a graph folder."""

from gas.datasets.importing.stages import import_graph

__all__ = ["import_graph"]
