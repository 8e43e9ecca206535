"""Dynamic graphs: nodes and edges are added, edges removed, while a model is trained on them."""

from gas.contrib.dynamic.graph import DynamicGraph

__all__ = ["DynamicGraph"]
