"""Models of heterogeneous graphs, with a history for each node type and layer."""

from gas.scalable.hetero.convert import to_hetero_model
from gas.scalable.hetero.model import HeteroModel

__all__ = ["HeteroModel", "to_hetero_model"]
