"""Models of typed graphs, with a history for each type of nodes and layer."""

from gas.scalable.hetero.convert import to_typed
from gas.scalable.hetero.model import HeteroModel

__all__ = ["HeteroModel", "to_typed"]
