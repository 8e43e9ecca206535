"""Models of typed graphs, with a history for each type of nodes and layer."""

from gas.hetero.convert import to_typed
from gas.hetero.model import HeteroModel

__all__ = ["HeteroModel", "to_typed"]
